"""Builds a run's Flow from its configuration, the model's shape, and the state that the run starts from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import SampleFlops, sample_flops
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.feeding import Feeding
from flowtrain.flow.flow import Flow
from flowtrain.flow.members import Members
from flowtrain.flow.microbatches import Microbatches
from flowtrain.flow.order import ArrivalWindow, ByArrival, InOrder, Order, no_batches
from flowtrain.flow.parts import Parts
from flowtrain.flow.report import EventLog
from flowtrain.flow.steps import Elsewhere, FlopsOf, Steps, UnitPlanner
from flowtrain.flow.units import leftover_units, units_left
from flowtrain.mempool.gva import AddressSpace
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.scheduler.layout import Arrange
from flowtrain.scheduler.refit import CostRefitter
from flowtrain.scheduler.run_cost import is_refitted
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import Unit
from flowtrain.types.samples import SamplerState


def build_flow(
    config: RunConfig,
    model: ModelSpec,
    settings: FlowSettings,
    earlier: Flow | None = None,
    *,
    arrange: Arrange | None = None,
    planner: UnitPlanner | None = None,
    elsewhere: Elsewhere | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Flow:
    """Return the flow of a run. Compiles what planning needs first, so that no step waits for it.

    earlier: the flow whose processes it takes over, to make positions again from ``settings`` on.
    arrange: searches the arrangement of steps (``search.configured``).
    planner: plans the steps; None: the configured one, with the cost of ``settings``.
    elsewhere: as of ``Steps``.
    clock: returns the seconds by which leases expire.
    """
    pool = config.pool
    if planner is None:
        planner = configured = StepPlanner.from_config(config, settings.dp_size, settings.cost, arrange)
        configured.warm_up()
    parts = Parts(
        AddressSpace(num_processes=pool.max_processes, segment_nbytes=pool.max_segment_nbytes),
        alignment=pool.alignment,
        lease_timeout_s=config.limits.lease_timeout_s,
        keeps_batches=config.data.order == "deterministic",
        consumed=ConsumedPositions.at(settings.sampler_state),
        ranks_read_images=config.mode == "monolithic",
        clock=clock,
    )
    flow = assemble_flow(
        members=earlier.members if earlier is not None else Members(pool.max_processes, pool.processes_per_node),
        parts=parts,
        order=_order(config, settings, parts),
        planner=planner,
        elsewhere=elsewhere,
        units=units_left(settings),
        leftovers=leftover_units(settings),
        lookahead=config.scheduler.lookahead_steps,
        flops_of=partial(_flops_of, model, config),
        sampler_state=settings.sampler_state,
        dp_size=settings.dp_size,
        num_feeders=settings.num_feeders,
        refitter=CostRefitter(planner if is_refitted(config) else None),
        last_traced_step=settings.last_traced_step,
        num_rejected=settings.num_rejected,
        num_seen=settings.num_seen,
        whole_units=config.mode == "disaggregated" or config.exchanges_units,
        in_turn=config.exchanges_units,
    )
    if earlier is not None:
        flow.take_over(earlier)
    return flow


def assemble_flow(
    *,
    members: Members,
    parts: Parts,
    order: Order,
    planner: UnitPlanner,
    units: Iterator[Unit],
    leftovers: Iterable[Unit] = (),
    lookahead: int,
    flops_of: FlopsOf,
    sampler_state: SamplerState,
    dp_size: int,
    num_feeders: int = 1,
    refitter: CostRefitter | None = None,
    last_traced_step: int = 0,
    num_rejected: int = 0,
    num_seen: int = 0,
    whole_units: bool = False,
    in_turn: bool = False,
    elsewhere: Elsewhere | None = None,
) -> Flow:
    """Build a run's flow from its parts; arguments as of ``Flow`` and of the classes of its members."""
    microbatches = Microbatches(parts, whole_units)
    steps = Steps(
        units=units,
        leftovers=leftovers,
        lookahead=lookahead,
        order=order,
        planner=planner,
        microbatches=microbatches,
        flops_of=flops_of,
        elsewhere=elsewhere,
    )
    log = EventLog(
        num_replicas=dp_size,
        refitter=refitter if refitter is not None else CostRefitter(),
        last_traced_step=last_traced_step,
        num_rejected=num_rejected,
        num_seen=num_seen,
    )
    feeding = Feeding(steps, num_feeders, sampler_state)
    return Flow(
        members=members,
        parts=parts,
        microbatches=microbatches,
        steps=steps,
        log=log,
        feeding=feeding,
        in_turn=in_turn,
    )


def _flops_of(spec: ModelSpec, config: RunConfig, sizes: SampleSizes) -> SampleFlops:
    sees = config.mode != "llm_only"  # else neither encoder nor connector computes anything
    return sample_flops(
        spec,
        positions=sizes.positions,
        lengths=sizes.tokens,
        vision_lengths=sizes.vision_tokens if sees else np.zeros_like(sizes.vision_tokens),
        target_lengths=sizes.target_tokens,
        images={name: (part.images, part.patches) for name, part in sizes.parts.items() if sees},
        freeze=config.frozen_modules,
    )


def _order(config: RunConfig, settings: FlowSettings, parts: Parts) -> Order:
    if config.data.order == "deterministic":
        return InOrder()
    closing = {each.every for each in settings.evaluations if each.num_samples}
    window = ArrivalWindow(config.scheduler.lookahead_steps, settings.num_steps, closing)
    limits = {name: encoder.max_batch_patches for name, encoder in config.encoders.items()}
    make_batches = partial(make_encode_batches, max_batch_patches=limits, alignment=config.pool.alignment)
    return ByArrival(window, parts, make_batches if config.has_encoder_actors else no_batches, settings.sampler_state)
