"""Measures the pool's transports between two processes, on memory like that of a run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from flowtrain.errors import PoolError, ResourceError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.page_table import Mapping
from flowtrain.mempool.tiers.dram import DramRegion, DramSegment
from flowtrain.mempool.transports.base import Transport
from flowtrain.mempool.transports.local import LocalTransport
from flowtrain.mempool.transports.nixl import NixlTransport
from flowtrain.mempool.transports.shared_memory import SharedMemoryTransport
from flowtrain.types.memory import Link, SegmentExport, Tier

SMALL_NBYTES = 4 << 10
LARGE_NBYTES = 16 << 20
SEGMENT_NBYTES = 2 * LARGE_NBYTES
SLOW_SHARE = 1 / 4
"""A link is reported as slow below this share of the speed of other links of its transport."""
SLOW_NETWORK_SHARE = 1 / 50
"""A network is reported as slow below this share of a plain copy on its reader; 10 Gbit/s Ethernet gives a tenth."""
_SMALL_READS, _LARGE_READS = 200, 20
_TIMEOUT_S = 30.0


class Probe:
    """One process that gives a segment of known bytes and reads the segments of others.

    run_id, process_index, node_id: as of a ``Pool``.
    num_processes: number of probes.
    network: also try the network transport, if NIXL is installed; it opens ports.
    """

    def __init__(self, run_id: str, process_index: int, node_id: str, num_processes: int, network: bool = True) -> None:
        self._index = process_index
        self._node_id = node_id
        self._segment = DramSegment(run_id, process_index, SEGMENT_NBYTES)
        self._segment.array[:] = _known_bytes(process_index)
        space = AddressSpace(num_processes, SEGMENT_NBYTES)
        region = DramRegion(space, run_id, range(num_processes))
        self._transports: dict[str, Transport] = {
            LocalTransport.name: LocalTransport(self._segment),
            SharedMemoryTransport.name: SharedMemoryTransport(region),
        }
        self._network, self._no_network, self._offer = network, "", None
        if not network:
            return
        try:
            nixl = NixlTransport(f"probe-{run_id}-{process_index}", _TIMEOUT_S)
        except ResourceError as error:
            self._no_network = str(error)
        else:
            self._transports[NixlTransport.name] = nixl
            self._offer = nixl.offer(self._segment.array)

    def export(self) -> SegmentExport:
        """Return what other probes need to read this segment."""
        nbytes = len(self._segment.array)
        return SegmentExport(
            self._index, self._node_id, Tier.DRAM, os.getpid(), self._segment.fd, nbytes, network=self._offer
        )

    def measure(self, owner: SegmentExport) -> tuple[Link, ...]:
        """Read another process's segment, or the own one, by every possible transport. Failed links have a ``fault``.

        On one node, shared memory is tried, and the network too, to check that it works.
        """
        if owner.process_index == self._index:
            return (self._measure(LocalTransport.name, owner),)
        names = [NixlTransport.name]
        if owner.node_id == self._node_id:
            names.insert(0, SharedMemoryTransport.name)
        return tuple(self._measure(name, owner) for name in names)

    def close(self) -> None:
        """Free everything."""
        for transport in self._transports.values():
            transport.close()
        self._segment.close()

    def _measure(self, name: str, owner: SegmentExport) -> Link:
        transport = self._transports.get(name)
        if transport is None and not self._network:
            return Link(owner.node_id, self._node_id, name, off="pool.network is none")
        if transport is None:
            return Link(owner.node_id, self._node_id, name, fault=self._no_network)
        try:
            latency_s, bytes_per_s = _measure(transport, owner)
        except (PoolError, OSError) as error:
            return Link(owner.node_id, self._node_id, name, fault=str(error))
        return Link(owner.node_id, self._node_id, name, latency_s, bytes_per_s)


def slow_links(links: Sequence[Link]) -> list[str]:
    """Return a warning for each link that is far slower than others of its transport, or a network than a copy."""
    warnings = []
    for link in links:
        if link.bytes_per_s is None:
            continue
        peers = [other.bytes_per_s for other in links if other is not link and _comparable(link, other)]
        usual = statistics.median([speed for speed in peers if speed is not None] or [0.0])
        if link.bytes_per_s < SLOW_SHARE * usual:
            warnings.append(
                f"{_name(link)} gives {_speed(link.bytes_per_s)}, others of its kind {_speed(usual)}: check what "
                f"else runs there{'' if link.source == link.destination else ', at the cable and the interfaces'}"
            )
            continue
        copy = next((other.bytes_per_s for other in links if _is_copy_at(other, link.destination)), None)
        if link.transport == NixlTransport.name and copy and link.bytes_per_s < SLOW_NETWORK_SHARE * copy:
            warnings.append(
                f"{_name(link)} gives {_speed(link.bytes_per_s)}, a plain copy there {_speed(copy)}: see UCX_TLS and "
                "UCX_NET_DEVICES, and that PYTORCH_CUDA_ALLOC_CONF does not have expandable_segments:True"
            )
    return warnings


def _comparable(link: Link, other: Link) -> bool:
    same_place = (link.source == link.destination) == (other.source == other.destination)
    return other.transport == link.transport and same_place


def _is_copy_at(link: Link, node: str) -> bool:
    return link.transport == LocalTransport.name and link.destination == node


def _name(link: Link) -> str:
    return f"{link.transport} from {link.source} to {link.destination}"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2g} GB/s"


def _measure(transport: Transport, owner: SegmentExport) -> tuple[float, float]:
    """Return (seconds of a small read, bytes per second of large reads). Raises PoolError if wrong bytes arrive."""
    expected = _known_bytes(owner.process_index)
    # Each read takes other bytes than the one before, so that no cache has them.
    large = [Mapping(owner, i % 2 * LARGE_NBYTES, LARGE_NBYTES) for i in range(_LARGE_READS)]
    small = [Mapping(owner, i * SMALL_NBYTES, SMALL_NBYTES) for i in range(_SMALL_READS)]
    buffer = np.empty(LARGE_NBYTES, np.uint8)
    for source in large[:2]:  # also connects, and touches the pages
        transport.read_into((source,), buffer)
        if not np.array_equal(buffer, expected[source.offset : source.offset + source.nbytes]):
            raise PoolError(f"transport {transport.name} brings other bytes than process {owner.process_index} has")
    large_s = _median_s(lambda source: transport.read_into((source,), buffer), large)
    small_s = _median_s(lambda source: transport.read((source,)), small)
    return small_s, LARGE_NBYTES / large_s


def _median_s(read: Callable[[Mapping], object], sources: Sequence[Mapping]) -> float:
    durations = []
    for source in sources:
        started = time.perf_counter()
        read(source)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def _known_bytes(process_index: int) -> np.ndarray:
    return np.random.default_rng(process_index).integers(0, 256, SEGMENT_NBYTES, np.uint8)
