"""What a reader of a plan must know before starting it."""

from __future__ import annotations

from collections.abc import Iterator

from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.degrees import degree_faults
from flowtrain.allocator.plan import Plan, plan_changes
from flowtrain.allocator.replication import AS_GOOD, Replication
from flowtrain.config.load import override_config
from flowtrain.config.startable import startable_faults
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.pool import PoolNeed, segment_overrides
from flowtrain.errors import ConfigError

REFUSED = "a run refuses this plan"
"""How a note begins that says why the plan cannot be started as it is."""


def notes(
    planned: Planned,
    allocation: Allocation,
    replication: Replication,
    plan: Plan,
    pool: PoolNeed,
) -> Iterator[str]:
    """Yield them, one sentence each; plan, pool: what of the allocation is started."""
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
            f"{replication.devices} devices, {replication.rate / allocation.rate:.0%} of the plan; "
            "FlowTrain does not train like that, other trainers do"
        )
    if allocation.rate_added is not None:
        yield (
            "with an encoder's replicas on several types of devices at once it would be "
            f"{allocation.rate_added:.4g} samples/s, {allocation.rate_added / allocation.rate:.2f} times as many; no "
            "run can start that yet"
        )
    yield from (f"{REFUSED}: {fault}" for fault in _faults(planned, allocation, plan))
    for name, module in plan.encoders.items():
        if module.segment_nbytes > (given := planned.config.encoders[name].segment_nbytes):
            yield (
                f"encoders.{name}.segment_nbytes is raised from {given} to {module.segment_nbytes}: a run with less of "
                "a pool is refused"
            )
    yield from _pool_notes(pool)


def _faults(planned: Planned, allocation: Allocation, plan: Plan) -> list[str]:
    config, backbone = planned.config, allocation.modules[-1]
    faults = degree_faults(
        backbone.degrees, planned.model.backbone, chunks_per_rank=config.backbone.chunks_per_rank
    ) + startable_faults(config)
    try:
        override_config(config, plan_changes(config, plan), check_paths=False)
    except ConfigError as error:
        faults.append(str(error))
    return faults


def _pool_notes(pool: PoolNeed) -> Iterator[str]:
    remedy = (
        f"{' '.join(segment_overrides(pool.remedy))} holds it"
        if pool.remedy
        else "no encoders.*.segment_nbytes alone mends that"
    )
    if pool.fault is not None:
        yield f"{REFUSED}: {pool.fault}; {remedy}"
    elif pool.segments_nbytes < pool.features_nbytes:
        yield f"the pool holds less than scheduler.lookahead_steps ask for, so encoders wait for room; {remedy}"
