"""Runs one rank's action list through callbacks.

The lists of all ranks are checked together before they run (`checked_schedule`), so that they cannot hang. The executor
itself only goes through its list in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Protocol, TypeVar

from flowtrain.pipeline.actions import Action, ActionKind, MemoryStrategy, Schedule, StageModule
from flowtrain.pipeline.schedules.build import ScheduleName, build_schedule
from flowtrain.pipeline.schedules.one_f_one_b import in_flight_by_chunk
from flowtrain.pipeline.validate import validate

MicrobatchT = TypeVar("MicrobatchT", contravariant=True)
T = TypeVar("T")


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

    next_microbatch(k): returns the list's microbatch k. It is called once, right before the first action of k, and may
    block. It gives microbatches in plan order, or any that is ready (``data.order: arrival``), the same on all ranks of
    a pipeline. The first action may be a receive, up to one computation ahead of the forward, or any member of the
    group that contains this receive.
    release: is called with a microbatch after its last action, when no saved tensor and no send refers to it.
    """
    remaining_uses = Counter(action.microbatch for action in actions)
    remaining_backwards = Counter(_stage(action) for action in actions if action.kind is ActionKind.BACKWARD_STAGE)
    held: dict[int, T] = {}
    for group in _groups(actions):
        for action in group:
            if action.microbatch not in held:
                held[action.microbatch] = next_microbatch(action.microbatch)
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


@lru_cache(maxsize=256)
def checked_schedule(
    name: ScheduleName,
    *,
    pp_size: int,
    num_microbatches: int,
    training: bool,
    chunks_per_rank: int = 1,
    memory: MemoryStrategy = MemoryStrategy.KEEP,
) -> Schedule:
    """Lists of all ranks by `build_schedule`, validated; cached by the arguments.

    Raises ScheduleError also if a rank would keep more microbatches at once than the memory prediction assumes.
    """
    schedule = build_schedule(
        name,
        pp_size=pp_size,
        num_microbatches=num_microbatches,
        training=training,
        chunks_per_rank=chunks_per_rank,
        memory=memory,
    )
    in_flight = (
        in_flight_by_chunk(pp_size, rank, num_microbatches, chunks_per_rank=chunks_per_rank) for rank in range(pp_size)
    )
    limits = [sum(by_chunk) for by_chunk in in_flight]
    validate(schedule, training=training, num_microbatches=num_microbatches, held=lambda _: 1, limits=limits)
    return schedule
