"""Prometheus and promtool, of Debian's package, as processes of a test."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.e2e.clusters import fetch, free_ports, wait_until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Prometheus with promtool: apt-get install prometheus (Debian, Ubuntu)",
)
START_LIMIT_S, END_LIMIT_S = 60.0, 20.0


class Prometheus:
    """A running server."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query, each with ``metric`` and ``value``."""
        found = self._get("query", query=expr)["result"]
        return found if isinstance(found, list) else []

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes."""
        targets: list[dict[str, Any]] = self._get("targets", state="active")["activeTargets"]
        return targets

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        alerts = self._get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def report(self, problem: str) -> str:
        """A problem with the end of its log."""
        return f"{problem}\n--- end of {self._log} ---\n{self._log.read_text()[-4000:]}"

    def _get(self, path: str, **parameters: str) -> Any:
        page = json.loads(fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        assert page["status"] == "success", page
        return page["data"]


@contextmanager
def prometheus(config: Path, directory: Path) -> Iterator[Prometheus]:
    """A server with a configuration file, on this machine alone, that does not outlive the block."""
    (port,) = free_ports(1)
    log = directory / "prometheus.log"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=directory)
    server = Prometheus(f"http://127.0.0.1:{port}", log)

    def is_ready() -> bool:
        assert process.poll() is None, server.report("prometheus ended")
        try:
            return bool(fetch(f"{server.url}/-/ready"))
        except (URLError, ConnectionError):
            return False

    try:
        wait_until(is_ready, START_LIMIT_S, lambda: server.report("prometheus is not ready"))
        yield server
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def promtool(*arguments: str) -> str:
    """What promtool prints; fails with it if it finds a fault."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
