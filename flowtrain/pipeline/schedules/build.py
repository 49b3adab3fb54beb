"""One function that builds every named schedule."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from flowtrain.pipeline.actions import MemoryStrategy, Schedule, StageModule
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.one_f_one_b import ScheduleMemory, forward_only, one_f_one_b

ScheduleName = Literal["1f1b", "interleaved_1f1b"]


def build_schedule(
    name: ScheduleName,
    partition: Partition,
    *,
    num_microbatches: int,
    training: bool,
    memory: ScheduleMemory = MemoryStrategy.KEEP,
) -> Schedule:
    """Action lists of all pipeline ranks, by rank; for evaluation only the forwards.

    Raises ValueError for a negative number of microbatches, and for ``1f1b`` with several backbone stages on a rank.
    """
    most = max(Counter(stage.rank for stage in partition.of_module(StageModule.BACKBONE)).values())
    if name == "1f1b" and most > 1:
        raise ValueError(f"1f1b has one backbone stage per rank, not {most}; use interleaved_1f1b")
    if not training:
        return forward_only(partition, num_microbatches)
    return one_f_one_b(partition, num_microbatches, memory=memory)
