"""What Ray leaves on a disk: its token, and the directory of a session that FlowTrain started."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_MARK = ".started_by_flowtrain"
_STDERR = 2
_OTHERS = 0o077
"""What group and others may do with a file."""
_REMOVE_ATTEMPTS, _REMOVE_RETRY_S = 5, 0.2
_RAYLET_SOCKET = "/sockets/raylet"
"""End of the path of the socket by which a process talks to its node's raylet."""

SHUTDOWN_LIMIT_S = 20.0
"""How long a call that ends something in Ray may wait for the raylet, which answers within a second."""


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back what Ray's C++ code writes to standard error; an error drops it, since its message says what counts."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        kept = os.dup(_STDERR)
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STDERR)
            os.close(kept)
        held.seek(0)
        with open(_STDERR, "wb", closefd=False) as stderr:
            stderr.write(held.read())


def token_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file that has Ray's token; None if the token is none, or comes from the environment."""
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token" or "RAY_AUTH_TOKEN" in environment:
        return None
    given = environment.get("RAY_AUTH_TOKEN_PATH")
    return Path(given) if given else Path.home() / ".ray" / "auth_token"


def keep_token_private(environment: Mapping[str, str], creates: bool) -> None:
    """Let only its owner read the token; whoever has it can run code in the cluster.

    creates: write a token if there is none. Ray would write one that all users of the machine can read.
    """
    if (file := token_file(environment)) is None:
        return
    try:
        if creates and "RAY_AUTH_TOKEN_PATH" not in environment:
            file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w", encoding="ascii") as opened:
                    opened.write(secrets.token_hex(32))
        if is_open(file):
            file.chmod(0o600)
    except OSError as error:
        logger.warning("%s: Ray's token cannot be kept private: %s", file, error.strerror or error)


def warn_of_open_token(environment: Mapping[str, str]) -> None:
    """Warn if others can read the token of a cluster that FlowTrain did not start."""
    if (file := token_file(environment)) is not None and is_open(file):
        logger.warning(
            "%s can be read by other users of this machine, who could run code in the cluster: chmod 600 %s", file, file
        )


def is_open(file: Path) -> bool:
    """Whether others than its owner may read or write a file."""
    try:
        return bool(file.stat().st_mode & _OTHERS)
    except OSError:  # it is not there
        return False


@contextmanager
def bounded_end(session: Path | None, what: str, limit_s: float = SHUTDOWN_LIMIT_S) -> Iterator[None]:
    """Bound a block in which Ray may wait for this node's raylet, for which Ray itself has no limit.

    After ``limit_s`` a warning names the wait. Stopped processes of a session that is this process's own are
    continued; if that does not end the block within another ``limit_s``, the connection to the raylet is cut, which Ray
    takes as an answer.

    session: temporary directory of the cluster that this process started; None if it is another's. what: for the
    warnings.
    """
    ended = threading.Event()

    def watch() -> None:
        if ended.wait(limit_s):
            return
        stopped = continue_stopped(session) if session is not None else []
        numbers = ", ".join(map(str, stopped))
        logger.warning(
            "%s: the raylet, Ray's process of this node, has not answered for %g s%s; the connection to it is cut "
            "after %g s more. What the run has written stands",
            what,
            limit_s,
            f" (stopped: {numbers}, which are continued now)" if stopped else "",
            limit_s,
        )
        if ended.wait(limit_s):
            return
        was_cut = cut_raylet()
        if not ended.wait(limit_s):
            reason = "although it is cut" if was_cut else "and there is no connection to cut"
            logger.warning("%s: Ray still waits, %s; end process %d by SIGKILL", what, reason, os.getpid())

    watching = threading.Thread(target=watch, name="ray-end", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def continue_stopped(session: Path) -> list[int]:
    """Continue the stopped children of this process that belong to a session of Ray; returns their numbers."""
    continued = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # no process, or gone
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "T" and int(parent) == os.getpid() and str(session) in (entry / "cmdline").read_text():
                os.kill(int(entry.name), signal.SIGCONT)
                continued.append(int(entry.name))
    return sorted(continued)


def cut_raylet() -> bool:
    """Shut down this process's connections to the node's raylet; returns whether there was one."""
    was_cut = False
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(number := int(entry.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                peer = connection.getpeername() if connection.family == socket.AF_UNIX else ""
                if isinstance(peer, str) and peer.endswith(_RAYLET_SOCKET):
                    connection.shutdown(socket.SHUT_RDWR)
                    was_cut = True
    return was_cut


def mark_session(session: Path) -> None:
    """Note that FlowTrain started a session of Ray, whose directory has this process's number at its end."""
    with suppress(OSError):
        (session / _MARK).touch(mode=0o600)


def mark_failed_session() -> None:
    """Mark what a start of Ray has left that this process gave up; the next start removes it."""
    root = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"  # as Ray chooses it
    for session in root.glob(f"session_*_{os.getpid()}"):
        mark_session(session)


def remove_session(session: Path) -> None:
    """Remove the directory of a session that has ended (sockets, logs, spilled objects), and links into it."""
    for attempt in range(_REMOVE_ATTEMPTS):
        if attempt:
            time.sleep(_REMOVE_RETRY_S)  # a process of the session still writes its last lines
        shutil.rmtree(session, ignore_errors=True)
        if not os.path.lexists(session):
            break
    else:
        logger.warning("%s could not be removed; it has what Ray wrote for this run", session)
    for link in session.parent.iterdir():  # session_latest, and a list of nodes for Prometheus
        with suppress(OSError):  # no link, or gone
            if os.readlink(link).startswith(str(session)):
                link.unlink()


def remove_dead_sessions(root: Path) -> None:
    """Remove the directories of earlier runs whose driver was killed before it could."""
    for mark in root.glob(f"session_*/{_MARK}"):
        session = mark.parent
        number = session.name.rpartition("_")[2]
        with suppress(OSError):
            is_ours = not session.is_symlink() and session.stat().st_uid == os.getuid()
            if is_ours and number.isdecimal() and not Path(f"/proc/{number}").exists():
                remove_session(session)
