"""Runs one rank's action list through callbacks.

The lists of all ranks are checked together before they run (`checked_schedule`, `carried_schedule`), so that they
cannot hang. The executor itself only goes through its list in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from threading import Lock
from typing import Protocol, TypeVar

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import (
    Action,
    ActionKind,
    MemoryStrategy,
    Schedule,
    StageMemory,
    StageModule,
    parse_schedule,
)
from flowtrain.pipeline.grid import refuse
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import ScheduleName, build_schedule
from flowtrain.pipeline.schedules.one_f_one_b import ScheduleMemory, in_flight_by_chunk, strategy_of
from flowtrain.pipeline.validate import validate

MicrobatchT = TypeVar("MicrobatchT", contravariant=True)
T = TypeVar("T")

_building = Lock()
"""Ranks that are threads of one process all need the same lists at once: one builds them, and the others find them."""
_HashableMemory = MemoryStrategy | tuple[tuple[tuple[StageModule, int], StageMemory], ...]


class StageRuntime(Protocol[MicrobatchT]):
    """Computes and transfers: one method for each sort of action.

    The runtime keeps a stage's result, by stage and (sub-)microbatch, until it is used: by its isend, or by the next
    stage's action if that stage is on the same rank, because then there is no transfer.
    """

    def forward_stage(self, action: Action, microbatch: MicrobatchT) -> None:
        """Run the stage's forward; its input is received, comes from this rank, or is the batch itself.

        Keeps what the backward needs, by ``action.memory``. The stage before may have run the microbatch in parts.
        """

    def backward_stage(self, action: Action, microbatch: MicrobatchT, *, is_last: bool) -> None:
        """Run the stage's backward; is_last: it is the stage's last one in the list and synchronises gradients."""

    def start_transfers(self, launches: Sequence[tuple[Action, MicrobatchT]]) -> None:
        """Start isends and irecvs as one group, in this order, without waiting (``batch_isend_irecv``).

        Transfers between two ranks match by the order of their launches alone. Shapes come from the microbatch; every
        rank has its own copy of it.
        """

    def wait_transfer(self, action: Action) -> None:
        """Wait for the end of a transfer, which `Action.launch` started; this may end others of its group as well."""


def execute(
    actions: Sequence[Action],
    runtime: StageRuntime[T],
    next_microbatch: Callable[[int], T],
    release: Callable[[T], None] | None = None,
) -> None:
    """Run a list in order, neighbouring launches as one group.

    next_microbatch(k): returns the list's microbatch k. It is called once for each k, in their order, right before the
    first action of k or of a later one, and may block. It gives microbatches in plan order, or any that is ready
    (``data.order: arrival``), the same on all ranks of a pipeline. The first action may be a receive, up to one
    computation ahead of the forward, or any member of the group that contains this receive.
    release: is called with a microbatch after its last action, when no saved tensor and no send refers to it.
    """
    remaining_uses = Counter(action.microbatch for action in actions)
    remaining_backwards = Counter(_stage(action) for action in actions if action.kind is ActionKind.BACKWARD_STAGE)
    held: dict[int, T] = {}
    num_fetched = 0
    for group in _groups(actions):
        for action in group:
            for k in range(num_fetched, action.microbatch + 1):
                held[k] = next_microbatch(k)
            num_fetched = max(num_fetched, action.microbatch + 1)
        first = group[0]
        if first.kind.is_launch:
            runtime.start_transfers([(action, held[action.microbatch]) for action in group])
        elif first.kind.is_wait:
            runtime.wait_transfer(first)
        elif first.kind is ActionKind.FORWARD_STAGE:
            runtime.forward_stage(first, held[first.microbatch])
        else:
            remaining_backwards[_stage(first)] -= 1
            is_last = remaining_backwards[_stage(first)] == 0
            runtime.backward_stage(first, held[first.microbatch], is_last=is_last)
        for action in group:
            remaining_uses[action.microbatch] -= 1
            if remaining_uses[action.microbatch] == 0:
                microbatch = held.pop(action.microbatch)
                if release is not None:
                    release(microbatch)


def _stage(action: Action) -> tuple[StageModule, int]:
    return action.module, action.stage


def _groups(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Groups of neighbouring launches; every other action is a group alone."""
    for is_launch, run in groupby(actions, key=lambda action: action.kind.is_launch):
        if is_launch:
            yield tuple(run)
        else:
            yield from ((action,) for action in run)


