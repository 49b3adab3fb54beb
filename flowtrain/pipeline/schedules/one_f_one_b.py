"""1F1B, plain and interleaved: forwards and backwards alternate, with no more in flight than the depth requires."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

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
    Raises ValueError for a negative number of microbatches.
    """
    pp_size, num_segments = partition.pp_size, partition.num_segments
    groups = _groups(pp_size, num_microbatches)
    largest = _largest_group(pp_size, num_microbatches)
    segments = range(num_segments)
    forwards = [(segment, k) for group in groups for segment in segments for k in group]
    backwards = [(segment, k) for group in groups for segment in reversed(segments) for k in group]
    orders = []
    for rank, chunks in enumerate(_chunks(partition)):
        num_warmup = min(_num_warmup(pp_size, rank, num_segments, largest), len(forwards))
        num_steady = len(forwards) - num_warmup
        ahead = [_forward(chunks[segment], k, memory) for segment, k in forwards]
        back = [_backward(chunks[segment], k, memory) for segment, k in backwards]
        steady = (chunk for pair in zip(ahead[num_warmup:], back, strict=False) for chunk in pair)
        order = [*ahead[:num_warmup], *steady, *back[num_steady:]]
        orders.append([action for chunk in order for action in chunk])
    return insert_transfers(orders, training=True, num_microbatches=num_microbatches, frozen=partition.frozen)


def in_flight_by_chunk(partition: Partition, rank: int, num_microbatches: int) -> list[int]:
    """Return for each segment of a rank how many microbatches it keeps when the first backward starts.

    Their sum is also the most that the rank keeps later. It counts the warm-up and the forward that follows it. In an
    interleaved schedule, microbatches go through a chunk in groups. A chunk without backward keeps none; if groups then
    differ in size, the rank later keeps up to one more for each such chunk, which the last count includes. Raises as
    `one_f_one_b` does.
    """
    pp_size, num_segments = partition.pp_size, partition.num_segments
    group = _largest_group(pp_size, num_microbatches)
    ahead = _num_warmup(pp_size, rank, num_segments, group) + 1
    in_flight = [0] * num_segments
    left = min(ahead, num_microbatches * num_segments)
    while left:
        for segment in range(num_segments):
            added = min(left, group)
            in_flight[segment] += added
            left -= added
    kept = {stage.segment for stage in partition.of_rank(rank) if stage.has_backward}
    if len(kept) < num_segments and num_microbatches % _num_groups(pp_size, num_microbatches):
        in_flight[-1] = min(in_flight[-1] + num_segments - len(kept), num_microbatches)
    return [count if segment in kept else 0 for segment, count in enumerate(in_flight)]


def _num_warmup(pp_size: int, rank: int, num_segments: int, group: int) -> int:
    later_ranks = pp_size - 1 - rank
    return later_ranks if num_segments == 1 else 2 * later_ranks + (num_segments - 1) * group


def forward_only(partition: Partition, num_microbatches: int) -> Schedule:
    """Action lists of all ranks for evaluation, in the order of `one_f_one_b`'s forwards; raises as it does."""
    groups = _groups(partition.pp_size, num_microbatches)
    orders = [
        [
            action
            for group in groups
            for chunk in chunks
            for k in group
            for action in _forward(chunk, k, MemoryStrategy.KEEP)
        ]
        for chunks in _chunks(partition)
    ]
    return insert_transfers(orders, training=False, num_microbatches=num_microbatches)


def _chunks(partition: Partition) -> list[list[tuple[Stage, ...]]]:
    """The stages of every rank by segment."""
    chunks: list[list[tuple[Stage, ...]]] = [[()] * partition.num_segments for _ in range(partition.pp_size)]
    for stage in partition.stages:
        chunks[stage.rank][stage.segment] += (stage,)
    assert all(map(all, chunks)), f"a rank has no stage in a segment: {partition}"
    return chunks


def _groups(pp_size: int, num_microbatches: int) -> list[range]:
    """The microbatches in even groups of at least pp_size, larger groups first; one group if there are fewer."""
    num_groups = _num_groups(pp_size, num_microbatches)
    if num_microbatches == 0:
        return []
    size, num_larger = divmod(num_microbatches, num_groups)
    starts = [index * size + min(index, num_larger) for index in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _largest_group(pp_size: int, num_microbatches: int) -> int:
    """Size of the first of ``_groups``, without building them: the allocator asks for thousands."""
    return -(-num_microbatches // _num_groups(pp_size, num_microbatches))


def _num_groups(pp_size: int, num_microbatches: int) -> int:
    if num_microbatches < 0:
        raise ValueError(f"num_microbatches ({num_microbatches}) must be at least 0")
    return max(1, num_microbatches // pp_size)


def _forward(chunk: tuple[Stage, ...], microbatch: int, memory: ScheduleMemory) -> list[Action]:
    return [_compute(ActionKind.FORWARD_STAGE, stage, microbatch, memory) for stage in chunk]


def _backward(chunk: tuple[Stage, ...], microbatch: int, memory: ScheduleMemory) -> list[Action]:
    trained = (stage for stage in reversed(chunk) if stage.has_backward)
    return [_compute(ActionKind.BACKWARD_STAGE, stage, microbatch, memory) for stage in trained]


def _compute(kind: ActionKind, stage: Stage, microbatch: int, memory: ScheduleMemory) -> Action:
    own = strategy_of(memory, stage.module, stage.index) if stage.has_backward else MemoryStrategy.KEEP
    return shared_action(kind, stage.index, microbatch, segment=stage.segment, module=stage.module, memory=own)
