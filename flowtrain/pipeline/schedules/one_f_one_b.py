"""1F1B, plain and interleaved: forwards and backwards alternate, with no more in flight than the depth requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.pipeline.actions import (
    Action,
    ActionKind,
    MemoryStrategy,
    Schedule,
    StageMemory,
    StageModule,
    shared_action,
)
from flowtrain.pipeline.partition import Partition, Stage
from flowtrain.pipeline.transfers import insert_transfers

ScheduleMemory = MemoryStrategy | Mapping[tuple[StageModule, int], StageMemory]
"""The memory strategy of every stage: one for all, or one for each (module, stage)."""


def strategy_of(memory: ScheduleMemory, module: StageModule, stage: int) -> StageMemory:
    """Return the strategy of one stage."""
    return memory if isinstance(memory, MemoryStrategy) else memory[module, stage]


def one_f_one_b(
    partition: Partition, num_microbatches: int, *, memory: ScheduleMemory = MemoryStrategy.KEEP
) -> Schedule:
    """Action lists of all ranks for training.

    A rank's stages of one segment run as one chunk: forward one after another, backward in reverse; a stage without
    backward only runs forward. With one segment, rank r runs up to pp_size - 1 - r forwards to warm up, then
    alternates, then drains. It holds at most pp_size - r microbatches. With v segments, the ranks pass microbatches
    through a segment in groups (Narayanan et al. 2021, section 2.2). They warm up with 2 (pp_size - 1 - r) forwards and
    v - 1 chunks of the first group, and the bubble of equal chunks is 1 / v of that of one segment. Groups are as even
    as possible, with at least pp_size microbatches each. So any number of microbatches from pp_size on reaches this
    bubble; groups of pp_size with a short last one would stall.

    Segments without any backward, which come first, are not among the v: each rank spreads their forwards evenly over
    the others', so that every rank does the same work in the same time, and early enough to be waited for by nobody.
    Raises ValueError for a negative number of microbatches.
    """
    order = _Order.of(partition, num_microbatches)
    forwards, backwards = order.forwards(), order.backwards()
    orders = []
    for rank, chunks in enumerate(_chunks(partition)):
        num_warmup = min(order.num_warmup(rank), len(forwards))
        num_steady = len(forwards) - num_warmup
        back = [_backward(chunks[segment], k, memory) for segment, k in backwards]
        actions: list[Action] = []
        for index, (segment, k) in enumerate(forwards):
            actions += _early_forwards(order, index, chunks, memory)
            actions += _forward(chunks[segment], k, memory)
            if index >= num_warmup:
                actions += back[index - num_warmup]
        orders.append([*actions, *(action for chunk in back[num_steady:] for action in chunk)])
    return insert_transfers(orders, training=True, num_microbatches=num_microbatches, frozen=partition.frozen)


def forward_only(partition: Partition, num_microbatches: int) -> Schedule:
    """Action lists of all ranks for evaluation, in the order of `one_f_one_b`'s forwards; raises as it does."""
    order, memory = _Order.of(partition, num_microbatches), MemoryStrategy.KEEP
    orders = []
    for chunks in _chunks(partition):
        actions: list[Action] = []
        for index, (segment, k) in enumerate(order.forwards()):
            actions += _early_forwards(order, index, chunks, memory)
            actions += _forward(chunks[segment], k, memory)
        orders.append(actions)
    return insert_transfers(orders, training=False, num_microbatches=num_microbatches)


def repeats_after(partition: Partition) -> int:
    """Return after how many microbatches the lists of `one_f_one_b` repeat themselves, once all ranks are at work.

    So lists of as many more microbatches have one such part more, if the remainder over pp_size stays the same.
    """
    return 1 if _Order.of(partition, 0).num_segments == 1 else partition.pp_size


def in_flight_by_chunk(partition: Partition, rank: int, num_microbatches: int) -> list[int]:
    """Return for each segment of a rank how many microbatches it keeps when the first backward starts.

    Their sum is also the most that the rank keeps later. It counts the warm-up and the forward that follows it. In an
    interleaved schedule, microbatches go through a chunk in groups. A chunk without backward keeps none; if it is not
    in a segment of such chunks and groups differ in size, the rank later keeps up to one more for each, which the last
    count includes. Raises as `one_f_one_b` does.
    """
    order = _Order.of(partition, num_microbatches)
    in_flight = [0] * partition.num_segments
    left = min(order.num_warmup(rank) + 1, num_microbatches * order.num_segments)
    while left:
        for segment in order.segments:
            added = min(left, order.largest_group)
            in_flight[segment] += added
            left -= added
    kept = {stage.segment for stage in partition.of_rank(rank) if stage.has_backward}
    if len(kept) < order.num_segments and num_microbatches % order.num_groups:
        in_flight[-1] = min(in_flight[-1] + order.num_segments - len(kept), num_microbatches)
    return [count if segment in kept else 0 for segment, count in enumerate(in_flight)]


