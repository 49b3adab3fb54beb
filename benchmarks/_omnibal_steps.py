"""Steps of OmniBal's models in virtual time: data grouped or padded, layers cut, layers recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from _omnibal_models import PATCHES_PER_TILE, TOKENS_PER_TILE, Case

from flowtrain.allocator.mixture import Spread
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.cluster import data_sheet_device_type
from flowtrain.costs.layer_costs import LayerCosts, layer_costs
from flowtrain.costs.memory import USABLE_SHARE, StepMemory
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.costs.training_setup import MicrobatchSize, TrainingSetup
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.cuts import named_cut
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition
from flowtrain.pipeline.rank_chunks import memory_of_rank, rank_chunks
from flowtrain.pipeline.recompute import Recomputation, adaptive_recomputation
from flowtrain.scheduler.packing.base import Lengths
from flowtrain.scheduler.packing.isf import ITERATIONS, draw_groups
from flowtrain.scheduler.packing.segment_tree import best_fit_numbers
from flowtrain.search.partition import searched_partitions, simulated_step_s
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees

NUM_SAMPLES = 1_200_000
"""Of InternVL-Chat-1.2's data."""
SAMPLES_PER_STEP = 1024
"""Of InternVL-Chat's fine-tuning; the paper does not say."""
BASELINE_BATCH = 4
DAY_S = 86400.0
DRAWN = 8192
MODULES = (StageModule.ENCODER, StageModule.BACKBONE)


@dataclass(frozen=True)
class Data:
    """Samples drawn with the means that Table 10 implies, since the paper's data are not public.

    most_tiles: of an image, without its thumbnail. tiles, text: means of a sample. q_tiles, q_tokens: a group's quotas.
    """

    most_tiles: int
    tiles: float
    text: float
    q_tiles: int
    q_tokens: int

    @cached_property
    def samples(self) -> Lengths:
        """Tokens of the sequence, and tiles."""
        rng = np.random.default_rng(0)
        spread = Spread(median=max(1.0, 0.8 * self.tiles), mean=self.tiles, most=self.most_tiles + 1)
        tiles = spread.draw(rng, DRAWN)
        room = self.q_tokens - TOKENS_PER_TILE * tiles
        text = np.minimum(Spread(median=0.64 * self.text, mean=self.text, least=16).draw(rng, DRAWN), room)
        kept = room >= 16
        return Lengths((TOKENS_PER_TILE * tiles + text)[kept].astype(np.int64), tiles[kept].astype(np.int64))

    def padded(self) -> list[MicrobatchWork]:
        """The baseline: four samples as they come, each padded to the longest."""
        samples, found = self.samples, []
        for start in range(0, len(samples) - BASELINE_BATCH + 1, BASELINE_BATCH):
            tokens, tiles = (each[start : start + BASELINE_BATCH] for each in (samples.tokens, samples.vision))
            found.append(_work([int(tokens.max())] * BASELINE_BATCH, int(tiles.sum())))
        return found

    def grouped(self) -> tuple[list[MicrobatchWork], float]:
        """ISF over all samples, best fit for the rest; and the mean number of samples in a group."""
        samples = self.samples
        number, count = draw_groups(samples, self.q_tiles, self.q_tokens, 0, ITERATIONS)
        left = np.flatnonzero(number < 0)
        of_left, more = best_fit_numbers(samples.tokens[left], np.arange(len(left)), self.q_tokens)
        number[left] = count + of_left
        order, ends = np.argsort(number, kind="stable"), np.cumsum(np.bincount(number, minlength=count + more))
        members = np.split(order, ends[:-1])
        np.random.default_rng(1).shuffle(members)  # type: ignore[arg-type]
        works = [_work(samples.tokens[each].tolist(), int(samples.vision[each].sum())) for each in members]
        return works, len(samples) / len(works)


