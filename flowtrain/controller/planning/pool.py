"""Checks that a planned pool can hold the encoders' lookahead."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from flowtrain.controller.planning.planned import Planned
from flowtrain.costs.training_setup import DTYPE_NBYTES
from flowtrain.errors import ConfigError, Fault, FaultCode
from flowtrain.types.run_plan import Plan

_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """Bytes of encoders' features in the pool."""

    features_nbytes: int
    """Features of mean samples when encoders are as far ahead as ``scheduler.lookahead_steps`` allows."""
    segments_nbytes: int
    """Segments that all encoders of the plan give."""
    node_nbytes: int
    """Segments on one node that holds as many encoders as fit."""
    fault: Fault | None
    """Why a run with these segments is refused; None if it is not, or if that is not known."""
    remedy: dict[str, int]
    """Segment of each encoder, such that together they hold ``features_nbytes`` and no run refuses them; empty if the
    plan's segments suffice, or if no sizes do."""

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self) | {"fault": self.fault.text if self.fault is not None else None}


def with_pool(planned: Planned, plan: Plan, devices_per_node: int) -> Plan:
    """Return the plan with larger segments if a run would refuse its own and larger ones fix that."""
    need = pool_need(planned, plan, devices_per_node)
    if need.fault is None:
        return plan
    return _with_segments(plan, _remedy(planned, plan, need.segments_nbytes))


def with_room(planned: Planned, plan: Plan, devices_per_node: int) -> Plan:
    """Return the plan; that of a model file with room for the lookahead in the segments that no override sets."""
    if planned.is_run:
        return plan
    advised = pool_need(planned, plan, devices_per_node).remedy
    return _with_segments(plan, {name: size for name, size in advised.items() if name not in planned.own_segments})


def pool_need(planned: Planned, plan: Plan, devices_per_node: int) -> PoolNeed:
    """Return what the plan needs of the pool: nothing in modes without features."""
    if not plan.encoders:
        return PoolNeed(0, 0, 0, None, {})
    workload, config = planned.workload, planned.config
    rows = workload.global_batch_size * float(workload.vision_lengths.mean())
    row_nbytes = planned.model.connector.feature_dim * DTYPE_NBYTES[config.model.dtype]
    features = int((1 + config.scheduler.lookahead_steps) * rows * row_nbytes)
    segments = sum(module.data_parallel_size * module.segment_nbytes for module in plan.encoders.values())
    largest = max(module.segment_nbytes / module.tensor_parallel_size for module in plan.encoders.values())
    num_actors = sum(module.num_actors for module in plan.encoders.values())
    fault = _fault(planned, plan)
    is_enough = fault is None and segments >= features
    remedy = {} if is_enough else _remedy(planned, plan, features)
    return PoolNeed(features, segments, int(min(num_actors, devices_per_node) * largest), fault, remedy)


def _remedy(planned: Planned, plan: Plan, nbytes: int) -> dict[str, int]:
    """The smallest segments that together hold ``nbytes`` and that no run refuses; empty if there are none."""
    least = -(-nbytes // sum(module.data_parallel_size for module in plan.encoders.values()))

    def sizes(nbytes: int) -> dict[str, int]:
        return {name: max(nbytes, module.segment_nbytes) for name, module in plan.encoders.items()}

    def is_enough(nbytes: int) -> bool:
        return _fault(planned, _with_segments(plan, sizes(nbytes))) is None

    enough = next((least << k for k in range(_DOUBLINGS) if is_enough(least << k)), None)
    if enough is None:
        return {}
    low, high = (enough // 2, enough) if enough > least else (least - 1, least)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return sizes(high)


def _with_segments(plan: Plan, sizes: dict[str, int]) -> Plan:
    encoders = {
        name: replace(module, segment_nbytes=sizes.get(name, module.segment_nbytes))
        for name, module in plan.encoders.items()
    }
    return replace(plan, encoders=encoders)


def _fault(planned: Planned, plan: Plan) -> Fault | None:
    """Why a run is refused for its pool; None if the plan is already refused for something else."""
    try:
        changed = planned.config.with_plan(plan)
    except ConfigError as error:
        return next((fault for fault in error.faults if fault.code is FaultCode.POOL), None)
    return planned.pool_fault(changed) if planned.pool_fault is not None else None
