"""One function that builds every named schedule."""

from __future__ import annotations

from typing import Literal

from flowtrain.pipeline.actions import MemoryStrategy, Schedule
from flowtrain.pipeline.schedules.one_f_one_b import forward_only, one_f_one_b

ScheduleName = Literal["1f1b", "interleaved_1f1b"]


def build_schedule(
    name: ScheduleName,
    *,
    pp_size: int,
    num_microbatches: int,
    training: bool,
    chunks_per_rank: int = 1,
    memory: MemoryStrategy = MemoryStrategy.KEEP,
) -> Schedule:
    """Action lists of all pipeline ranks, by rank; for evaluation only the forwards.

    Raises ValueError for impossible sizes, and for ``1f1b`` with several chunks per rank.
    """
    if name == "1f1b" and chunks_per_rank != 1:
        raise ValueError(f"1f1b has one chunk per rank, not chunks_per_rank ({chunks_per_rank}); use interleaved_1f1b")
    if not training:
        return forward_only(pp_size, num_microbatches, chunks_per_rank=chunks_per_rank)
    return one_f_one_b(pp_size, num_microbatches, chunks_per_rank=chunks_per_rank, memory=memory)
