"""Measuring transports between real processes; and which links count as slow."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from flowtrain.mempool import probe
from flowtrain.mempool.host import host_memory
from flowtrain.mempool.probe import SEGMENT_NBYTES, Probe, slow_links
from flowtrain.types.memory import Link, SegmentExport
from tests.mempool.conftest import traces

pytestmark = pytest.mark.processes

NUM_PROCESSES = 4
CONTEXT = multiprocessing.get_context("spawn")


def give(run_id: str, connection: Connection) -> None:
    owner = Probe(run_id, 1, "a", NUM_PROCESSES)
    connection.send(owner.export())
    connection.recv()
    owner.close()


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = uuid.uuid4().hex[:12]
    yield run_id
    assert traces(run_id) == []


@pytest.fixture
def owner(run_id: str) -> Iterator[SegmentExport]:
    """A segment of another process on node a."""
    connection, other_end = CONTEXT.Pipe()
    process = CONTEXT.Process(target=give, args=(run_id, other_end))
    process.start()
    try:
        yield connection.recv()
    finally:
        connection.send("end")
        process.join(30)
        if process.is_alive():
            process.kill()
        process.join(30)


def test_what_works_is_measured_and_what_does_not_says_why(run_id: str, owner: SegmentExport) -> None:
    reader = Probe(run_id, 2, "a", NUM_PROCESSES)
    (local,) = reader.measure(reader.export())
    shared, network = reader.measure(owner)
    reader.close()
    assert (local.transport, shared.transport, network.transport) == ("local", "shared_memory", "nixl")
    for link in (local, shared):
        assert link.fault is None and (link.source, link.destination) == ("a", "a")
        assert link.latency_s is not None and 0 < link.latency_s < 1
        assert link.bytes_per_s is not None and link.bytes_per_s > 1e6
    assert (network.fault is None) == (network.bytes_per_s is not None) == (network.latency_s is not None)
    assert network.fault is None or "NIXL" in network.fault


def test_a_network_that_is_turned_off_is_no_fault(run_id: str, owner: SegmentExport) -> None:
    reader = Probe(run_id, 2, "a", NUM_PROCESSES, network=False)
    _, network = reader.measure(owner)
    reader.close()
    assert network == Link("a", "a", "nixl", off="pool.network is none")


def test_another_node_is_read_over_the_network_alone(run_id: str, owner: SegmentExport) -> None:
    reader = Probe(run_id, 2, "b", NUM_PROCESSES)
    links = reader.measure(owner)
    reader.close()
    assert [(link.source, link.destination, link.transport) for link in links] == [("a", "b", "nixl")]


def test_an_owner_that_is_gone_and_wrong_bytes_are_faults(
    run_id: str, owner: SegmentExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Probe(run_id, 2, "a", NUM_PROCESSES)
    gone, _ = reader.measure(replace(owner, process_index=3, network=None))
    assert gone.fault is not None and "segment of process 3" in gone.fault and gone.bytes_per_s is None
    monkeypatch.setattr(probe, "_known_bytes", lambda index: np.zeros(SEGMENT_NBYTES, np.uint8))
    wrong, _ = reader.measure(owner)
    reader.close()
    assert wrong.fault == "transport shared_memory brings other bytes than process 1 has"


def link(transport: str, source: str, destination: str, gigabytes: float | None) -> Link:
    if gigabytes is None:
        return Link(source, destination, transport, fault="absent")
    return Link(source, destination, transport, 1e-5, gigabytes * 1e9)


def test_a_link_far_below_the_others_is_named() -> None:
    nodes = ("a", "b", "c")
    good = [link("local", node, node, 10) for node in nodes] + [link("nixl", node, node, 2) for node in nodes]
    ring = [link("nixl", "a", "b", 1.1), link("nixl", "b", "c", 1.2), link("nixl", "c", "a", 0.9)]
    assert slow_links([*good, *ring]) == []
    ring[1] = link("nixl", "b", "c", 0.2)
    (warning,) = slow_links([*good, *ring])
    assert warning.startswith("nixl from b to c gives 0.2 GB/s, others of its kind 1 GB/s")
    good[0] = link("local", "a", "a", 2)
    assert any(text.startswith("local from a to a gives 2 GB/s, others of its kind 10") for text in slow_links(good))


def test_a_network_that_is_alone_is_held_against_a_plain_copy() -> None:
    copy = link("local", "b", "b", 10)
    assert slow_links([copy, link("nixl", "a", "b", 0.3), link("nixl", "b", "a", None)]) == []
    (warning,) = slow_links([copy, link("nixl", "a", "b", 0.1)])
    assert "a plain copy there 10 GB/s" in warning and "expandable_segments" in warning


@pytest.mark.parametrize(
    ("limit", "available", "cgroup"),
    [("max", 6000 * 1024, None), ("3072000", 3072000 - 1000, 3072000), ("9223372036854771712", 6000 * 1024, None)],
)
def test_a_control_group_limits_what_is_available(
    tmp_path: Path, limit: str, available: int, cgroup: int | None
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable:  6000 kB\n")
    assert host_memory(tmp_path).cgroup_nbytes is None
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text("1000\n")
    found = host_memory(tmp_path)
    assert (found.total_nbytes, found.available_nbytes, found.cgroup_nbytes) == (8000 * 1024, available, cgroup)


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert 0 < found.available_nbytes <= found.total_nbytes
