"""Opening an actor's end of the memory pool."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.actors.link import CoordinatorLink
from flowtrain.config.flow import PoolConfig
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types import Joined


@dataclass(frozen=True)
class PoolMember:
    """A process that has joined the pool: its index, what it learned on joining, and its pool."""

    index: int
    joined: Joined
    pool: Pool


def address_space(config: PoolConfig) -> AddressSpace:
    """Return the run's address space; every process computes the same."""
    return AddressSpace(num_processes=config.max_processes, segment_nbytes=config.max_segment_nbytes)


def join_pool(
    link: CoordinatorLink, config: PoolConfig, run_id: str, name: str, segment_nbytes: int, knob: str
) -> PoolMember:
    """Join under ``name`` with a segment of ``segment_nbytes`` (0 for a reader) and publish it.

    knob: the configuration key that sets the segment's size, for messages.
    """
    joined: Joined = link.call("join", name, link.node_id)
    pool = Pool(
        process_index=joined.process_index,
        node_id=link.node_id,
        run_id=run_id,
        address_space=address_space(config),
        segment_nbytes=segment_nbytes,
        alignment=config.alignment,
        knob=knob,
        fetch_exports=lambda: link.call("exports"),
        processes_per_node=config.processes_per_node,
        # The driver has put in place of ``auto`` what the run needs where its actors are.
        network="nixl" if config.network == "nixl" else "none",
        transfer_timeout_s=config.transfer_timeout_s,
    )
    export = pool.export()
    if export is not None:
        link.call("publish", export)
    return PoolMember(joined.process_index, joined, pool)
