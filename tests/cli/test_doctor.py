"""``flowtrain doctor``: what it says of clusters that are made up, and once of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner, Result

import flowtrain
from flowtrain import api
from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.controller.doctor import DoctorReport, NodeReport, judge
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.types.memory import HostMemory, Link

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
FEEDER_NBYTES = 32 << 20
POOL_NBYTES = 2 * (16 << 20) + FEEDER_NBYTES
GIB = 1 << 30
LINKS = (
    Link("one", "one", "local", 1e-6, 10e9),
    Link("one", "one", "shared_memory", 1e-6, 10e9),
    Link("one", "one", "nixl", fault="NIXL is not installed"),
)


@pytest.fixture(scope="module")
def run_spec() -> RunSpec:
    return prepare(load_config(QUICKSTART, [f"pool.feeder_segment_nbytes={FEEDER_NBYTES}"]), check_pool=False)


def node(name: str, available: int = GIB, **changes: Any) -> NodeReport:
    memory = HostMemory(8 * GIB, available, None, None)
    return replace(NodeReport(name, f"{name}-id", 4.0, 0.0, (), 4 * GIB, memory), **changes)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What Ray says that the one node of the cluster has; tests may change it."""
    has = {"CPU": 4.0, "memory": 4.0 * GIB}
    monkeypatch.setattr(ray, "cluster_resources", lambda: has)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeID": "one-id", "Resources": has}])
    return has


def failed(report: DoctorReport) -> list[str]:
    return [check.name for check in report.checks if not check.fits]


def test_a_cluster_that_has_all_fits(run_spec: RunSpec, cluster: dict[str, float]) -> None:
    report = judge(run_spec, [node("one")], LINKS)
    assert report.fits and failed(report) == [] and report.warnings == ()
    assert report.pool_nbytes == POOL_NBYTES


def test_what_does_not_fit_is_said_with_numbers(run_spec: RunSpec, cluster: dict[str, float]) -> None:
    cluster["CPU"] = 1.0
    report = judge(run_spec, [node("one", available=POOL_NBYTES - 1)], LINKS)
    assert failed(report) == ["the cluster has the resources", "there is memory for it"]
    assert "CPU: 2 needed, 1 in the cluster" in report.checks[1].detail
    assert f"segments of {POOL_NBYTES} bytes" in report.checks[2].detail
    assert f"node one has {POOL_NBYTES - 1} bytes available" in report.checks[2].detail
    assert "lower data.max_image_nbytes" in report.checks[2].detail
    assert judge(run_spec, [node("one", available=POOL_NBYTES)], LINKS).checks[2].fits


def test_a_pool_that_cannot_hold_a_step_does_not_fit_anywhere(cluster: dict[str, float]) -> None:
    small = prepare(load_config(QUICKSTART, ["encoders.vision.segment_nbytes=1048576"]), check_pool=False)
    report = judge(small, [node("one")], LINKS)
    assert failed(report) == ["a step fits the pool"]
    assert "raise encoders.vision.segment_nbytes to at least" in report.checks[0].detail


def test_memory_is_looked_for_on_one_node_unless_a_network_joins_them(
    run_spec: RunSpec, cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [node("one", available=POOL_NBYTES // 2), node("two", available=POOL_NBYTES // 2)]
    alone = replace(run_spec, config=load_config(QUICKSTART, ["pool.network=none"]))
    assert failed(judge(alone, nodes, LINKS)) == ["there is memory for it"]
    monkeypatch.setattr("flowtrain.controller.cluster.check_resources", lambda *arguments: "PACK")
    report = judge(run_spec, nodes, LINKS)
    assert report.fits and f"2 nodes have {POOL_NBYTES} bytes" in report.checks[2].detail
    nodes = [node(f"n{i}", available=8 << 20) for i in range(5)]
    assert failed(judge(run_spec, nodes, LINKS)) == ["there is memory for it"], "no node has room for a segment"


def test_slow_links_and_too_little_lockable_memory_are_warned_of(run_spec: RunSpec, cluster: dict[str, float]) -> None:
    cluster["GPU"] = 8.0
    locked = HostMemory(8 * GIB, GIB, None, 64 << 10)
    slow = (Link("one", "one", "local", 1e-6, 10e9), Link("two", "one", "nixl", 1e-5, 0.1e9))
    report = judge(run_spec, [node("one", num_devices=8.0, devices=("H100",), memory=locked)], slow)
    assert report.fits, "a warning is no fault"
    link, memory = report.warnings
    assert link.startswith("nixl from two to one gives 0.1 GB/s, a plain copy there 10 GB/s")
    assert "node one lets a process lock 65536 bytes" in memory and f"a segment has {FEEDER_NBYTES}" in memory


def run_doctor(monkeypatch: pytest.MonkeyPatch, report: DoctorReport, *arguments: str) -> Result:
    monkeypatch.setattr(api, "doctor", lambda config, overrides: report)
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["doctor", str(QUICKSTART), *arguments])


def test_tables_and_exit_code(run_spec: RunSpec, cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster["GPU"] = 4.0
    report = judge(run_spec, [node("one"), node("two", num_devices=2.0, devices=("H100",))], LINKS)
    shown = run_doctor(monkeypatch, replace(report, warnings=("a link is slow",)))
    assert shown.exit_code == 0, shown.output
    for text in ("2 H100", "unlimited", "10.00 GB/s", "1.0 us", "does not work: NIXL is not installed", "64 MiB"):
        assert text in shown.stdout
    assert "warning: a link is slow" in shown.stdout
    off = (*LINKS[:2], Link("one", "one", "nixl", off="pool.network is none"))
    shown = run_doctor(monkeypatch, replace(report, links=off))
    assert "off: pool.network is none" in shown.stdout and "does not work" not in shown.stdout
    cluster["CPU"] = 1.0
    shown = run_doctor(monkeypatch, judge(run_spec, [node("one")], LINKS))
    assert shown.exit_code == 1 and "CPU: 2 needed, 1 in the" in shown.stdout


def test_json_has_everything(run_spec: RunSpec, cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    report = judge(run_spec, [node("one")], LINKS)
    shown = run_doctor(monkeypatch, report, "--json")
    record = json.loads(shown.stdout)
    assert (shown.exit_code, record["fits"], record["schema"]) == (0, True, 1)
    assert record["nodes"][0]["memory"]["available_nbytes"] == GIB and record["nodes"][0]["tiers"] == ["dram"]
    assert [link["transport"] for link in record["links"]] == ["local", "shared_memory", "nixl"]
    assert record["links"][2]["fault"] == "NIXL is not installed"
    assert len(record["checks"]) == 3 and record["pool_nbytes"] == POOL_NBYTES


def test_a_bad_configuration_is_refused_before_anything_starts() -> None:
    shown = CliRunner().invoke(app, ["doctor", str(QUICKSTART), "pool.alignmnt=64"])
    assert shown.exit_code == 2 and "did you mean" in shown.stderr


@pytest.mark.e2e
@pytest.mark.slow
def test_this_machine() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = Path(sys.executable).parent / "flowtrain"
    done = subprocess.run(
        [str(program), "doctor", str(QUICKSTART), "--json"],
        env={**environment, "PYTHONPATH": str(Path(flowtrain.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    speeds = {link["transport"]: link["bytes_per_s"] for link in record["links"]}
    assert speeds["local"] > 0 and speeds["shared_memory"] > 0
    assert len(record["nodes"]) == 1 and record["fits"]
