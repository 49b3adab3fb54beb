"""What a reader of a plan must know before starting it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.degrees import degree_faults
from flowtrain.allocator.mode_rating import ModeComparison, ModeRating
from flowtrain.allocator.mode_reasons import NOTABLE, rate_text
from flowtrain.allocator.plan import FEEDER_RATE, feeders_needed
from flowtrain.config.allocator import PLANNER_CHOICES
from flowtrain.config.startable import startable_faults
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.pool import PoolNeed
from flowtrain.costs.cluster import Cluster
from flowtrain.errors import ConfigError, Fault, FaultCode
from flowtrain.types.run_plan import Plan

_REFUSED = "a run refuses this plan"


def plan_faults(planned: Planned, plan: Plan) -> list[Fault]:
    """Return why a run refuses a plan; faults of the pool are in ``pool_need``."""
    config, refused = planned.config, []
    try:
        config = config.with_plan(plan)
    except ConfigError as error:
        refused = [fault for fault in error.faults if fault.code is not FaultCode.POOL]
    chunks = config.pipeline.chunks
    faults = degree_faults(plan.backbone.degrees, planned.model.backbone, chunks_per_rank=chunks)
    return [*faults, *startable_faults(config), *refused]


def notes(
    planned: Planned,
    comparison: ModeComparison,
    cluster: Cluster,
    plan: Plan,
    faults: Sequence[Fault],
    pool: PoolNeed,
) -> Iterator[str]:
    """Yield the notes, one sentence each.

    plan: the winner's, which a run starts with. faults: from ``plan_faults``. pool: from ``pool_need``.
    """
    winner, allocation = comparison.winner, comparison.allocation
    if winner.mode == "decoupled" and allocation is not None:
        yield from _split_notes(allocation)
    counts = planned.config.pipeline.counts
    if counts is not None:
        pp, chunks = plan.backbone.pipeline_parallel_size, planned.config.pipeline.chunks
        for_pp = len(counts) // chunks
        remedy = "" if pp == for_pp else f"; the plan has {pp}: start it with pipeline.partition=null"
        yield (
            f"pipeline.partition is for backbone.pipeline_parallel_size {for_pp}; plans with another one have balanced "
            f"stages{remedy}"
        )
    if idle := cluster.num_devices - winner.devices:
        yield f"{idle} of {cluster.num_devices} devices stay free: no choice that uses them is faster"
    if (alone := only_mode(planned)) is not None:
        yield alone
    yield from _feeder_notes(winner, plan.feeder.data_parallel_size)
    memory = winner.modules[-1].memory
    if memory is not None and memory.host:
        yield (
            f"activations wait in {memory.host / 2**30:.1f} GiB of pinned host memory of each backbone rank; whether "
            "nodes have that is not known here"
        )
    yield from (f"{_REFUSED}: {fault.text}" for fault in faults)
    if any(module.mfu > 1.0 for module in winner.modules):
        yield (
            "an MFU above 100 % means that the profile's peak was measured while others used the device; profile "
            "again on an idle machine"
        )
    for name, module in plan.encoders.items():
        if module.segment_nbytes > (given := planned.config.encoders[name].segment_nbytes):
            yield (
                f"encoders.{name}.segment_nbytes is raised from {given} to {module.segment_nbytes}: a run with a "
                "smaller pool is refused"
            )
    yield from _pool_notes(pool)


def only_mode(planned: Planned) -> str | None:
    """Return which settings the plan of the only mode has; None if all modes are compared."""
    if planned.config.mode == "auto":
        return None
    return f"only mode {planned.config.mode!r} was planned, {_chosen(planned)}; mode=auto compares all modes"


def _chosen(planned: Planned) -> str:
    """Which settings a plan of one mode chooses, and how to free them."""
    freed = [name for name in PLANNER_CHOICES if name in planned.config.planner_choices]
    if not freed:
        return "with its settings as configured; allocator.choose=all frees them"
    if len(freed) == len(PLANNER_CHOICES):
        return "and all settings that a plan may choose"
    return f"and of its settings {', '.join(freed)}; allocator.choose=all frees the others"


def _feeder_notes(winner: ModeRating, feeders: int) -> Iterator[str]:
    """What rates leave out: feeders. A trial had its own."""
    read = feeders * FEEDER_RATE
    if winner.rate is None or winner.was_tried or read >= winner.rate * (1.0 - NOTABLE):
        return
    yield (
        f"{'1 feeder reads' if feeders == 1 else f'{feeders} feeders read'} {rate_text(read)} samples/s, and the rate "
        f"needs {feeders_needed(winner.rate)}: a run would wait for its data, as flowtrain simulate shows; "
        "data.num_feeders=N sets another number"
    )


def _split_notes(allocation: Allocation) -> Iterator[str]:
    if allocation.rate_milp is not None:
        how = "half and half" if allocation.method == "even" else "in proportion to FLOPs"
        yield (
            f"allocator.method ({allocation.method!r}) gave this plan: devices are split {how}, and each side takes "
            f"its best degrees, as an ablation; milp would give {rate_text(allocation.rate_milp)} samples/s, "
            f"{allocation.rate_milp / allocation.rate:.2f} times as many"
        )
    if allocation.rate_apart is not None:
        yield (
            "encoders and backbone share the one device in turn; with a device for each they would reach "
            f"{rate_text(allocation.rate_apart)} samples/s, {allocation.rate_apart / allocation.rate:.2f} times as many"
        )
    if allocation.rate_added is not None:
        yield (
            "with an encoder's replicas on several types of devices at once it would be "
            f"{rate_text(allocation.rate_added)} samples/s, {allocation.rate_added / allocation.rate:.2f} times as "
            "many; a run cannot do that yet"
        )


def _pool_notes(pool: PoolNeed) -> Iterator[str]:
    sizes = [f"encoders.{name}.segment_nbytes={size}" for name, size in pool.remedy.items()]
    remedy = f"set {' '.join(sizes)}" if sizes else "no encoders.*.segment_nbytes alone fixes that"
    if pool.fault is not None:
        yield f"{_REFUSED}: {pool.fault.text}; {remedy}"
    elif pool.segments_nbytes < pool.features_nbytes:
        yield f"the pool holds less than scheduler.lookahead_steps asks for, so encoders wait for room; {remedy}"
