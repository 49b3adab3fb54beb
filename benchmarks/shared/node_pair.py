"""Ray clusters of two nodes and more, one on each host of `hosts.py`, with token authentication; tests use them too."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shared.hosts import Host, switched_hosts, two_hosts

NODE_CPUS = 2

_PORT = 6379  # nothing else runs on these hosts
_OBJECT_STORE_NBYTES = 300 << 20
_START_LIMIT_S = 120.0
_END_LIMIT_S = 20.0
_LOG_TAIL = 6000


class NodePair:
    """Raylets, two unless there are more hosts, ``NODE_CPUS`` CPUs each; the first host has the head.

    head_cpus: of the head. environment: variables that a client of the cluster needs.
    """

    def __init__(self, hosts: tuple[Host, ...], directory: Path, head_cpus: int = NODE_CPUS) -> None:
        self.hosts, self._head_cpus = hosts, head_cpus
        self.directory = directory
        token_file = directory / "token"
        token_file.write_text(secrets.token_hex(32))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = inherited | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
            "RAY_ADDRESS": f"{hosts[0].address}:{_PORT}",
            "UCX_TLS": "tcp",  # else UCX might find that the hosts share a machine
        }
        self._raylets: dict[str, subprocess.Popen[bytes]] = {}  # by namespace

    def start(self) -> None:
        """Start all nodes and wait until they know each other."""
        self._start(self.hosts[0], "--head", "--port", str(_PORT), "--include-dashboard", "false")
        self._wait_for_nodes(1)
        for number in range(1, len(self.hosts)):
            self.join(number, number + 1)

    def join(self, number: int, num_nodes: int) -> None:
        """Start the node of a host that has none, and wait until there are so many."""
        self._start(self.hosts[number], "--address", self.environment["RAY_ADDRESS"])
        self._wait_for_nodes(num_nodes)

    def lose(self, number: int) -> None:
        """Kill every process on a host, if there are some, as if its power was cut."""
        self.hosts[number].end_processes()
        if (raylet := self._raylets.pop(self.hosts[number].namespace, None)) is not None:
            raylet.wait(_END_LIMIT_S)

    def run(self, arguments: list[str], name: str, limit_s: float) -> tuple[int, str]:
        """Run a command on the first host; returns its exit code and the end of its output."""
        log = self.directory / f"{name}.log"
        command = self.hosts[0].command(arguments)
        with log.open("wb") as output:
            done = subprocess.run(
                command, env=self.environment, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
        return done.returncode, log.read_text(errors="replace")[-_LOG_TAIL:]

    def end(self) -> None:
        """End all nodes."""
        for raylet in reversed(self._raylets.values()):
            raylet.terminate()
        for raylet in self._raylets.values():
            with suppress(subprocess.TimeoutExpired):
                raylet.wait(_END_LIMIT_S)
        for host in self.hosts:
            host.end_processes()
        for raylet in self._raylets.values():
            raylet.wait()

    def _start(self, host: Host, *arguments: str) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        command = [ray, "start", "--block", "--node-ip-address", host.address, *arguments, "--disable-usage-stats"]
        num_cpus = self._head_cpus if "--head" in arguments else NODE_CPUS
        command += ["--num-cpus", str(num_cpus), "--object-store-memory", str(_OBJECT_STORE_NBYTES)]
        if "--head" in arguments:
            command += ["--temp-dir", str(self.directory / "ray")]
        environment = {key: value for key, value in self.environment.items() if key != "RAY_ADDRESS"}
        with (self.directory / f"ray-{host.namespace}.log").open("wb") as output:
            self._raylets[host.namespace] = subprocess.Popen(
                host.command(command), env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _wait_for_nodes(self, count: int) -> None:
        look = f"import ray; ray.init(log_to_driver=False); assert sum(n['Alive'] for n in ray.nodes()) >= {count}"
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            code, said = self.run([sys.executable, "-c", look], "look", _START_LIMIT_S)
            if code == 0:
                return
            logs = "\n".join(file.read_text(errors="replace")[-_LOG_TAIL:] for file in self.directory.glob("ray-*.log"))
            if time.monotonic() > deadline or any(raylet.poll() is not None for raylet in self._raylets.values()):
                raise RuntimeError(f"node {count} is not up: {said}\n{logs}")
            time.sleep(0.5)


@contextmanager
def node_pair(num_nodes: int = 2, head_cpus: int = NODE_CPUS) -> Iterator[NodePair]:
    """Two nodes, or more, until the block ends. Raises NoHosts if the machine forbids namespaces."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts() if num_nodes == 2 else switched_hosts(num_nodes))
        # The path of a Unix socket must be short, so this directory must not be deep.
        directory = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        pair = NodePair(hosts, directory, head_cpus)
        stack.callback(pair.end)
        pair.start()
        yield pair