def in_flight_of_chunks(pp: IntArray, rank: IntArray, num_microbatches: IntArray, num_segments: int) -> IntArray:
    """Return ``in_flight_by_chunk`` of many ranks without an encoder, ``[N, num_segments]``; the arguments ``[N]``."""
    if num_segments == 1:
        return np.minimum(pp - rank, num_microbatches)[:, None]
    group = largest_groups(pp, num_microbatches)
    num_warmup = 2 * (pp - 1 - rank) + (num_segments - 1) * group
    count = np.minimum(num_warmup + 1, num_microbatches * num_segments)
    rounds, rest = np.divmod(count, group * num_segments)
    segments = np.arange(num_segments)[None, :]
    return rounds[:, None] * group[:, None] + np.clip(rest[:, None] - segments * group[:, None], 0, group[:, None])


def largest_groups(pp: IntArray, num_microbatches: IntArray) -> IntArray:
    """Return the most microbatches that an interleaved schedule sends through a chunk one after the other; ``[N]``."""
    return -(-num_microbatches // np.maximum(num_microbatches // pp, 1))


@dataclass(frozen=True, slots=True)
class _Order:
    """The order in which ranks run the chunks of their segments."""

    pp_size: int
    num_early: int
    """Segments without any backward; they come first."""
    num_segments: int
    """The other segments."""
    num_microbatches: int

    @classmethod
    def of(cls, partition: Partition, num_microbatches: int) -> _Order:
        if num_microbatches < 0:
            raise ValueError(f"num_microbatches ({num_microbatches}) must be at least 0")
        num_early = min(stage.segment for stage in partition.stages if stage.has_backward)
        return cls(partition.pp_size, num_early, partition.num_segments - num_early, num_microbatches)

    @property
    def segments(self) -> range:
        """Segments with a backward."""
        return range(self.num_early, self.num_early + self.num_segments)

    @property
    def num_groups(self) -> int:
        """Even groups of at least pp_size microbatches, larger groups first; one group if there are fewer."""
        return max(1, self.num_microbatches // self.pp_size)

    @property
    def largest_group(self) -> int:
        """Microbatches of the first group."""
        return -(-self.num_microbatches // self.num_groups)

    def groups(self) -> list[range]:
        size, num_larger = divmod(self.num_microbatches, self.num_groups)
        starts = [index * size + min(index, num_larger) for index in range(self.num_groups + 1)]
        return [range(start, end) for start, end in pairwise(starts)]

    def forwards(self) -> list[tuple[int, int]]:
        """(segment, microbatch) of every forward chunk, without the early segments."""
        return [(segment, k) for group in self.groups() for segment in self.segments for k in group]

    def backwards(self) -> list[tuple[int, int]]:
        return [(segment, k) for group in self.groups() for segment in reversed(self.segments) for k in group]

    def num_warmup(self, rank: int) -> int:
        """Forwards before the one after which forwards and backwards alternate."""
        later_ranks = self.pp_size - 1 - rank
        if self.num_segments == 1:
            return later_ranks
        return 2 * later_ranks + (self.num_segments - 1) * self.largest_group

    def num_early_done(self, segment: int, index: int) -> int:
        """Microbatches that an early segment has run before forward chunk ``index`` of the others; 0 before the first.

        A rank is one microbatch ahead of the next rank. In a group, the others' first segment comes first as a whole.
        """
        if index < 0:
            return 0
        burst = self.largest_group - -(-self.largest_group // self.num_segments)
        ahead = (self.num_early - segment) * self.pp_size + burst
        return min(index // self.num_segments + ahead, self.num_microbatches)


def _early_forwards(
    order: _Order, index: int, chunks: Sequence[tuple[Stage, ...]], memory: ScheduleMemory
) -> list[Action]:
    """Forwards of the early segments right before forward chunk ``index`` of the others."""
    actions: list[Action] = []
    for segment in range(order.num_early):
        for k in range(order.num_early_done(segment, index - 1), order.num_early_done(segment, index)):
            actions += _forward(chunks[segment], k, memory)
    return actions


def _chunks(partition: Partition) -> list[list[tuple[Stage, ...]]]:
    """The stages of every rank by segment."""
    chunks: list[list[tuple[Stage, ...]]] = [[()] * partition.num_segments for _ in range(partition.pp_size)]
    for stage in partition.stages:
        chunks[stage.rank][stage.segment] += (stage,)
    assert all(map(all, chunks)), f"a rank has no stage in a segment: {partition}"
    return chunks


def _forward(chunk: tuple[Stage, ...], microbatch: int, memory: ScheduleMemory) -> list[Action]:
    return [_compute(ActionKind.FORWARD_STAGE, stage, microbatch, memory) for stage in chunk]


def _backward(chunk: tuple[Stage, ...], microbatch: int, memory: ScheduleMemory) -> list[Action]:
    trained = (stage for stage in reversed(chunk) if stage.has_backward)
    return [_compute(ActionKind.BACKWARD_STAGE, stage, microbatch, memory) for stage in trained]


def _compute(kind: ActionKind, stage: Stage, microbatch: int, memory: ScheduleMemory) -> Action:
    own = strategy_of(memory, stage.module, stage.index) if stage.has_backward else MemoryStrategy.KEEP
    return shared_action(kind, stage.index, microbatch, segment=stage.segment, module=stage.module, memory=own)
