"""Builds the coordinator's Flow from what the driver knows; runs inside the coordinator's process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowtrain.actors.flow import Flow
from flowtrain.actors.membership import Membership
from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import sample_flops
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.data.units import unit_sequence
from flowtrain.mempool.directory import Directory
from flowtrain.mempool.gva import AddressSpace
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types import SizedSample, Unit


@dataclass(frozen=True)
class FlowSettings:
    """What a run's flow starts from.

    sampler_state: the sampler's integers behind ``start_step``. num_rejected, num_seen: training samples so far.
    """

    config: RunConfig
    model_spec: ModelSpec
    dp_size: int
    num_steps: int
    total_positions: int | None
    eval_every: int | None
    num_eval: int
    start_step: int
    sampler_state: dict[str, Any]
    num_rejected: int
    num_seen: int

    @property
    def first_unit(self) -> int:
        """Index of the first unit that runs; behind the last one if no step is left."""
        first = next(self.units(), None)
        return first.index if first is not None else 1 << 62

    def units(self) -> Iterator[Unit]:
        """The units that are left."""
        return unit_sequence(
            self.num_steps,
            self.config.training.global_batch_size,
            self.total_positions,
            self.eval_every,
            self.num_eval,
            self.start_step,
        )


def make_flow(settings: FlowSettings) -> Flow:
    """Build the flow with its directory, planner and membership."""
    config = settings.config
    scheduler = config.scheduler
    space = AddressSpace(num_processes=config.pool.max_processes, segment_nbytes=config.pool.max_segment_nbytes)
    planner = StepPlanner(
        dp_size=settings.dp_size,
        microbatch_tokens=scheduler.microbatch_tokens,
        packing=scheduler.packing,
        cost=scheduler.cost,
        num_buckets=scheduler.num_buckets,
        dispatch=scheduler.dispatch,
        max_batch_patches={name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
        alignment=config.pool.alignment,
    )

    def flops_of(samples: list[SizedSample]) -> float:
        return sum(sample_flops(settings.model_spec, sample, config.model.freeze).total for sample in samples)

    return Flow(
        units=settings.units(),
        sampler_state=settings.sampler_state,
        lookahead=scheduler.lookahead_steps,
        dp_size=settings.dp_size,
        planner=planner,
        directory=Directory(space, alignment=config.pool.alignment, lease_timeout_s=config.limits.lease_timeout_s),
        membership=Membership(config.pool.max_processes, config.pool.processes_per_node),
        flops_of=flops_of,
        trace_steps=config.observability.trace_steps,
        num_rejected=settings.num_rejected,
        num_seen=settings.num_seen,
    )
