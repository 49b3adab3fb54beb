"""Opens an actor's part of the memory pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from flowtrain.actors.garbage import keep_imports
from flowtrain.actors.link import CoordinatorLink
from flowtrain.config.flow import PoolConfig
from flowtrain.flow.api import CoordinatorApi
from flowtrain.mempool.device_side import DeviceSide
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.tiers.hbm import why_absent
from flowtrain.mempool.watermarks import Watermarks
from flowtrain.types.messages import Joined

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PoolMember:
    """A process that has joined the pool: its index, the coordinator's answer, and its pool."""

    index: int
    joined: Joined
    pool: Pool


def address_space(config: PoolConfig) -> AddressSpace:
    """Return the run's address space; all processes compute the same one."""
    return AddressSpace(num_processes=config.max_processes, segment_nbytes=config.max_segment_nbytes)


def hbm_offer(config: PoolConfig, reason: str | None) -> tuple[int, str]:
    """Return the bytes of HBM that an encoder gives, and a line for the log: that amount, or why it gives none.

    reason: why the encoders' device cannot have the tier, from ``why_absent``; None if it can.
    """
    if reason is None and config.network == "nixl":  # the driver has resolved ``auto``
        reason = "pool.network is nixl, and it is read on its own node alone"
    if reason is None and not config.hbm_segment_nbytes:
        reason = "pool.hbm_segment_nbytes is 0"
    if reason is None:
        nbytes, high = config.hbm_segment_nbytes, config.hbm_high_watermark
        return (
            nbytes,
            f"memory pool: each encoder gives {nbytes} bytes of hbm; above {high:.0%} features go to dram",
        )
    asked = config.hbm_segment_nbytes
    ignored = f", so pool.hbm_segment_nbytes ({asked}) has no effect" if asked else ""
    return 0, f"memory pool: the hbm tier is skipped ({reason}){ignored}; features stay in dram"


def join_pool(
    link: CoordinatorLink,
    config: PoolConfig,
    run_id: str,
    name: str,
    segment_nbytes: int,
    knob: str,
    device: torch.device = CPU,
    gives_hbm: bool = False,
    feeder: int | None = None,
) -> PoolMember:
    """Join the pool and publish the process's segments.

    config: the run's ``pool`` section.
    run_id: unique to the run.
    name: of the process.
    segment_nbytes: DRAM that it gives, in bytes; 0 for a reader.
    knob: configuration key that sets the segment's size, for messages.
    device: device that the process computes on; with an accelerator it can read HBM.
    gives_hbm: also give the HBM that the configuration sets.
    feeder: a feeder's number; None for any other process.
    """
    keep_imports()
    joined = link.ask(CoordinatorApi.join, name, link.node_id, feeder)
    space = address_space(config)
    reason = why_absent(device)
    hbm_nbytes, line = hbm_offer(config, reason) if gives_hbm else (0, "")
    if line:
        logger.log(logging.WARNING if config.hbm_segment_nbytes and not hbm_nbytes else logging.INFO, line)
    device_side = None
    if reason is None:
        marks = Watermarks(config.hbm_low_watermark, config.hbm_high_watermark)
        device_side = DeviceSide(joined.process_index, link.node_id, space, device, hbm_nbytes, config.alignment, marks)
    pool = Pool(
        process_index=joined.process_index,
        node_id=link.node_id,
        run_id=run_id,
        address_space=space,
        segment_nbytes=segment_nbytes,
        alignment=config.alignment,
        knob=knob,
        fetch_exports=lambda: link.ask(CoordinatorApi.exports),
        processes_per_node=config.processes_per_node,
        # The driver has already replaced ``auto`` by what the run needs.
        network="nixl" if config.network == "nixl" else "none",
        transfer_timeout_s=config.transfer_timeout_s,
        device=device_side,
        is_sparse=feeder is not None,  # sized for the worst case, which is many times the usual one
        is_private=config.exchange == "point_to_point" and feeder is None,
    )
    for export in pool.exports():
        link.ask(CoordinatorApi.publish, export)
    return PoolMember(joined.process_index, joined, pool)
