"""The memory pool: tiers, extents, and what a process exports of its segments."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flowtrain.types.wire import message


class Tier(enum.StrEnum):
    """A kind of memory that the pool spans."""

    HBM = "hbm"
    DRAM = "dram"


@message
class Extent:
    """A contiguous run of bytes in the pool's address space."""

    gva: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """What the device runtime of a peer on the same node needs to map device memory (``mempool/tiers/hbm.py``).

    runtime: its name. handle: of the allocation; storage_nbytes from storage_offset of it are the segment and behind it
    its stamp. counter_file, counter_index: where torch counts readers. stamp: random bytes that the memory ends with.
    started_ticks: when the process started, in clock ticks since boot.
    """

    runtime: str
    handle: bytes
    storage_nbytes: int
    storage_offset: int
    counter_file: bytes
    counter_index: int
    stamp: bytes
    started_ticks: int


@dataclass(frozen=True, slots=True)
class SegmentExport:
    """What a process publishes of its bound memory in one tier, enough for a peer to map it.

    process_index: the process's place in the address space, never used again in a run. node_id: peers with the same
    value can map ``/proc/<pid>/fd/<fd>`` (-1 in HBM). bound_nbytes: bytes bound from the segment's start. network: what
    the network transport of a peer on another node needs, opaque to everybody else; None where the process offers none.
    device: of HBM alone.
    """

    process_index: int
    node_id: str
    tier: Tier
    pid: int
    fd: int
    bound_nbytes: int
    network: bytes | None = None
    device: DeviceExport | None = None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Occupancy of one process's segment, in bytes; what is promised to leases counts as used.

    largest_free_nbytes: of the largest free run. fragmentation: share of all free bytes, promised ones included, that
    lie outside that run.
    """

    bound_nbytes: int
    used_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    num_extents: int
    fragmentation: float = 0.0
