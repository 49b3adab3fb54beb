"""1F1B, plain and interleaved: forwards and backwards alternate, with no more in flight than the depth requires."""

from __future__ import annotations

from itertools import pairwise

from flowtrain.pipeline.actions import Action, ActionKind, MemoryStrategy, Schedule, shared_action
from flowtrain.pipeline.transfers import insert_transfers


def one_f_one_b(
    pp_size: int, num_microbatches: int, *, chunks_per_rank: int = 1, memory: MemoryStrategy = MemoryStrategy.KEEP
) -> Schedule:
    """Action lists of all ranks for training; chunk c of rank r is stage c * pp_size + r.

    With one chunk, rank r runs up to pp_size - 1 - r forwards to warm up, then alternates, then drains. It holds at
    most pp_size - r microbatches. With v chunks, the ranks pass microbatches through a chunk in groups (Narayanan et
    al. 2021, section 2.2). They warm up with 2 (pp_size - 1 - r) forwards and v - 1 chunks of the first group, and the
    bubble is 1 / v of that of one chunk. Groups are as even as possible, with at least pp_size microbatches each. So
    any number of microbatches from pp_size on reaches this bubble; groups of pp_size with a short last one would stall.
    Raises ValueError for fewer than one rank or chunk, or a negative number of microbatches.
    """
    groups = _groups(pp_size, num_microbatches, chunks_per_rank)
    largest = _largest_group(pp_size, num_microbatches, chunks_per_rank)
    chunks = range(chunks_per_rank)
    forwards = [(chunk, k) for group in groups for chunk in chunks for k in group]
    backwards = [(chunk, k) for group in groups for chunk in reversed(chunks) for k in group]
    orders = []
    for rank in range(pp_size):
        num_warmup = min(_num_warmup(pp_size, rank, chunks_per_rank, largest), len(forwards))
        num_steady = len(forwards) - num_warmup
        ahead = [_compute(ActionKind.FORWARD_STAGE, pp_size, rank, *work, memory) for work in forwards]
        back = [_compute(ActionKind.BACKWARD_STAGE, pp_size, rank, *work, memory) for work in backwards]
        steady = (action for pair in zip(ahead[num_warmup:], back, strict=False) for action in pair)
        orders.append([*ahead[:num_warmup], *steady, *back[num_steady:]])
    return insert_transfers(orders, training=True, num_microbatches=num_microbatches)


def in_flight_by_chunk(pp_size: int, rank: int, num_microbatches: int, *, chunks_per_rank: int = 1) -> list[int]:
    """Return for each chunk of a pipeline rank how many microbatches it keeps when the first backward starts.

    Their sum is also the most that the rank keeps later. It counts the warm-up and the forward that follows it. In an
    interleaved schedule, microbatches go through a chunk in groups. Raises as `one_f_one_b` does.
    """
    group = _largest_group(pp_size, num_microbatches, chunks_per_rank)
    ahead = _num_warmup(pp_size, rank, chunks_per_rank, group) + 1
    in_flight = [0] * chunks_per_rank
    left = min(ahead, num_microbatches * chunks_per_rank)
    while left:
        for chunk in range(chunks_per_rank):
            added = min(left, group)
            in_flight[chunk] += added
            left -= added
    return in_flight


def _num_warmup(pp_size: int, rank: int, chunks_per_rank: int, group: int) -> int:
    later_ranks = pp_size - 1 - rank
    return later_ranks if chunks_per_rank == 1 else 2 * later_ranks + (chunks_per_rank - 1) * group


def forward_only(pp_size: int, num_microbatches: int, *, chunks_per_rank: int = 1) -> Schedule:
    """Action lists of all ranks for evaluation, in the order of `one_f_one_b`'s forwards; raises as it does."""
    groups = _groups(pp_size, num_microbatches, chunks_per_rank)
    orders = [
        [
            _compute(ActionKind.FORWARD_STAGE, pp_size, rank, chunk, k, MemoryStrategy.KEEP)
            for group in groups
            for chunk in range(chunks_per_rank)
            for k in group
        ]
        for rank in range(pp_size)
    ]
    return insert_transfers(orders, training=False, num_microbatches=num_microbatches)


def _groups(pp_size: int, num_microbatches: int, chunks_per_rank: int) -> list[range]:
    """The microbatches in even groups of at least pp_size, larger groups first; one group if there are fewer."""
    num_groups = _num_groups(pp_size, num_microbatches, chunks_per_rank)
    if num_microbatches == 0:
        return []
    size, num_larger = divmod(num_microbatches, num_groups)
    starts = [index * size + min(index, num_larger) for index in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _largest_group(pp_size: int, num_microbatches: int, chunks_per_rank: int) -> int:
    """Size of the first of ``_groups``, without building them: the allocator asks for thousands."""
    return -(-num_microbatches // _num_groups(pp_size, num_microbatches, chunks_per_rank))


def _num_groups(pp_size: int, num_microbatches: int, chunks_per_rank: int) -> int:
    if pp_size < 1 or chunks_per_rank < 1 or num_microbatches < 0:
        raise ValueError(
            f"pp_size ({pp_size}) and chunks_per_rank ({chunks_per_rank}) must be at least 1, num_microbatches "
            f"({num_microbatches}) at least 0"
        )
    return max(1, num_microbatches // pp_size)


def _compute(kind: ActionKind, pp_size: int, rank: int, chunk: int, microbatch: int, memory: MemoryStrategy) -> Action:
    return shared_action(kind, chunk * pp_size + rank, microbatch, segment=chunk, memory=memory)
