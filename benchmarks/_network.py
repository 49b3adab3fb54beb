"""The pool between two hosts: FlowTrain's transport, raw NIXL and Ray's own transfer, over the same link.

``network_figures()`` joins two namespaces by a veth pair, starts a raylet in each and runs this file as a driver there
(``python benchmarks/_network.py ROUNDS FILE`` writes seconds by pattern and way). All ways run in the same two warm
actors, over forced TCP. A round runs each way once; the order rotates. Only the first few rounds, which connect and
touch fresh memory, do not count. The bytes are not touched while a way is timed; all ways' bytes are compared once a
round.

- Raw NIXL is the fastest that can be written by hand: one transfer of the same runs from the same registered segment
  into registered memory that is used again. Its request is built before the clock starts, and it spins until the runs
  have arrived, with no other thread next to it.
- ``raw_built`` is the same with the request built after the clock starts, as a batch that is read once needs it.
- Ray's way is ``ray.get`` of an object of one buffer on the other node.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from _report import Figure, at_least
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from shared.hosts import NoHosts
from shared.node_pair import node_pair

from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.transports.nixl_export import NetworkExport
from flowtrain.types.memory import Extent, SegmentExport

MIB = 1 << 20
SEGMENT_NBYTES = 96 * MIB
SPACE = AddressSpace(num_processes=4, segment_nbytes=1 << 30)
ROUNDS = 60
WARM_UP_ROUNDS = 5
DRIVER_LIMIT_S = 400.0
ANSWER_LIMIT_S = 120.0
RAW_TARGET = 0.9
RAY_TARGET = 1.0

PATTERNS = {"1MiB": (64, 16 << 10), "4MiB": (64, 64 << 10), "16MiB": (64, 256 << 10)}
"""Extents of a batch, and the largest one in bytes; every second extent is left out, so that none are neighbours."""

WAYS = ["ours", "raw", "ray", "raw_built"]

Times = dict[str, dict[str, list[float]]]
"""Seconds by pattern and way."""


class Giver:
    """On the first node: puts batches into the pool, and the same bytes into Ray's store."""

    def __init__(self, run_id: str) -> None:
        self._pool = _open_pool(0, run_id, SEGMENT_NBYTES, [])
        self._rng = np.random.default_rng(0)

    def export(self) -> SegmentExport | None:
        return self._pool.export()

    def put(self, count: int, nbytes: int) -> tuple[list[tuple[Extent, ...]], ray.ObjectRef, int]:
        """Returns the extents of a batch's parts, the same bytes as an object, and their sum."""
        parts, left_out, data = [], [], []
        for _ in range(count):
            data.append(self._rng.integers(0, 256, nbytes - int(self._rng.integers(1, 2048)), np.uint8))
            parts.append(self._pool.put(data[-1]))
            left_out.append(self._pool.put(bytes(nbytes)))
        self._given = [*parts, *left_out]
        together = np.concatenate(data)
        return parts, ray.put(together), int(together.sum(dtype=np.uint64))

    def release(self) -> None:
        for part in self._given:
            self._pool.release(part)


class Taker:
    """On the second node: reads a batch, each way in turn."""

    def __init__(self, run_id: str, export: SegmentExport) -> None:
        self._pool = _open_pool(2, run_id, 0, [export])
        self._raw = RawNixl(export)
        self.ways = {"ours": self._ours, "raw": self._raw.read, "raw_built": self._raw.build_and_read, "ray": self._ray}

    def take(self, order: list[str], batch: tuple[list[tuple[Extent, ...]], list[ray.ObjectRef], int]) -> Any:
        """Returns (seconds by way, bytes)."""
        parts, ref, total = batch
        took = {}
        for way in order:
            seconds, data = self.ways[way](parts, ref)
            took[way] = seconds
            found = sum(int(array.sum(dtype=np.uint64)) for array in data)
            if found != total:
                raise ValueError(f"{way} read bytes whose sum is {found}, not {total}")
        return took, sum(extent.nbytes for part in parts for extent in part)

    def _ours(self, parts: list[tuple[Extent, ...]], ref: list[ray.ObjectRef]) -> tuple[float, list[np.ndarray]]:
        started = time.perf_counter()
        data = self._pool.get_batch(parts)
        return time.perf_counter() - started, data

    def _ray(self, parts: list[tuple[Extent, ...]], ref: list[ray.ObjectRef]) -> tuple[float, list[np.ndarray]]:
        started = time.perf_counter()
        data = ray.get(ref[0], timeout=ANSWER_LIMIT_S)
        return time.perf_counter() - started, [data]


