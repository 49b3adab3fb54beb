"""Configurations timed with the coordinator's own flow class: feeders, encoders, pool, scheduler and consumers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.drawn import encoded_steps, replicas_of
from flowtrain.allocator.drawn_batches import SIMULATED_BATCHES, DrawnBatches, PackedBatches, packing_cost
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.plan import FEEDER_RATE
from flowtrain.allocator.request import Request
from flowtrain.allocator.simulated import (
    DeviceTimesOf,
    schedule_of,
    step_simulator,
    with_shared_devices,
    works_of,
)
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.config.flow import TraceConfig
from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import IntArray
from flowtrain.flow.build import build_flow
from flowtrain.flow.flow import Flow
from flowtrain.mempool.gva import AddressSpace
from flowtrain.pipeline.actions import parse_schedule
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.search.configured import search_of
from flowtrain.simulator.consumers import Backbone, StepOf
from flowtrain.simulator.flow_run import Disturbances, FlowRun, FlowWorld, simulate_flow
from flowtrain.simulator.program import Program
from flowtrain.simulator.run import StepWork
from flowtrain.simulator.samples import DrawnSamples, RepeatedPlanner, SampleKind
from flowtrain.simulator.step import StepSimulator
from flowtrain.simulator.virtual import Clock
from flowtrain.simulator.virtual_encoders import EncoderGroup
from flowtrain.simulator.virtual_feeders import FeederGroup
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import Schedules, StepPlan
from flowtrain.types.run_plan import Plan
from flowtrain.types.samples import TEXT_NBYTES, TEXT_PART, PartSize, SamplerState

_COMPRESSION = 10
"""Bytes of an image's pixels over those of its file, as of JPEG; plans do not know the files."""


