"""Forks Python processes that have torch, transformers and FlowTrain imported; a cold one imports for five seconds.

A server is a process that imported all that and does nothing but fork. `prefork_client.py` runs a script as ``python``
would, in a fork of the server. Ray starts its workers through it where a runtime environment names it as
``py_executable``; everything else about them is Ray's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).with_name("prefork_client.py")
SOCKET = "FLOWTRAIN_TEST_PREFORK"
PRELOADED = (
    "flowtrain.data.feed",
    "flowtrain.mempool.pool",
    "flowtrain.models.families.registry",
    "flowtrain.training.trainer",
    "torch.distributed.checkpoint",
    "transformers.models.llava.modeling_llava",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.siglip.modeling_siglip",
)
NUM_STREAMS = 3


@contextmanager
def prefork_server() -> Iterator[dict[str, Any]]:
    """A server that lives as long as the block; gives the runtime environment by which Ray uses it."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as directory:  # a socket's path has little room
        path = f"{directory}/prefork"
        command = [sys.executable, "-m", "tests.prefork", path]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdin is not None and server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n", "the prefork server did not start"
            yield runtime_environment(path)
        finally:
            server.stdin.close()
            server.wait()


def runtime_environment(path: str) -> dict[str, Any]:
    """By which Ray starts workers through the server at this socket."""
    return {"py_executable": shlex.join([sys.executable, "-I", "-S", str(CLIENT), path])}


def driver_runtime_env(given: dict[str, Any] | None) -> dict[str, Any]:
    """RAY_RUNTIME_ENV_HOOK of a driver: its workers come from the server that `start_driver` forked off."""
    return {**(given or {}), **runtime_environment(os.environ[SOCKET])}


def main() -> None:
    """``SOCKET``: serve until standard input ends. ``SOCKET MODULE ARGUMENT...``: run a module that starts Ray."""
    path, *module = sys.argv[1:]
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules, "Ray reads its variables when it is imported; each fork has its own"
    gc.collect()
    gc.freeze()  # so that forks share its pages
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    if module:
        start_driver(listener, module)
        return
    print("ready", flush=True)
    run_forks(listener, sys.stdin.fileno())


def start_driver(listener: socket.socket, module: list[str]) -> None:
    """Run a module here, and a server beside it, in its session, until it ends."""
    theirs, ours = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too
        run_forks(listener, theirs)
        return
    os.close(theirs)
    os.environ[SOCKET] = str(listener.getsockname())
    listener.close()
    os.environ["RAY_RUNTIME_ENV_HOOK"] = "tests.prefork.driver_runtime_env"
    sys.argv = module
    runpy.run_module(module[0], run_name="__main__", alter_sys=True)


def run_forks(listener: socket.socket, owner: int) -> None:
    """Serve; in a fork, run what it is to run."""
    if (argv := serve(listener, owner)) is not None:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def serve(listener: socket.socket, owner: int) -> list[str] | None:
    """Fork for each request, until the owner's pipe ends; returns None then, and in a fork what it is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        ready, _, _ = select.select([listener, owner], [], [])
        if owner in ready:
            return None
        client, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(client, 1 << 16, NUM_STREAMS)
        while not message.endswith(b"\n") and (more := client.recv(1 << 16)):
            message += more
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(owner)
            listener.close()
            client.detach()  # stays open, by which the client sees that the fork lives
            return become(json.loads(message), streams)
        client.close()
        for stream in streams:
            os.close(stream)


def become(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Take the client's place; returns the script and its arguments."""
    os.setpgid(0, request["group"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    argv: list[str] = request["argv"]
    return argv


if __name__ == "__main__":
    main()