class RawNixl:
    """NIXL by hand, reading the giver's registered memory."""

    def __init__(self, export: SegmentExport) -> None:
        from nixl_cu12 import nixl_agent, nixl_agent_config  # not needed by the benchmark's driver

        assert export.network is not None
        self._export = NetworkExport.from_bytes(export.network)
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._agent = nixl_agent("raw", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._buffer = np.zeros(SEGMENT_NBYTES, np.uint8)
        self._agent.register_memory([(self._buffer.ctypes.data, len(self._buffer), 0, "")], "DRAM")
        self._peer = self._agent.add_remote_agent(self._export.metadata).decode()

    def prepare(self, parts: list[tuple[Extent, ...]]) -> None:
        """Build the request of the next ``read``."""
        here, there, self._end = [], [], 0
        for extent in (extent for part in parts for extent in part):
            for address, nbytes in self._export.locate(SPACE.place(extent).offset, extent.nbytes):
                here.append((self._buffer.ctypes.data + self._end, nbytes, 0))
                there.append((address, nbytes, 0))
                self._end += nbytes
        descriptors = [self._agent.get_xfer_descs(runs, "DRAM") for runs in (here, there)]
        self._handle = self._agent.initialize_xfer("READ", *descriptors, self._peer)

    def read(self, parts: list[tuple[Extent, ...]], ref: list[ray.ObjectRef]) -> tuple[float, list[np.ndarray]]:
        """The transfer alone."""
        self.prepare(parts)
        started = time.perf_counter()
        self._transfer()
        took = time.perf_counter() - started
        self._handle.release()
        return took, [self._buffer[: self._end]]

    def build_and_read(
        self, parts: list[tuple[Extent, ...]], ref: list[ray.ObjectRef]
    ) -> tuple[float, list[np.ndarray]]:
        """The transfer and the building of its request, as for a batch that is read once."""
        started = time.perf_counter()
        self.prepare(parts)
        self._transfer()
        took = time.perf_counter() - started
        self._handle.release()
        return took, [self._buffer[: self._end]]

    def _transfer(self) -> None:
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
        assert state == "DONE", state


def _open_pool(index: int, run_id: str, nbytes: int, exports: list[SegmentExport]) -> Pool:
    return Pool(
        process_index=index,
        node_id=f"host-{index // 2}",
        run_id=run_id,
        address_space=SPACE,
        segment_nbytes=nbytes,
        alignment=256,
        knob="SEGMENT_NBYTES",
        fetch_exports=lambda: exports,
        processes_per_node=2,
        network="nixl",
    )


def drive(rounds: int) -> Times:
    """Runs on the pair of nodes: all ways in turn, for all patterns."""
    ray.init(log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    (there,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    run_id = uuid.uuid4().hex[:8]

    def start(actor: type, node_id: str, *arguments: Any) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return ray.remote(num_cpus=1, scheduling_strategy=strategy)(actor).remote(*arguments)

    giver = start(Giver, here, run_id)
    export = ray.get(giver.export.remote(), timeout=ANSWER_LIMIT_S)
    taker = start(Taker, there, run_id, export)
    times: Times = {}
    for pattern, (count, nbytes) in PATTERNS.items():
        by_way = times[pattern] = defaultdict(list)
        for number in range(-WARM_UP_ROUNDS, rounds):
            order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            parts, ref, total = ray.get(giver.put.remote(count, nbytes), timeout=ANSWER_LIMIT_S)
            took, size = ray.get(taker.take.remote(order, (parts, [ref], total)), timeout=ANSWER_LIMIT_S)
            ray.get(giver.release.remote(), timeout=ANSWER_LIMIT_S)
            if number >= 0:
                for way, seconds in took.items():
                    by_way[way].append(seconds)
                by_way["nbytes"].append(size)
    return times


def network_figures(rounds: int = ROUNDS) -> list[Figure]:
    """Measure the link; prints the reason and returns no figures if the machine forbids namespaces."""
    try:
        with node_pair() as pair:
            file = pair.directory / "times.json"
            code, said = pair.run([sys.executable, __file__, str(rounds), str(file)], "driver", DRIVER_LIMIT_S)
            if code:
                raise subprocess.CalledProcessError(code, "benchmarks/_network.py", said)
            times: Times = json.loads(file.read_text())
    except NoHosts as reason:
        print(f"the link between two hosts is left out: {reason}", file=sys.stderr)
        return []
    return [figure for pattern, ways in times.items() for figure in _figures(pattern, ways)]


def _figures(pattern: str, ways: dict[str, list[float]]) -> list[Figure]:
    def speed(way: str) -> list[float]:
        return [nbytes / seconds / 1e9 for nbytes, seconds in zip(ways["nbytes"], ways[way], strict=True)]

    def ratio(of: str) -> tuple[float, str]:
        ratios = [ours / theirs for ours, theirs in zip(speed("ours"), speed(of), strict=True)]
        low, high = np.percentile(ratios, (25, 75))
        spread = f"quartiles {low:.2f} to {high:.2f}, all {min(ratios):.2f} to {max(ratios):.2f}"
        return median(ratios), f"median of {len(ratios)} pairs, {spread}"

    count, _ = PATTERNS[pattern]
    note = f"{count} extents, forced TCP over veth"
    figures = [Figure(f"network_{way}_{pattern}", median(speed(way)), "GB/s", note=note) for way in WAYS]
    for of, target in (("raw", RAW_TARGET), ("raw_built", None), ("ray", RAY_TARGET)):
        value, spread = ratio(of)
        name = f"network_ours_over_{of}_{pattern}"
        figures.append(at_least(name, value, "x", target, spread) if target else Figure(name, value, "x", note=spread))
    return figures


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(drive(int(sys.argv[1]))))
