"""Programs of named schedules. Long lists are made of short ones: to build thousands of microbatches takes seconds."""

from __future__ import annotations

from functools import lru_cache

from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import ScheduleName, build_schedule
from flowtrain.pipeline.schedules.one_f_one_b import repeats_after
from flowtrain.simulator.listed_ops import ListedOps
from flowtrain.simulator.lists import ops_of
from flowtrain.simulator.program import Meets, Program

_SETTLED = 2
"""In so many rounds over all ranks, and one for each segment, a schedule settles to repeat itself."""


@lru_cache(maxsize=256)
def named_program(schedule: ScheduleName, partition: Partition, num_microbatches: int, meets: Meets | None) -> Program:
    """Return one replica's operations; candidates of a plan share most of them."""
    ops = repeated_ops(schedule, partition, num_microbatches, meets)
    return (ops or _listed_ops(schedule, partition, num_microbatches, meets)).program()


def repeated_ops(
    schedule: ScheduleName, partition: Partition, num_microbatches: int, meets: Meets | None
) -> ListedOps | None:
    """Return the operations of long lists, made of short ones.

    None if that saves little, or if the lists never repeat themselves: a rank with a frozen encoder alone may run
    ever further ahead of the others.
    """
    period = repeats_after(partition)
    # Warm-up and drain, and in an interleaved schedule the groups that are larger by one microbatch.
    least = (_SETTLED + partition.num_segments) * partition.pp_size + (num_microbatches % period) * period
    few = least + (num_microbatches - least) % period
    if num_microbatches <= 2 * few:
        return None
    one, longer = (_listed_ops(schedule, partition, each, meets) for each in (few, few + period))
    return one.repeated(longer, period, (num_microbatches - few) // period)


def _listed_ops(schedule: ScheduleName, partition: Partition, num_microbatches: int, meets: Meets | None) -> ListedOps:
    lists = build_schedule(schedule, partition, num_microbatches=num_microbatches, training=True)
    return ops_of(lists, partition, meets)