@dataclass(frozen=True)
class FlowCandidate:
    """One configuration of a run, as far as its flow depends on it.

    Raises ConfigError in ``simulated`` if the pool cannot hold what the run needs at once.
    """

    request: Request
    """With the settings of the candidate."""
    surrogate: Surrogate
    times_of: DeviceTimesOf
    candidate: ModeCandidate
    batches: DrawnBatches
    config: RunConfig
    plan: Plan
    """What starts the candidate: feeders, and segments of the pool."""
    slowdown: float = 1.0
    """In ``colocated``, the time of encoder and backbone at once on a device over the sum of both alone."""
    disturbances: Disturbances = field(default_factory=Disturbances)

    def simulated(self, num_steps: int) -> FlowRun:
        """Return the times of a run of at least so many steps; each half of it has each drawn batch as often."""
        packed = self.batches.packed(self.request, self.candidate.backbone.degrees.dp)
        samples = DrawnSamples(self._kinds(), _drawn(self.batches, packed)[:SIMULATED_BATCHES])
        rounds = 2 * samples.num_batches
        return simulate_flow(self._world(packed, samples, -(-num_steps // rounds) * rounds))

    def _world(self, packed: PackedBatches, samples: DrawnSamples, num_steps: int) -> FlowWorld:
        simulator, config = step_simulator(self.request, self.times_of, self.candidate), self._flow_config()
        pool = config.pool
        return FlowWorld(
            make_flow=self._make_flow(config, simulator, packed, samples, num_steps),
            space=AddressSpace(num_processes=pool.max_processes, segment_nbytes=pool.max_segment_nbytes),
            alignment=pool.alignment,
            samples=samples,
            feeders=self._feeders(packed),
            encoders=tuple(self._encoders(name, each, packed) for name, each in self.candidate.encoders.items()),
            backbone=Backbone(
                simulator,
                self._step_of(simulator, packed, samples),
                num_replicas=packed.dp,
                num_steps=num_steps,
                prefetch=config.backbone.prefetch_microbatches,
                lookahead=config.scheduler.lookahead_steps,
            ),
            disturbances=self.disturbances,
        )

    def _flow_config(self) -> RunConfig:
        """The configuration of the candidate's flow, which records no trace."""
        config, tokens = self.config, self.request.workload.microbatch_tokens
        changes = {
            "mode": self.candidate.mode,
            "pipeline": config.pipeline.model_copy(update={"schedule": schedule_of(self.request)}),
            "scheduler": config.scheduler.model_copy(update={"microbatch_tokens": tokens}),
            "observability": config.observability.model_copy(update={"trace": TraceConfig(steps=0)}),
        }
        return config.model_copy(update=changes)

    def _make_flow(
        self,
        config: RunConfig,
        simulator: StepSimulator,
        packed: PackedBatches,
        samples: DrawnSamples,
        num_steps: int,
    ) -> Callable[[Clock], Flow]:
        cost = packing_cost(config.scheduler, self.request)
        settings = FlowSettings(
            global_batch_size=samples.batch_size,
            dp_size=packed.dp,
            num_steps=num_steps,
            total_positions=None,
            start_step=0,
            sampler_state=SamplerState(0),
            cost=cost,
            num_rejected=0,
            num_seen=0,
            num_feeders=self._feeders(packed).count,
        )
        search = search_of(config, simulator) if config.pipeline.policy == "pipetune" else None
        planner = RepeatedPlanner(StepPlanner.from_config(config, packed.dp, cost, search), samples)
        return lambda clock: build_flow(config, self.request.model, settings, planner=planner, clock=clock)

    def _feeders(self, packed: PackedBatches) -> FeederGroup:
        feeder = self.plan.feeder
        count = max(1, round(feeder.data_parallel_size * packed.share))
        # So many feeders are as fast as the share of all that the packed share of the batch has.
        scale = count / (feeder.data_parallel_size * packed.share)
        return FeederGroup(count, scale / FEEDER_RATE, feeder.segment_nbytes or None)

    def _encoders(self, name: str, chosen: Candidate, packed: PackedBatches) -> EncoderGroup:
        count = replicas_of(chosen, packed)
        scale = count / (chosen.degrees.dp * packed.share)
        stages = self.surrogate.times[chosen.device_type].encode_stages_s(name, chosen.degrees.tp)
        decode, forward = ((scale * each).tolist() for each in stages)
        return EncoderGroup(name, count, decode, forward, self.plan.encoders[name].segment_nbytes)

    def _kinds(self) -> list[SampleKind]:
        """The representative samples as feeders size them."""
        workload, model, mode = self.request.workload, self.request.model, self.candidate.mode
        rows = model.connector.feature_dim * self.request.setup.dtype_nbytes
        images = {} if mode == "llm_only" else workload.images
        columns = zip(workload.lengths, workload.vision_lengths, workload.target_lengths, strict=True)
        kinds = []
        for index, (tokens, vision, targets) in enumerate(columns):
            parts = [PartSize(TEXT_PART, 1, 0, int(tokens), TEXT_NBYTES * int(tokens))]
            files: list[int] = []
            for name, (counts, patches) in images.items():
                spec, count, num_patches = model.encoders[name], int(counts[index]), int(patches[index])
                if count:
                    num_rows = -(-num_patches // spec.patches_per_row)
                    parts.append(PartSize(name, count, num_patches, num_rows, num_rows * rows))
                    pixels = num_patches * spec.patch_size**2 * spec.num_channels
                    files += [max(1, pixels // _COMPRESSION // count)] * count
            kinds.append(SampleKind(int(tokens), int(vision), int(targets), tuple(parts), tuple(files)))
        return kinds

    def _step_of(self, simulator: StepSimulator, packed: PackedBatches, samples: DrawnSamples) -> StepOf:
        programs: dict[tuple[int, Schedules], Program] = {}
        steps: dict[int, StepWork] = {}

        def step_of(plan: StepPlan) -> StepWork:
            positions = plan.positions
            whole = samples.batch_of(min(positions), max(positions), len(positions))
            if whole is not None and whole in steps:
                return steps[whole]
            kinds = np.array(samples.kinds_of(positions), dtype=np.int64)
            step = self._step(simulator, programs, plan, _packed_as(plan, kinds, packed.share))
            if whole is not None:
                steps[whole] = step
            return step

        return step_of

    def _step(
        self,
        simulator: StepSimulator,
        programs: dict[tuple[int, Schedules], Program],
        plan: StepPlan,
        packed: PackedBatches,
    ) -> StepWork:
        """The work of a plan; packed: its samples."""
        candidate, num_slots = self.candidate, plan.num_slots
        works = works_of(self.request, packed, 0, num_slots, has_images=candidate.mode == "monolithic")
        key = num_slots, plan.schedules
        if key not in programs:
            lists = {text: parse_schedule(text) for text in plan.schedules}
            programs[key] = (
                simulator.program([lists[text] for text in plan.schedules])
                if lists
                else simulator.named(schedule_of(self.request), num_slots, packed.dp)
            )
        step = StepWork(programs[key], works)
        if candidate.mode != "colocated":
            return step
        encoded = [encoded_steps(self.request, self.surrogate, candidate, packed, name) for name in candidate.encoders]
        step = replace(step, encoded=tuple(each[0] for each in encoded))
        return with_shared_devices(step, simulator, candidate, packed, self.slowdown)


def _packed_as(plan: StepPlan, kinds: IntArray, share: float) -> PackedBatches:
    """A plan as a batch of its own. kinds: of its samples. share: of the run's ranks that are simulated."""
    places = np.repeat(np.arange(plan.num_microbatches), np.diff(plan.ends, prepend=0))
    return PackedBatches(plan.dp_size, share, kinds, places, np.array([plan.num_slots]))


def _drawn(batches: DrawnBatches, packed: PackedBatches) -> IntArray:
    """The drawn batches, ``[B, batch_size]``; of large ones the packed share, in an order of their own."""
    if packed.share == 1.0:
        return batches.batches
    bounds = np.searchsorted(packed.places, packed.slot_ends[:-1] * packed.dp)
    parts = np.split(packed.samples, bounds)
    size, rng = min(map(len, parts)), np.random.default_rng(0)
    return np.stack([rng.permutation(part)[:size] for part in parts])