def _work(lengths: Sequence[int], tiles: int) -> MicrobatchWork:
    tokens = sum(lengths)
    return MicrobatchWork(tuple(lengths), TOKENS_PER_TILE * tiles, tokens // 2, (PATCHES_PER_TILE,) * tiles)


@dataclass(frozen=True)
class World:
    """A model on A100s, trained as Megatron-DeepSpeed does: whole weights, states in shards."""

    case: Case

    @cached_property
    def setup(self) -> TrainingSetup:
        """Full recomputation, unless a step says otherwise."""
        return TrainingSetup(dp=self.case.dp, tp=self.case.tp, sharding="gradients", activation_checkpointing="full")

    def times(self, dp: int = 1) -> ActionTimes:
        """Of one replica, or of so many."""
        case = self.case
        device = data_sheet_device_type("a100", case.tp * case.pp * case.dp)
        return ActionTimes(DeviceTimes(device, case.model, self.setup, ()), Degrees(dp, case.pp, case.tp), dp)

    def partition(self, counts: tuple[int, ...]) -> Partition:
        """Encoder and decoder layers in one sequence, both trained."""
        model = self.case.model
        split = EncoderSplit(model.encoders["vision"].num_layers, "mixed", 1.0, is_trained=True)
        return build_partition(model.backbone.num_layers, self.case.pp, counts=counts, encoder=split)

    def costs(self, work: MicrobatchWork) -> LayerCosts:
        """Of its layers."""
        return layer_costs(self.times(), work, encoder="vision", is_cut=True, trains=True)

    def cut(self, method: str, works: Sequence[MicrobatchWork]) -> tuple[int, ...]:
        """Layers of each stage by a word of ``pipeline.partition``, for microbatches like these."""
        typical = mean_work(works)
        costs = self.costs(typical)
        if method != "balanced":
            return costs.counts(named_cut(method, costs, self.case.pp))

        def step_s(counts: tuple[int, ...]) -> float:
            return simulated_step_s(self.partition(counts), self.times(), works[:32], encoder="vision")

        return searched_partitions(costs, self.case.pp, step_s)[0].counts

    def step_s(
        self, counts: tuple[int, ...], works: Sequence[MicrobatchWork], recomputation: Recomputation | None = None
    ) -> float:
        """Seconds of a step of all replicas, which meet at its end. works: of all replicas, one after another."""
        partition, times = self.partition(counts), self.times(self.case.dp)
        recomputed = None if recomputation is None else recomputation.counts(partition)
        simulator = StepSimulator(partition, times, "vision", buffered=False, recomputed=recomputed)
        program = simulator.named("1f1b", len(works) // self.case.dp, self.case.dp)
        timeline = Timeline(program, *simulator.durations(program, MicrobatchColumns.of(works)), buffered=False)
        return timeline.makespan_s + simulator.optimizer_s()

    def gpu_days(
        self,
        counts: tuple[int, ...],
        works: Sequence[MicrobatchWork],
        samples_per_work: float,
        recomputation: Recomputation | None = None,
    ) -> float:
        """Of one epoch: mean of a few steps of different microbatches."""
        case = self.case
        each = max(case.pp, round(SAMPLES_PER_STEP / samples_per_work / case.dp)) * case.dp
        steps = [works[start : start + each] for start in range(0, len(works) - each + 1, each)][:4]
        assert steps, (len(works), each)
        seconds = float(np.mean([self.step_s(counts, step, recomputation) for step in steps]))
        num_steps = NUM_SAMPLES / samples_per_work / each
        return num_steps * seconds * case.tp * case.pp * case.dp / DAY_S

    def memory(
        self, counts: tuple[int, ...], size: MicrobatchSize, recomputation: Recomputation | None = None
    ) -> list[StepMemory]:
        """Predicted, of each stage."""
        partition, setup = self.partition(counts), self.setup
        if recomputation is not None:
            setup = _with_lists(setup, recomputation)
        held = (rank_chunks(partition, rank, 8 * self.case.pp) for rank in range(self.case.pp))
        return [memory_of_rank(self.case.model, each, setup, size) for each in held]

    @property
    def usable_nbytes(self) -> int:
        """Of a device."""
        return int(data_sheet_device_type("a100", 1).memory_nbytes * USABLE_SHARE)

    def adaptive(self, counts: tuple[int, ...], size: MicrobatchSize) -> Recomputation:
        """The least that fits."""
        return adaptive_recomputation(
            self.partition(counts),
            self.case.model,
            self.setup,
            size,
            [self.usable_nbytes] * self.case.pp,
            adaptive=set(MODULES),
            num_microbatches=8 * self.case.pp,
        )


def _with_lists(setup: TrainingSetup, chosen: Recomputation) -> TrainingSetup:
    assert chosen.backbone is not None and chosen.encoder is not None
    return replace(setup, activation_checkpointing=chosen.backbone, encoder_checkpointing=chosen.encoder)


def by_rank(partition: Partition, chosen: Recomputation) -> list[int]:
    """Recomputed layers of each rank."""
    layers = chosen.counts(partition)
    return [
        sum(layers[stage.module, stage.index] or 0 for stage in partition.of_rank(rank))
        for rank in range(partition.pp_size)
    ]


def largest(works: Sequence[MicrobatchWork]) -> MicrobatchSize:
    """The size that no microbatch exceeds."""
    tokens, targets = max(work.num_tokens for work in works), max(work.target_tokens for work in works)
    tiles = max(len(work.patches) for work in works)
    return MicrobatchSize(tokens, targets, TOKENS_PER_TILE * tiles, (PATCHES_PER_TILE + 1) * tiles)


def mean_work(works: Sequence[MicrobatchWork]) -> MicrobatchWork:
    """A microbatch of mean size."""
    tokens = round(float(np.mean([work.num_tokens for work in works])))
    tiles = round(float(np.mean([len(work.patches) for work in works])))
    count = round(float(np.mean([len(work.lengths) for work in works])))
    return _work([tokens // count] * count, tiles)
