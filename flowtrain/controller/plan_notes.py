"""What a reader of a plan must know before starting it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.degrees import degree_faults
from flowtrain.allocator.replication import AS_GOOD, Replication
from flowtrain.config.load import override_config
from flowtrain.config.startable import startable_faults
from flowtrain.controller.plan_pool import PoolNeed
from flowtrain.controller.planned import Planned
from flowtrain.errors import ConfigError


def notes(
    planned: Planned,
    allocation: Allocation,
    replication: Replication,
    overrides: Sequence[str],
    pool: PoolNeed,
) -> Iterator[str]:
    """Yield them, one sentence each; overrides, pool: of the plan."""
    idle = sum(allocation.budget.values()) - allocation.devices
    if idle:
        yield f"{idle} of {sum(allocation.budget.values())} devices stay free: no faster choice takes them"
    if allocation.rate_apart is not None:
        yield (
            "encoders and backbone share the one device and take turns; with a device for each they would reach "
            f"{allocation.rate_apart:.4g} samples/s, {allocation.rate_apart / allocation.rate:.2f} times as many"
        )
    if replication.rate is not None and not allocation.shared and replication.rate >= AS_GOOD * allocation.rate:
        compared = "would be faster" if replication.rate > allocation.rate / AS_GOOD else "would do as well"
        yield (
            f"plain replication of the whole model {compared}: {replication.rate:.4g} samples/s on "
            f"{replication.devices} devices, {replication.rate / allocation.rate:.0%} of the plan"
        )
    if allocation.rate_added is not None:
        yield (
            "with an encoder's replicas on several types of devices at once it would be "
            f"{allocation.rate_added:.4g} samples/s, {allocation.rate_added / allocation.rate:.2f} times as many; no "
            "run can start that yet"
        )
    yield from (f"a run refuses this plan: {fault}" for fault in _faults(planned, allocation, overrides))
    yield from _pool_notes(pool)


def _faults(planned: Planned, allocation: Allocation, overrides: Sequence[str]) -> list[str]:
    config, backbone = planned.config, allocation.modules[-1]
    faults = degree_faults(
        backbone.degrees, planned.model.backbone, chunks_per_rank=config.backbone.chunks_per_rank
    ) + startable_faults(config)
    try:
        override_config(config, overrides, check_paths=False)
    except ConfigError as error:
        faults.append(str(error))
    return faults


def _pool_notes(pool: PoolNeed) -> Iterator[str]:
    remedy = f"{' '.join(pool.remedy)} holds it" if pool.remedy else "no encoders.*.segment_nbytes alone mends that"
    if pool.fault is not None:
        yield f"a run refuses this plan: {pool.fault}; {remedy}"
    elif pool.segments_nbytes < pool.features_nbytes:
        yield f"the pool holds less than scheduler.lookahead_steps ask for, so encoders wait for room; {remedy}"
