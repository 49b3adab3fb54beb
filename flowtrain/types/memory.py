"""Memory: tiers and extents of the pool, what processes export of their segments, and what a host has."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

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
    """What a peer's device runtime on the same node needs to map device memory (``mempool/tiers/hbm.py``)."""

    runtime: str
    """Name of the device runtime."""
    handle: bytes
    """The runtime's handle of the allocation."""
    storage_nbytes: int
    """Bytes of segment plus stamp, its storage."""
    storage_offset: int
    """Where the storage starts in the allocation, in bytes."""
    counter_file: bytes
    """Shared file in which torch counts readers."""
    counter_index: int
    """This allocation's entry in it."""
    stamp: bytes
    """Random bytes at the end of the storage, which identify it."""
    started_ticks: int
    """When the owner's process started, in clock ticks since boot."""


@dataclass(frozen=True, slots=True)
class SocketOffer:
    """How a peer on the same node asks for a segment's bytes over a Unix socket."""

    name: str
    """Of the socket, in the abstract namespace."""
    token: bytes = field(repr=False)
    """Secret that a reader presents."""


@message
class MemoryFile:
    """A process's anonymous file of memory (memfd), which others of its node open through ``/proc/<pid>/fd/<fd>``."""

    pid: int
    fd: int
    name: str
    """By which it is known from what another process may have there."""


@dataclass(frozen=True, slots=True)
class SegmentExport:
    """What a process publishes about its bound memory in one tier, so that a peer can map it."""

    process_index: int
    """The process's place in the address space. An index is never used again in a run."""
    node_id: str
    """Node of the process. Peers on the same node can map ``/proc/<pid>/fd/<fd>``."""
    tier: Tier
    pid: int
    fd: int
    """The segment's ``memfd``; -1 if peers cannot map it, as in HBM."""
    bound_nbytes: int
    """Bytes bound, from the segment's start."""
    network: bytes | None = None
    """What the network transport of a peer on another node needs; None if the process is not on the network."""
    device: DeviceExport | None = None
    """How a peer maps device memory; None in DRAM."""
    socket: SocketOffer | None = None
    """How a peer asks for bytes of a segment that it cannot map (``pool.exchange: point_to_point``)."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Occupancy of one process's DRAM segment, in bytes. Bytes promised to leases count as used."""

    bound_nbytes: int
    """Bytes that have physical memory."""
    used_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    """Length of the largest free run."""
    num_extents: int
    """Extents in use."""
    fragmentation: float = 0.0
    """Share of the free bytes that lie outside the largest free run; promised bytes count as free here."""


@message
class SegmentUse:
    """How much of a process's segment is in use, in bytes."""

    name: str
    """Name of the process's actor."""
    tier: Tier
    used_nbytes: int
    """In DRAM with what is promised to leases; in HBM of READY parts."""
    bound_nbytes: int
    """Bytes that have physical memory."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that a host has and can use now, in bytes."""

    total_nbytes: int
    """Of the machine."""
    available_nbytes: int
    """What new segments can take without swapping, within the control group's limit."""
    cgroup_nbytes: int | None
    """Limit of the control group; None: unlimited."""
    memlock_nbytes: int | None
    """Limit on locked memory; None: unlimited."""


@dataclass(frozen=True, slots=True)
class Link:
    """One way to read memory of a node from another or the same node, as ``flowtrain doctor`` measures it."""

    source: str
    """Node that has the bytes."""
    destination: str
    """Node that reads them."""
    transport: str
    """Name of the transport."""
    latency_s: float | None = None
    """Median time of a small read (4 KiB) into a readable array; None if it was not measured."""
    bytes_per_s: float | None = None
    """Median speed of large reads (16 MiB) into a buffer of the reader; None if it was not measured."""
    fault: str | None = None
    """Why the link does not work; None if it works or was not tried."""
    off: str | None = None
    """Key and value of the configuration that turn it off; None if it was tried."""
