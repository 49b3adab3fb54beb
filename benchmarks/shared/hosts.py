"""Hosts on one machine: network namespaces joined by veth pairs (``ip netns``, Debian's iproute2).

Tests use them too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

DEVICE = "ft0"
"""The end of the link on each host."""
_SWITCH = "switch"

_TCP_SETTINGS = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
"""Settings of both hosts, so that figures do not depend on the machine's defaults. With a congestion control that paces
packets (BBR), or that restarts slowly after a pause, the speed of one batch was seen to vary 20-fold on this link."""

_CLONE_NEWNET = 0x40000000  # Linux constants that Python 3.11 does not name
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19
_MNT_DETACH = 2
_PREFIX = "10.77.0."
_LIMIT_S = 20.0


class NoHosts(Exception):
    """This machine does not allow new network namespaces; the message gives the reason."""


@dataclass(frozen=True)
class Host:
    """A namespace, and the address at which the others reach it."""

    namespace: str
    address: str

    def command(self, arguments: list[str]) -> list[str]:
        """The command line that runs ``arguments`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def received_nbytes(self) -> int:
        """Bytes received over the link."""
        return int(_run(self.command(["cat", f"/sys/class/net/{DEVICE}/statistics/rx_bytes"])))

    def num_connections(self) -> int:
        """TCP connections to other hosts that are open."""
        lines = _run(self.command(["ss", "-Htn", "state", "established"])).splitlines()
        return sum(
            line.split()[-1].rsplit(":", 1)[0].strip("[]").removeprefix("::ffff:") != self.address for line in lines
        )

    def pids(self) -> list[int]:
        """Its processes."""
        return [int(pid) for pid in _run(["ip", "netns", "pids", self.namespace]).split()]

    def enter(self) -> None:
        """Move the calling thread, and all that it starts afterwards, to this host, as ``ip netns exec`` does."""
        with open(f"/run/netns/{self.namespace}") as namespace:
            _libc("setns", namespace.fileno(), _CLONE_NEWNET)
        # /sys shows the devices of the namespace in which it was mounted.
        _libc("unshare", _CLONE_NEWNS)
        _libc("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
        _libc("umount2", b"/sys", _MNT_DETACH)
        _libc("mount", self.namespace.encode(), b"/sys", b"sysfs", 0, None)

    def end_processes(self) -> None:
        """End every process on this host."""
        deadline = time.monotonic() + _LIMIT_S
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes of {self.namespace} that cannot be ended: {pids}")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def end(self) -> None:
        """End every process on this host, then the host."""
        self.end_processes()
        _run(["ip", "netns", "del", self.namespace])


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts and the link between them, until the block ends. Raises NoHosts."""
    with _made_hosts(2) as hosts:
        first, second = (host.namespace for host in hosts)
        _set_up(f"ip link add {DEVICE} netns {first} type veth peer name {DEVICE} netns {second}".split())
        _configure(hosts)
        yield hosts[0], hosts[1]


@contextmanager
def switched_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """``count`` hosts, each with a link to one switch, until the block ends. Raises NoHosts."""
    with _made_hosts(count + 1) as (*hosts, switch):
        _set_up(f"ip -n {switch.namespace} link add {_SWITCH} type bridge".split())
        for number, host in enumerate(hosts):
            port, end = f"port{number}", switch.namespace
            _set_up(f"ip link add {DEVICE} netns {host.namespace} type veth peer name {port} netns {end}".split())
            _set_up(f"ip -n {end} link set {port} master {_SWITCH} up".split())
        _set_up(f"ip -n {switch.namespace} link set {_SWITCH} up".split())
        _configure(hosts)
        yield tuple(hosts)


@contextmanager
def _made_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """``count`` hosts without a link."""
    if shutil.which("ip") is None:
        raise NoHosts("there is no `ip` command here (Debian's iproute2)")
    hosts = [Host(f"ft{os.getpid()}-{number}", f"{_PREFIX}{number + 1}") for number in range(count)]
    with ExitStack() as stack:
        for host in hosts:
            _set_up(["ip", "netns", "add", host.namespace])
            stack.callback(host.end)
        yield tuple(hosts)


def _configure(hosts: Sequence[Host]) -> None:
    for host in hosts:
        _set_up(f"ip -n {host.namespace} address add {host.address}/24 dev {DEVICE}".split())
        for device in ("lo", DEVICE):
            _set_up(f"ip -n {host.namespace} link set {device} up".split())
        for name, value in _TCP_SETTINGS.items():
            _set_up(host.command(["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}"]))


def _set_up(command: list[str]) -> None:
    """Run a command that only a machine without namespaces refuses. Raises NoHosts."""
    try:
        _run(command)
    except RuntimeError as error:
        raise NoHosts(f"this machine forbids network namespaces: {error}") from error


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _libc(function: str, *arguments: int | bytes | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{function}{arguments}: {os.strerror(error)}")
