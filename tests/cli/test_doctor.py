"""``flowtrain doctor``: what it says of clusters that are made up, and once of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import flowtrain
from flowtrain import api
from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.controller.doctor.checks import judge
from flowtrain.controller.doctor.links import rounds
from flowtrain.controller.doctor.report import Check, DoctorReport, NodeReport
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.types.memory import HostMemory, Link
from flowtrain.types.nodes import NodeFacts

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
FACTS = NodeFacts({"torch": "2.13.0", "nixl": None}, True, True, False, cache_free_nbytes=GIB)


@pytest.fixture(scope="module")
def run_spec() -> RunSpec:
    return prepare(load_config(QUICKSTART, [f"pool.feeder_segment_nbytes={FEEDER_NBYTES}"]), check_pool=False)


def node(name: str, available: int = GIB, **changes: Any) -> NodeReport:
    memory = HostMemory(8 * GIB, available, None, None)
    return replace(NodeReport(name, f"{name}-id", 4.0, 0.0, (), 4 * GIB, memory, FACTS), **changes)


def check_of(report: DoctorReport, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


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
    memory = check_of(report, "there is memory for it").detail
    assert f"segments of {POOL_NBYTES} bytes" in memory
    assert f"node one has {POOL_NBYTES - 1} bytes available" in memory
    assert "lower data.max_image_nbytes" in memory
    assert check_of(judge(run_spec, [node("one", available=POOL_NBYTES)], LINKS), "there is memory for it").fits


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
    report = judge(run_spec, nodes, BETWEEN)
    assert report.fits and f"2 nodes have {POOL_NBYTES} bytes" in check_of(report, "there is memory for it").detail
    nodes = [node(f"n{i}", available=8 << 20) for i in range(5)]
    assert "there is memory for it" in failed(judge(run_spec, nodes, LINKS)), "no node has room for a segment"


BETWEEN = (Link("one", "two", "nixl", 1e-5, 9e9), Link("two", "one", "nixl", 1e-5, 8e9))


@pytest.fixture
def two(cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> list[NodeReport]:
    """Two nodes that a network joins, each with two of the four CPUs."""
    monkeypatch.setattr("flowtrain.controller.cluster.check_resources", lambda *arguments: "PACK")
    described = [{"Alive": True, "NodeID": name, "Resources": {"CPU": 2.0}} for name in ("one", "two")]
    monkeypatch.setattr(ray, "nodes", lambda: described)
    return [node("one"), node("two")]


def test_two_nodes_that_have_all_fit(run_spec: RunSpec, two: list[NodeReport]) -> None:
    report = judge(run_spec, two, BETWEEN)
    assert failed(report) == []
    assert check_of(report, "the network joins all nodes").detail == "2 directions; slowest: 8.00 GB/s from two to one"
    assert check_of(report, "versions are equal").detail == "torch 2.13.0"
    assert "on 1 of 2 nodes, at most 3 on one" in check_of(report, "actors fit the nodes").detail


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"versions": {"torch": "2.12.0", "nixl": None}}, "versions are equal", "torch 2.13.0 on one, 2.12.0 on two"),
        ({"versions": {"torch": "2.13.0", "nixl": "1.0"}}, "versions are equal", "nixl none on one, 1.0 on two"),
        ({"sees_runs_dir": False}, "nodes share runs_dir", "not seen by two; set runs_dir to a file system"),
        ({"can_write": False}, "nodes share runs_dir", "not writable on two"),
        ({"clock_s": 0.5, "clock_error_s": 0.01}, "clocks agree", "two is ahead of one: 500.0 ms apart"),
        ({"to_fetch_nbytes": 2 * GIB}, "models can be had", f"two: {2 * GIB} bytes to fetch, {GIB} free in HF_HOME"),
        ({"no_hub": "backbone.path: not there"}, "models can be had", "two: backbone.path: not there; let the nodes"),
    ],
)
def test_a_node_that_is_unlike_the_others_is_named(
    run_spec: RunSpec, two: list[NodeReport], changes: dict[str, Any], name: str, said: str
) -> None:
    report = judge(run_spec, [two[0], replace(two[1], facts=replace(FACTS, **changes))], BETWEEN)
    assert failed(report) == [name] and said in check_of(report, name).detail


def test_a_clock_that_may_be_right_is_no_fault(run_spec: RunSpec, two: list[NodeReport]) -> None:
    facts = replace(FACTS, clock_s=0.5, clock_error_s=0.45)
    assert failed(judge(run_spec, [two[0], replace(two[1], facts=facts)], BETWEEN)) == []


def test_every_pair_must_be_joined_both_ways(run_spec: RunSpec, two: list[NodeReport]) -> None:
    broken = (BETWEEN[0], replace(BETWEEN[1], latency_s=None, bytes_per_s=None, fault="no route"))
    for links, said in (
        (broken, "1 of 2 directions do not work: from two to one: no route"),
        ((), "2 of 2 directions"),
    ):
        report = judge(run_spec, two, links)
        assert failed(report) == ["the network joins all nodes"]
        assert said in check_of(report, "the network joins all nodes").detail
        assert "UCX_NET_DEVICES" in check_of(report, "the network joins all nodes").detail


def test_only_a_network_that_reads_memory_needs_locked_segments(run_spec: RunSpec, two: list[NodeReport]) -> None:
    two[1] = replace(two[1], memory=HostMemory(8 * GIB, GIB, None, 64 << 10))
    assert failed(judge(run_spec, two, BETWEEN)) == []
    two[1] = replace(two[1], facts=replace(FACTS, has_rdma=True))
    report = judge(run_spec, two, BETWEEN)
    assert failed(report) == ["segments can be locked"]
    assert "two 65536; raise memlock" in check_of(report, "segments can be locked").detail


@pytest.mark.parametrize("keep_best", [None, "eval_loss"])
def test_a_disk_without_room_for_the_checkpoints_is_named(
    run_spec: RunSpec, two: list[NodeReport], keep_best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = run_spec.config.checkpoint.model_copy(update={"keep_best": keep_best})
    run_spec = replace(run_spec, config=run_spec.config.model_copy(update={"checkpoint": checkpoint}))
    count = checkpoint.keep + (1 if keep_best is None else 2)
    one = 12 * run_spec.model_spec.num_trainable_parameters(run_spec.config.frozen_modules)
    for free, faults in ((count * one, []), (count * one - 1, ["checkpoints have room"])):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        report = judge(run_spec, two, BETWEEN)
        assert failed(report) == faults
        assert f"{count} checkpoints of about {one} bytes" in check_of(report, "checkpoints have room").detail


def test_actors_that_fit_the_counts_but_no_node_are_named(
    run_spec: RunSpec, two: list[NodeReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = [{"Alive": True, "NodeID": name, "Resources": {"CPU": 0.9}} for name in ("one", "two")]
    monkeypatch.setattr(ray, "nodes", lambda: described)
    report = judge(run_spec, two, BETWEEN)
    assert failed(report) == ["actors fit the nodes"]
    assert "no node has 1 CPU left after 0 of 3 groups" in check_of(report, "actors fit the nodes").detail


@given(st.integers(1, 40))
def test_every_pair_of_nodes_is_measured_once_in_few_rounds(count: int) -> None:
    found = list(rounds(count))
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == list(combinations(range(count), 2))
    for each in found:
        busy = [node for pair in each for node in pair]
        assert len(set(busy)) == len(busy)
    assert len(found) == count + count % 2 - 1


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
    monkeypatch.setattr(api, "doctor", lambda config, overrides, plan: report)
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
    assert (shown.exit_code, record["fits"], record["schema"]) == (0, True, 2)
    assert record["nodes"][0]["memory"]["available_nbytes"] == GIB and record["nodes"][0]["tiers"] == ["dram"]
    assert [link["transport"] for link in record["links"]] == ["local", "shared_memory", "nixl"]
    assert record["links"][2]["fault"] == "NIXL is not installed"
    assert {"name", "fits", "detail"} == set(record["checks"][0]) and len(record["checks"]) == len(report.checks)
    assert record["nodes"][0]["facts"]["versions"]["torch"] == "2.13.0" and record["pool_nbytes"] == POOL_NBYTES


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
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    speeds = {link["transport"]: link["bytes_per_s"] for link in record["links"]}
    assert speeds["local"] > 0 and speeds["shared_memory"] > 0
    assert len(record["nodes"]) == 1 and record["fits"]


def test_devices_that_are_shared_in_turns_are_warned_of(cluster: dict[str, float]) -> None:
    cluster["GPU"] = 2.0
    lacking = node("one", num_devices=2.0, facts=replace(FACTS, lacks_mps=True))
    shared = prepare(load_config(QUICKSTART, ["mode=colocated"]), check_pool=False)
    (warning,) = judge(shared, [lacking], LINKS).warnings
    assert warning.startswith("MPS does not run on one")
    apart = prepare(load_config(QUICKSTART), check_pool=False)
    assert judge(apart, [lacking], LINKS).warnings == ()


def test_emulated_devices_need_no_disk_and_share_nothing(
    cluster: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster["GPU"] = 2.0
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    config = load_config(QUICKSTART, ["mode=colocated", "model.device=emulated"])
    lacking = node("one", num_devices=2.0, facts=replace(FACTS, lacks_mps=True))
    report = judge(prepare(config, check_pool=False), [lacking], LINKS)
    assert check_of(report, "checkpoints have room").fits and report.warnings == ()
