"""A Ray cluster of its own with token authentication, as ``ray start`` makes it; and what a user does with it."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any

from ray.job_submission import JobSubmissionClient
from ray.util.state import StateApiClient
from ray.util.state.common import ActorState, ListApiOptions, StateResource
from ray.util.state.exception import RayStateApiException

from flowtrain.observability.files import read_json_lines
from tests.e2e.processes import LOG_TAIL, Process, processes, shared_memory_of

BIN = Path(sys.executable).parent
NUM_CPUS = 4
START_LIMIT_S = 300.0
COMMAND_LIMIT_S = 600.0
END_LIMIT_S = 120.0
PORTS = range(20_000, 32_000)
"""Below those that Linux gives to who asks for any, so that nobody is given one before its server binds it."""
NOT_ANSWERED = (OSError, HTTPException, RayStateApiException)
"""Errors of a server that is not up yet, or no longer. URLError is an OSError, as is a connection that was cut."""


def wait_until(happened: Callable[[], bool], limit_s: float, problem: Callable[[], str], poll_s: float = 0.1) -> None:
    """Wait for something; a wait in vain ends with the problem's description."""
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {problem()}"
        time.sleep(poll_s)


class Cluster:
    """One node with its own ports, token and directory, which no other Ray of the machine sees.

    variables: more of its environment.
    """

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        self.temp_dir = directory / "ray"
        self._variables = variables
        self._log = directory / "ray-start.log"
        self.token = secrets.token_hex(32)
        self._token_file = directory / "token"
        self._token_file.write_text(self.token)
        dashboard, agent, client = free_ports(3)
        self.url, self._agent_url = (f"http://127.0.0.1:{port}" for port in (dashboard, agent))
        command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus", str(NUM_CPUS), "--port", "0"]
        command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)]
        command += ["--dashboard-agent-listen-port", str(agent), "--ray-client-server-port", str(client)]
        command += ["--min-worker-port", "0", "--max-worker-port", "0"]
        command += ["--temp-dir", str(self.temp_dir), "--object-store-memory", str(100 << 20), "--disable-usage-stats"]
        with self._log.open("wb") as output:
            self._ray = subprocess.Popen(
                command, env=self.environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def environment(self, token_file: Path | None = None) -> dict[str, str]:
        """What a process needs that talks to the cluster; by what is in it, the cluster's own processes are known."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return inherited | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file or self._token_file),
            "RAY_metrics_report_interval_ms": "1000",
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{START_LIMIT_S:g}",
            **self._variables,
        }

    def wait_until_up(self) -> None:
        """Wait for dashboard and state API, and for the node's agent, which comes later and starts jobs."""

        def is_up() -> bool:
            assert self._ray.poll() is None, self._report("ray start ended")
            try:
                fetch(f"{self._agent_url}/api/local_raylet_healthz", self.headers())
                return json.loads(self.get("/api/version")) is not None and self.actors() is not None
            except NOT_ANSWERED:
                return False

        wait_until(is_up, START_LIMIT_S, lambda: self._report("the cluster is not up"), poll_s=0.3)

    # --- what a user sees ---------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What RAY_ADDRESS is to be for a driver on this node."""
        return (self.temp_dir / "ray_current_cluster").read_text().strip()

    def headers(self, token: str | None = None) -> dict[str, str]:
        """What shows an HTTP server of the cluster that one may talk to it."""
        return {"Authorization": f"Bearer {token or self.token}"}

    def get(self, path: str) -> str:
        """A page of the dashboard."""
        return fetch(self.url + path, self.headers())

    def actors(self, token: str | None = None) -> list[ActorState]:
        """Living actors of the whole cluster, by Ray's state API."""
        client = StateApiClient(self.url, headers=self.headers(token))
        alive = ListApiOptions(filters=[("state", "=", "ALIVE")])
        found: list[Any] = client.list(StateResource.ACTORS, alive, raise_on_missing_output=True)
        return found

    def actor_names(self, namespace: str) -> set[str | None]:
        """Names of the living actors in a namespace."""
        return {actor.name for actor in self.actors() if actor.ray_namespace == namespace}

    @property
    def targets(self) -> Path:
        """The list of what Prometheus scrapes, which Ray writes."""
        return self.temp_dir / "prom_metrics_service_discovery.json"

    def metrics(self) -> dict[str, float]:
        """What Prometheus would scrape now: FlowTrain's gauges of all nodes, without labels, by name."""
        discovery = json.loads(self.targets.read_text())
        values = {}
        for target in (target for group in discovery for target in group["targets"]):
            try:
                page = fetch(f"http://{target}/metrics")
            except NOT_ANSWERED:
                continue  # Ray lists targets that have nothing to offer, and some of another Ray, which may end
            for line in page.splitlines():
                if line.startswith("ray_flowtrain_"):
                    values[line.partition("{")[0]] = float(line.rpartition(" ")[2])
        return values

    def jobs(self) -> JobSubmissionClient:
        """Ray's interface to the jobs."""
        return JobSubmissionClient(self.url, headers=self.headers())

    # --- what a user does ---------------------------------------------------------------------------------------

    @contextmanager
    def following(
        self, job: str, command: list[str], working_dir: Path | None = None, **variables: str
    ) -> Iterator[Follower]:
        """``ray job submit``, which follows the job's logs to its end. variables: of the job's environment.

        working_dir: sent along, and the job runs in a copy of it.
        """
        arguments = ["job", "submit", "--address", self.url, "--submission-id", job]
        arguments += ["--working-dir", str(working_dir)] if working_dir is not None else []
        arguments += ["--runtime-env-json", json.dumps({"env_vars": variables})] if variables else []
        with self.started(job, [str(BIN / "ray"), *arguments, "--", *command], self.environment()) as follower:
            yield follower

    @contextmanager
    def started(self, name: str, command: list[str], environment: dict[str, str]) -> Iterator[Follower]:
        """A process that writes into a log file and does not outlive the block."""
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=self.directory
            )
        try:
            yield Follower(process, log)
        finally:
            process.kill()
            process.wait()

    # --- its processes ------------------------------------------------------------------------------------------

    def members(self) -> set[Process]:
        """Its processes, those of jobs too, which live in sessions of their own: whoever was given its token."""
        mark = f"RAY_AUTH_TOKEN_PATH={self._token_file}".encode()
        return {process for process in processes() if mark in _environment_of(process.pid)}

    def pool_segments(self) -> set[str]:
        """Names of all pool segments that any process has open or mapped."""
        names = shared_memory_of({process.pid for process in self.members()})
        return {name for name in names if name.startswith("/memfd:flowtrain-")}

    def end(self) -> None:
        """End the cluster and whatever still belongs to it."""
        self._ray.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._ray.wait(END_LIMIT_S)
        deadline = time.monotonic() + END_LIMIT_S
        while left := self.members():
            assert time.monotonic() < deadline, f"processes that cannot be ended: {left}"
            for process in left:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        self._ray.wait()

    def _report(self, problem: str) -> str:
        return f"{problem}\n--- end of {self._log} ---\n{self._log.read_text(errors='replace')[-LOG_TAIL:]}"


