"""Whether the pool that a plan would start with holds what its encoders are to be ahead with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowtrain.allocator.plan import Plan, plan_changes
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned import Planned
from flowtrain.errors import ConfigError

_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """Bytes of encoders' features in the pool.

    features: when encoders are as far ahead as ``scheduler.lookahead_steps`` lets them, of mean samples. segments: that
    all encoders of the plan give. node: that encoders give on a node, where as many as fit lie on one. fault: why a run
    with these segments is refused, None where it is not or that is not known. remedy: segments of each encoder that
    hold the features and are not refused; empty where nothing lacks, or where no segments do.
    """

    features_nbytes: int
    segments_nbytes: int
    node_nbytes: int
    fault: str | None
    remedy: dict[str, int]


def with_pool(planned: Planned, plan: Plan, devices_per_node: int) -> Plan:
    """Return the plan with segments that no run is refused for, where larger ones alone are what it takes."""
    need = pool_need(planned, plan, devices_per_node)
    if need.fault is None:
        return plan
    raised = _remedy(planned, plan, plan_changes(planned.config, plan), need.segments_nbytes)
    encoders = {
        name: replace(module, segment_nbytes=raised.get(name, module.segment_nbytes))
        for name, module in plan.encoders.items()
    }
    return replace(plan, encoders=encoders)


def pool_need(planned: Planned, plan: Plan, devices_per_node: int) -> PoolNeed:
    """Return what the pool is asked for."""
    workload, config = planned.workload, planned.config
    overrides = plan_changes(config, plan)
    rows = workload.global_batch_size * float(workload.vision_lengths.mean())
    row_nbytes = planned.model.connector.feature_dim * {"bfloat16": 2, "float32": 4}[config.model.dtype]
    features = int((1 + config.scheduler.lookahead_steps) * rows * row_nbytes)
    segments = sum(module.data_parallel_size * module.segment_nbytes for module in plan.encoders.values())
    largest = max(module.segment_nbytes / module.tensor_parallel_size for module in plan.encoders.values())
    num_actors = sum(module.num_actors for module in plan.encoders.values())
    fault = _fault(planned, config, overrides)
    is_enough = fault is None and segments >= features
    remedy = {} if is_enough else _remedy(planned, plan, overrides, features)
    return PoolNeed(features, segments, int(min(num_actors, devices_per_node) * largest), fault, remedy)


def _remedy(planned: Planned, plan: Plan, overrides: Sequence[str], nbytes: int) -> dict[str, int]:
    """The smallest segments that hold so many bytes together and that no run is refused for; empty where none are."""
    least = -(-nbytes // sum(module.data_parallel_size for module in plan.encoders.values()))

    def sizes(nbytes: int) -> dict[str, int]:
        return {name: max(nbytes, module.segment_nbytes) for name, module in plan.encoders.items()}

    def is_enough(nbytes: int) -> bool:
        changes = segment_overrides(sizes(nbytes))
        return _fault(planned, planned.config, [*overrides, *changes]) is None

    enough = next((least << k for k in range(_DOUBLINGS) if is_enough(least << k)), None)
    if enough is None:
        return {}
    low, high = (enough // 2, enough) if enough > least else (least - 1, least)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return sizes(high)


def segment_overrides(sizes: Mapping[str, int]) -> list[str]:
    """Return encoders' segments, in bytes, as changes to a configuration."""
    return [f"encoders.{name}.segment_nbytes={size}" for name, size in sizes.items()]


def _fault(planned: Planned, config: RunConfig, overrides: Sequence[str]) -> str | None:
    """Why a run is refused for its pool; None where the plan is refused for something else already."""
    try:
        changed = override_config(config, overrides, check_paths=False)
    except ConfigError as error:
        return str(error) if "segment_nbytes" in str(error) else None
    return planned.pool_fault(changed) if planned.pool_fault is not None else None
