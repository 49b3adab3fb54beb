"""Runs one rank's action list through callbacks.

A list is checked with those of all ranks before it runs (`checked_schedule`), so that running it cannot hang: the
executor itself only goes through it in order.
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
    """What computes and transfers: one method for each sort of action.

    A stage's result waits in the runtime, under its stage and (sub-)microbatch, until it is taken: by the isend that
    names it, or by the next stage's action where that stage is on the same rank, which no transfer leads to.
    """

    def forward_stage(self, action: Action, microbatch: MicrobatchT) -> None:
        """Run the stage's forward; its input has been received, unless it comes from this rank or is the batch itself.

        Keeps what the backward needs, as ``action.memory`` says. A whole microbatch may follow parts of it.
        """

    def backward_stage(self, action: Action, microbatch: MicrobatchT, *, is_last: bool) -> None:
        """Run the stage's backward; ``is_last``: the stage's last one in the list, which synchronises gradients."""

    def start_transfers(self, launches: Sequence[tuple[Action, MicrobatchT]]) -> None:
        """Start isends and irecvs as one group, in this order, without waiting (``batch_isend_irecv``).

        Transfers between two ranks match in the order of their launches, whatever they carry. Shapes come from the
        microbatch, of which every rank has its own copy.
        """

    def wait_transfer(self, action: Action) -> None:
        """Wait for the end of a transfer (`Action.launch` is what started it); other transfers of its group may end."""


def execute(
    actions: Sequence[Action],
    runtime: StageRuntime[T],
    next_microbatch: Callable[[int], T],
    release: Callable[[T], None] | None = None,
) -> None:
    """Run a list in order, neighbouring launches as one group.

    next_microbatch(k) gives what the list calls microbatch k, asked once, right before its first action: in plan order
    or any that is ready (``data.order: arrival``), the same on all ranks of a pipeline. It may block. The first action
    may be a receive, up to one computation ahead of the forward, or another member of the group that the receive is in.
    release gets a microbatch after its last action, when nothing saved for backward or being sent refers to it.
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
    """Neighbouring launches together, every other action alone."""
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
    """Lists of all ranks by `build_schedule`, validated; built once for a shape and a number of microbatches.

    Raises ScheduleError also where a rank would keep more microbatches at once than memory was predicted for.
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
