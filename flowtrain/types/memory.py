"""Memory: the pool's tiers and extents, what a process exports of its segments, and what a host has of it."""

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
    """Global virtual address of the first byte."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """What the device runtime of a peer on the same node needs to map device memory (``mempool/tiers/hbm.py``)."""

    runtime: str
    """Name of the device runtime."""
    handle: bytes
    """The runtime's handle of the allocation."""
    storage_nbytes: int
    """Bytes of segment plus stamp."""
    storage_offset: int
    """Where they start in the allocation, in bytes."""
    counter_file: bytes
    """Shared file in which torch counts readers."""
    counter_index: int
    """This allocation's entry in it."""
    stamp: bytes
    """Random bytes that the memory ends with."""
    started_ticks: int
    """When the process started, in clock ticks since boot."""


@dataclass(frozen=True, slots=True)
class SegmentExport:
    """What a process publishes of its bound memory in one tier, enough for a peer to map it."""

    process_index: int
    """The process's place in the address space, never used again in a run."""
    node_id: str
    """Peers with the same value can map ``/proc/<pid>/fd/<fd>``."""
    tier: Tier
    pid: int
    fd: int
    """The segment's ``memfd``; -1 in HBM."""
    bound_nbytes: int
    """Bytes bound, from the segment's start."""
    network: bytes | None = None
    """What the network transport of a peer on another node needs; None where the process offers none."""
    device: DeviceExport | None = None
    """None in DRAM."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Occupancy of one process's segment, in bytes; what is promised to leases counts as used."""

    bound_nbytes: int
    """Bytes that have physical memory."""
    used_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    """Of the largest free run."""
    num_extents: int
    """Extents in use."""
    fragmentation: float = 0.0
    """Share of all free bytes, promised ones included, outside the largest free run."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that a host has and may use now."""

    total_nbytes: int
    """Of the machine."""
    available_nbytes: int
    """What new segments can take without swapping and within the control group's limit."""
    cgroup_nbytes: int | None
    """Limit of the control group; None: unlimited."""
    memlock_nbytes: int | None
    """Limit on locked memory; None: unlimited."""


@dataclass(frozen=True, slots=True)
class Link:
    """One way to read from one node on another, or on the same one, as ``flowtrain doctor`` measures it."""

    source: str
    """Node that has the bytes."""
    destination: str
    """Node that reads them."""
    transport: str
    latency_s: float | None = None
    """Median of a small read (4 KiB) as a readable array; None where none was made."""
    bytes_per_s: float | None = None
    """Median of large reads (16 MiB) into a buffer of the reader; None where none was made."""
    fault: str | None = None
    """Why it does not work; None where it does."""
    off: str | None = None
    """The key of the configuration that turns it off, so that it was not tried."""
