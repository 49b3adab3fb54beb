"""Builds the coordinator's Flow from what the driver knows; runs inside the coordinator's process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowtrain.actors.agenda import Agenda
from flowtrain.actors.flow import Flow
from flowtrain.actors.garbage import expect_many_objects, keep_imports
from flowtrain.actors.membership import Membership
from flowtrain.actors.order import ByArrival, InOrder, Order
from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import SampleFlops, sample_flops
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.data.units import unit_sequence
from flowtrain.mempool.consumed import ConsumedPositions
from flowtrain.mempool.directory import Directory
from flowtrain.mempool.gva import AddressSpace
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.scheduler.refit import CostRefitter
from flowtrain.scheduler.run_cost import is_refitted
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.scheduler.window import ArrivalWindow
from flowtrain.types.plan import CostModel, Unit, UnitKind


@dataclass(frozen=True)
class FlowSettings:
    """What a run's flow starts from.

    sampler_state: of the checkpoint (see ``Order.state_behind``), or the sampler's first. cost: that steps are planned
    with. num_rejected, num_seen: training samples so far. replica_size: ranks of each of the ``dp_size`` replicas.
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
    cost: CostModel
    num_rejected: int
    num_seen: int
    replica_size: int = 1

    @property
    def first_unit(self) -> int:
        """Index of the first unit that runs; behind the last one if no step is left."""
        first = next(self.units(), None)
        return first.index if first is not None else 1 << 62

    def units(self) -> Iterator[Unit]:
        """The units that are left."""
        return self._units(self.start_step, self.num_steps)

    def leftovers(self) -> Iterator[Unit]:
        """The training units that are done, from the first of whose own positions some are left (``arrival`` order)."""
        first_step = 1 + self.sampler_state["next_position"] // self.config.training.global_batch_size
        return (unit for unit in self._units(first_step - 1, self.start_step) if unit.kind is UnitKind.TRAIN)

    def _units(self, start_step: int, num_steps: int) -> Iterator[Unit]:
        batch_size = self.config.training.global_batch_size
        return unit_sequence(num_steps, batch_size, self.total_positions, self.eval_every, self.num_eval, start_step)


def make_planner(config: RunConfig, dp_size: int, cost: CostModel) -> StepPlanner:
    """Build the planner of a run; cost: that its steps are planned with."""
    scheduler = config.scheduler
    return StepPlanner(
        dp_size=dp_size,
        microbatch_tokens=scheduler.microbatch_tokens,
        packing=scheduler.packing,
        cost=cost,
        num_buckets=scheduler.num_buckets,
        dispatch=scheduler.dispatch,
        max_batch_patches={name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
        alignment=config.pool.alignment,
        seed=config.seed,
    )


def make_flow(settings: FlowSettings) -> Flow:
    """Build the flow with its directory, planner and membership."""
    config = settings.config
    space = AddressSpace(num_processes=config.pool.max_processes, segment_nbytes=config.pool.max_segment_nbytes)
    planner = make_planner(config, settings.dp_size, settings.cost)
    planner.warm_up()

    directory = Directory(
        space,
        alignment=config.pool.alignment,
        lease_timeout_s=config.limits.lease_timeout_s,
        consumed=ConsumedPositions.from_state(settings.sampler_state),
    )
    agenda = Agenda(
        units=settings.units(),
        leftovers=settings.leftovers(),
        lookahead=config.scheduler.lookahead_steps,
        order=_make_order(settings, directory),
        planner=planner,
        directory=directory,
        flops_of=partial(_flops_of, settings.model_spec, config.model.freeze),
    )
    return Flow(
        agenda=agenda,
        sampler_state=settings.sampler_state,
        dp_size=settings.dp_size,
        replica_size=settings.replica_size,
        refitter=CostRefitter(planner if is_refitted(config) else None),
        directory=directory,
        membership=Membership(config.pool.max_processes, config.pool.processes_per_node),
        trace_steps=config.observability.trace_steps,
        num_rejected=settings.num_rejected,
        num_seen=settings.num_seen,
    )


def start_flow(settings: FlowSettings) -> Flow:
    """As ``make_flow``, for a process of its own."""
    flow = make_flow(settings)
    keep_imports()
    expect_many_objects()
    return flow


def _flops_of(spec: ModelSpec, freeze: Collection[str], sizes: SampleSizes) -> SampleFlops:
    return sample_flops(
        spec,
        positions=sizes.positions,
        lengths=sizes.tokens,
        vision_lengths=sizes.vision_tokens,
        target_lengths=sizes.target_tokens,
        images={name: (part.images, part.patches) for name, part in sizes.parts.items()},
        freeze=freeze,
    )


def _make_order(settings: FlowSettings, directory: Directory) -> Order:
    config = settings.config
    if config.data.order == "deterministic":
        return InOrder()
    window = ArrivalWindow(config.scheduler.lookahead_steps, settings.num_steps, settings.eval_every)
    limits = {name: encoder.max_batch_patches for name, encoder in config.encoders.items()}
    make_batches = partial(make_encode_batches, max_batch_patches=limits, alignment=config.pool.alignment)
    return ByArrival(window, directory, make_batches, settings.sampler_state)