class Follower:
    """A command that runs beside the test, and what it said so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def said(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        try:
            return self._process.wait(COMMAND_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.report(f"it did not end within {COMMAND_LIMIT_S:g} s")) from None

    def report(self, problem: str) -> str:
        """A problem with the end of what it said."""
        return f"{problem}\n--- end of {self._log} ---\n{self.said[-LOG_TAIL:]}"


@contextmanager
def cluster(**variables: str) -> Iterator[Cluster]:
    """A cluster that does not outlive the block, nor do its files."""
    with ExitStack() as stack:
        # Not in pytest's own directory: a Unix socket's path has little room.
        directory = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        started = Cluster(directory, **variables)
        stack.callback(started.end)
        started.wait_until_up()
        yield started


def fetch(url: str, headers: dict[str, str] | None = None) -> str:
    """A page, with no more than these headers."""
    request = urllib.request.Request(url, headers=headers or {})
    # The environment may name a proxy, which has no business here.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as response:
        text: str = response.read().decode()
        return text


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    return list(islice(filter(_is_free, random.SystemRandom().sample(PORTS, len(PORTS))), count))


def _is_free(port: int) -> bool:
    """Whether a server may listen on a port of this machine."""
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # it ended in between, or is somebody else's


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, as ``disturbed.json_lines`` reads them; none while there is no file."""
    return list(read_json_lines(path)) if path.exists() else []