def checked_schedule(
    name: ScheduleName,
    partition: Partition,
    *,
    num_microbatches: int,
    training: bool,
    memory: ScheduleMemory = MemoryStrategy.KEEP,
) -> Schedule:
    """Lists of all ranks by `build_schedule`, validated; cached by the arguments.

    Raises ScheduleError also if a rank would keep more microbatches at once than the memory prediction assumes.
    """
    with _building:
        return _checked_schedule(name, partition, num_microbatches, training, _hashable(memory))


@lru_cache(maxsize=256)
def _checked_schedule(
    name: ScheduleName,
    partition: Partition,
    num_microbatches: int,
    training: bool,
    memory: _HashableMemory,
) -> Schedule:
    schedule = build_schedule(
        name,
        partition,
        num_microbatches=num_microbatches,
        training=training,
        memory=_readable(memory),
    )
    validate(
        schedule,
        training=training,
        num_microbatches=num_microbatches,
        partition=partition,
        held=_chunks_begun(partition),
        limits=[sum(in_flight_by_chunk(partition, rank, num_microbatches)) for rank in range(partition.pp_size)],
    )
    return schedule


def _chunks_begun(partition: Partition) -> Callable[[Action], int]:
    """Count a chunk once: 1 for a forward of its first stage with a backward."""
    trained = {(stage.rank, stage.segment): stage for stage in reversed(partition.stages) if stage.has_backward}
    first = {(stage.module, stage.index) for stage in trained.values()}
    return lambda action: int((action.module, action.stage) in first)


def carried_schedule(
    lists: tuple[tuple[str, ...], ...],
    partition: Partition,
    *,
    num_microbatches: int,
    training: bool,
    memory: ScheduleMemory = MemoryStrategy.KEEP,
) -> Schedule:
    """Lists of all ranks from the text that a plan carries, validated; cached by the arguments.

    memory: the strategy of actions that name none.
    Raises ScheduleError if they cannot be read or run.
    """
    with _building:
        return _carried_schedule(lists, partition, num_microbatches, training, _hashable(memory))


@lru_cache(maxsize=16)
def _carried_schedule(
    lists: tuple[tuple[str, ...], ...],
    partition: Partition,
    num_microbatches: int,
    training: bool,
    memory: _HashableMemory,
) -> Schedule:
    try:
        schedule = parse_schedule(lists)
    except ValueError as error:
        raise ScheduleError(f"the plan's schedule cannot be read: {error}") from error
    validate(schedule, training=training, num_microbatches=num_microbatches, partition=partition)
    _check_parts(schedule)
    default = _readable(memory)
    return tuple(tuple(_with_memory(action, default) for action in actions) for actions in schedule)


def _check_parts(schedule: Schedule) -> None:
    """Only images come in parts: a stage of the backbone would run all tokens with each part."""
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            is_part = action.kind.is_compute and action.sub_microbatch is not None
            if is_part and action.module is StageModule.BACKBONE:
                why = f"{action}: the backbone runs whole microbatches; only images come in parts"
                refuse(schedule, why, [(rank, index)])


def _with_memory(action: Action, default: ScheduleMemory) -> Action:
    if not action.kind.is_compute or action.memory is not None:
        return action
    return replace(action, memory=strategy_of(default, action.module, action.stage))


def _hashable(memory: ScheduleMemory) -> _HashableMemory:
    return memory if isinstance(memory, MemoryStrategy) else tuple(memory.items())


def _readable(memory: _HashableMemory) -> ScheduleMemory:
    return memory if isinstance(memory, MemoryStrategy) else dict(memory)
