from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator

import pytest

from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import SegmentExport


class Peers:
    """Pools of one run in one process. ``published`` has the exports that the coordinator would list."""

    def __init__(self, segment_capacity: int = 1 << 24) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.space = AddressSpace(num_processes=16, segment_nbytes=segment_capacity)
        self.pools: dict[int, Pool] = {}
        self.published: dict[int, SegmentExport] = {}
        self.num_fetches = 0

    def open(self, index: int, nbytes: int = 1 << 16, node_id: str = "node-a", per_node: int | None = None) -> Pool:
        pool = Pool(
            process_index=index,
            node_id=node_id,
            run_id=self.run_id,
            address_space=self.space,
            segment_nbytes=nbytes,
            alignment=64,
            knob="encoders.vision.segment_nbytes",
            fetch_exports=self.exports,
            processes_per_node=per_node,
        )
        self.pools[index] = pool
        self.publish(index)
        return pool

    def publish(self, index: int) -> None:
        export = self.pools[index].export()
        if export is not None:
            self.published[index] = export

    def exports(self) -> list[SegmentExport]:
        self.num_fetches += 1
        return list(self.published.values())

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def mappings(run_id: str) -> list[str]:
    """Return the lines of this process's memory map that belong to a run."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        return [line for line in lines if f"flowtrain-{run_id}-" in line]


def traces(run_id: str) -> list[str]:
    """Return all holders of a run's memory on this machine: descriptors, mappings, files in /dev/shm."""
    found = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if run_id in name]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as lines:
                found += [f"{pid} maps it" for line in lines if run_id in line]
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if run_id in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    found.append(f"{pid} has it open as {fd}")
        except OSError:
            continue  # it ended while we looked, or is not ours to look at
    return found
