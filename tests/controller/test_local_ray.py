"""Ray's token is private, and its temporary directory goes with the run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowtrain.controller import local_ray
from flowtrain.controller.local_ray import (
    bounded_end,
    continue_stopped,
    cut_raylet,
    keep_token_private,
    mark_session,
    quiet,
    remove_dead_sessions,
    remove_session,
    token_file,
    warn_of_open_token,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_token_is_where_ray_looks_for_it(home: Path) -> None:
    assert token_file({}) == home / ".ray" / "auth_token"
    assert token_file({"RAY_AUTH_TOKEN_PATH": "/run/token"}) == Path("/run/token")
    assert token_file({"RAY_AUTH_TOKEN": "abc"}) is None
    assert token_file({"RAY_AUTH_MODE": "disabled"}) is None


def test_a_new_token_is_private_from_the_start_and_stays_the_same(home: Path) -> None:
    file = home / ".ray" / "auth_token"
    keep_token_private({}, creates=False)
    assert not file.exists()
    keep_token_private({}, creates=True)
    token = file.read_text()
    assert len(token) == 64 and file.stat().st_mode & 0o777 == 0o600
    keep_token_private({}, creates=True)
    assert file.read_text() == token


def test_an_open_token_is_closed_where_flowtrain_starts_ray(home: Path) -> None:
    file = home / "token"
    file.write_text("abc")
    file.chmod(0o644)
    keep_token_private({"RAY_AUTH_TOKEN_PATH": str(file)}, creates=True)
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == "abc"


def test_elsewhere_an_open_token_is_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = home / "token"
    file.write_text("abc")
    for mode in (0o600, 0o640):
        file.chmod(mode)
        warn_of_open_token({"RAY_AUTH_TOKEN_PATH": str(file)})
        assert file.stat().st_mode & 0o777 == mode
    assert len(caplog.messages) == 1 and f"chmod 600 {file}" in caplog.text


def test_what_ray_writes_to_stderr_comes_after_a_success_and_not_with_an_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with quiet():
        os.write(2, b"connected\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "connected\n"
    with pytest.raises(ValueError), quiet():
        os.write(2, b"advice\n" * 60)
        raise ValueError
    os.write(2, b"and on\n")
    assert capfd.readouterr().err == "and on\n"


def test_a_session_goes_with_its_link(home: Path) -> None:
    session, other = home / "session_a_1", home / "session_b_2"
    for each in (session, other):
        (each / "logs").mkdir(parents=True)
        (each / "logs" / "raylet.out").write_text("x")
    (home / "session_latest").symlink_to(session)
    remove_session(session)
    assert not session.exists() and not os.path.lexists(home / "session_latest")
    (home / "session_latest").symlink_to(other)
    remove_session(session)
    assert (home / "session_latest").exists(), "another session's link stays"


def test_sessions_of_killed_drivers_are_removed_and_no_others(home: Path) -> None:
    dead = 2**22 + 1  # no process can have this number
    ours, alive, others = home / f"session_a_{dead}", home / f"session_b_{os.getpid()}", home / f"session_c_{dead}"
    for each in (ours, alive, others):
        each.mkdir()
    mark_session(ours)
    mark_session(alive)
    remove_dead_sessions(home)
    assert [ours.exists(), alive.exists(), others.exists()] == [False, True, True]


@pytest.fixture
def socket_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """In place of a raylet's, so that the connection of a Ray that this process may have is never cut."""
    monkeypatch.setattr(local_ray, "_RAYLET_SOCKET", "/sockets/silent")
    return "sockets/silent"


@pytest.fixture
def raylet(socket_name: str) -> Iterator[socket.socket]:
    """This process's connection to a raylet that accepts it and never answers."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,  # a socket's path has little room
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        path = Path(directory) / socket_name
        path.parent.mkdir()
        listening.bind(str(path))
        listening.listen()
        connection.connect(str(path))
        yield connection


def test_an_end_that_waits_for_a_silent_raylet_is_cut_with_a_warning(
    raylet: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    with bounded_end(None, "the end", limit_s=0.01):
        assert raylet.recv(1) == b"", "Ray waits like this for an answer, without a limit"
    assert "the end: the raylet, Ray's process of this node, has not answered for 0.01 s" in caplog.text
    assert "the connection to it is cut after 0.01 s more" in caplog.text


def test_an_end_that_comes_by_itself_is_not_touched(raylet: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with bounded_end(None, "the end", limit_s=60.0):
            pass
        with pytest.raises(KeyError), bounded_end(None, "the end", limit_s=60.0):
            raise KeyError
    assert caplog.records == []
    raylet.setblocking(False)
    with pytest.raises(BlockingIOError):  # still connected
        raylet.recv(1)


@pytest.mark.usefixtures("socket_name")
def test_other_connections_are_left_alone_and_nothing_leaks() -> None:
    left, right = socket.socketpair()
    with left, right:
        open_before = len(os.listdir("/proc/self/fd"))
        assert not cut_raylet()
        left.send(b"x")
        assert right.recv(1) == b"x" and len(os.listdir("/proc/self/fd")) == open_before


def test_a_stopped_process_of_the_session_is_continued(home: Path) -> None:
    def child(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", *arguments])

    ours, running, others = child(f"--session={home}"), child(f"--session={home}"), child()
    try:
        for each in (ours, others):
            each.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, each.pid, os.WSTOPPED | os.WNOWAIT)
        assert continue_stopped(home) == [ours.pid]
        os.waitid(os.P_PID, ours.pid, os.WCONTINUED)
        assert continue_stopped(home) == []
    finally:
        for each in (ours, running, others):
            each.kill()
            each.wait()
