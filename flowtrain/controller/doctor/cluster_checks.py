"""Checks of what all nodes must have alike, or between each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.controller.doctor.report import Check, NodeReport
from flowtrain.mempool.transports.nixl import NixlTransport
from flowtrain.types.memory import Link

MOST_CLOCK_OFFSET_S = 0.1
"""Traces and reports put times of different nodes beside each other; a forward takes about this long."""
_SHOWN = 5


def pairs(links: Sequence[Link], nodes: Sequence[NodeReport], may_spread: bool) -> Check:
    """Check that NIXL joins every pair of nodes."""
    name = "the network joins all nodes"
    between = [x for x in links if x.transport == NixlTransport.name and x.source != x.destination]
    tried = [link for link in between if link.off is None]
    if len(nodes) < 2 or not may_spread:
        return Check(name, True, "not needed: all actors share a node")
    broken = [f"from {link.source} to {link.destination}: {link.fault}" for link in tried if link.fault is not None]
    expected = len(nodes) * (len(nodes) - 1)
    if broken or len(tried) < expected:
        return Check(
            name,
            False,
            f"{expected - len(tried) + len(broken)} of {expected} directions do not work: {_some(broken)}; open the "
            "nodes' ports to each other, and name the interface that joins them in UCX_NET_DEVICES and the transports "
            "in UCX_TLS, where `ray start` runs",
        )
    slowest = min(tried, key=lambda link: link.bytes_per_s or 0.0)
    speed = f"{(slowest.bytes_per_s or 0.0) / 1e9:.2f} GB/s"
    return Check(name, True, f"{expected} directions; slowest: {speed} from {slowest.source} to {slowest.destination}")


def locked_memory(nodes: Sequence[NodeReport], segment_nbytes: int, may_spread: bool) -> Check:
    """Check that nodes whose network reads memory by itself may lock a segment, which it needs."""
    name = "segments can be locked"
    if len(nodes) < 2 or not may_spread:
        return Check(name, True, "not needed: no network reads the segments")
    limits = {node.name: node.memory.memlock_nbytes for node in nodes if node.facts.has_rdma}
    bad = [f"{node} {limit}" for node, limit in limits.items() if limit is not None and limit < segment_nbytes]
    if bad:
        return Check(
            name,
            False,
            f"the largest segment has {segment_nbytes} bytes, a process may lock fewer: {_some(bad)}; raise memlock in "
            "/etc/security/limits.conf (ulimit -l unlimited where `ray start` runs)",
        )
    found = f"{len(limits)} of {len(nodes)} nodes have RDMA devices"
    return Check(name, True, f"{found}, and may lock {segment_nbytes} bytes" if limits else found)


def shared_files(nodes: Sequence[NodeReport], directory: str) -> Check:
    """Check that every node sees and may write the run's directory."""
    name = "nodes share runs_dir"
    blind = [node.name for node in nodes if not node.facts.sees_runs_dir]
    barred = [node.name for node in nodes if node.facts.sees_runs_dir and not node.facts.can_write]
    if blind or barred:
        faults = [f"not seen by {_some(blind)}"] * bool(blind) + [f"not writable on {_some(barred)}"] * bool(barred)
        return Check(
            name,
            False,
            f"what the driver writes at {directory} is {' and '.join(faults)}; set runs_dir to a file system that all "
            "nodes mount at the same path, and that this user may write",
        )
    return Check(name, True, f"{directory} is seen and writable on {len(nodes)} nodes")


def models(nodes: Sequence[NodeReport]) -> Check:
    """Check that each node has the models of the hub, or can fetch them and has room for them."""
    name = "models can be had"
    faults = [f"{node.name}: {node.facts.no_hub}" for node in nodes if node.facts.no_hub is not None]
    faults += [
        f"{node.name}: {node.facts.to_fetch_nbytes} bytes to fetch, {node.facts.cache_free_nbytes} free in HF_HOME"
        for node in nodes
        if node.facts.no_hub is None and node.facts.to_fetch_nbytes > node.facts.cache_free_nbytes
    ]
    if faults:
        return Check(
            name,
            False,
            f"{_some(faults)}; let the nodes reach the hub, put HF_HOME on a larger disk or on a file system that all "
            "nodes share, or name local directories of the models",
        )
    most = max(node.facts.to_fetch_nbytes for node in nodes)
    detail = f"a node has {most} bytes to fetch at most" if most else "every node has them, or none is from the hub"
    return Check(name, True, detail)


def clocks(nodes: Sequence[NodeReport]) -> Check:
    """Check that the nodes' clocks agree; the error of the measurement counts in their favour."""
    name = "clocks agree"
    first = min(nodes, key=lambda node: node.facts.clock_s)
    last = max(nodes, key=lambda node: node.facts.clock_s)
    offset_s = last.facts.clock_s - first.facts.clock_s
    error_s = last.facts.clock_error_s + first.facts.clock_error_s
    found = f"{offset_s * 1e3:.1f} ms apart at most, +- {error_s * 1e3:.1f}"
    if offset_s - error_s > MOST_CLOCK_OFFSET_S:
        return Check(
            name,
            False,
            f"{last.name} is ahead of {first.name}: {found}; their logs cannot be compared: run chrony or another NTP "
            "client on all of them",
        )
    return Check(name, True, found)


def versions(nodes: Sequence[NodeReport]) -> Check:
    """Check that all nodes have the same versions."""
    name = "versions are equal"
    faults = []
    for package in nodes[0].facts.versions:
        by_version: dict[str | None, list[str]] = {}
        for node in nodes:
            by_version.setdefault(node.facts.versions.get(package), []).append(node.name)
        if len(by_version) > 1:
            found = [f"{version or 'none'} on {_some(names)}" for version, names in by_version.items()]
            faults.append(f"{package} {', '.join(found)}")
    if faults:
        return Check(name, False, f"{'; '.join(faults)}; install the same on every node")
    found = [f"{package} {version}" for package, version in nodes[0].facts.versions.items() if version is not None]
    return Check(name, True, ", ".join(found))


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
