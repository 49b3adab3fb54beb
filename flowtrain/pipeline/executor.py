"""Runs one rank's action list through callbacks; the same list is what the simulator times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from flowtrain.pipeline.actions import Action, ActionKind

MicrobatchT = TypeVar("MicrobatchT", contravariant=True)
T = TypeVar("T")


class StageRuntime(Protocol[MicrobatchT]):
    """What computes: the two compute kinds of an action list."""

    def forward_stage(self, action: Action, microbatch: MicrobatchT) -> None:
        """Run the stage's forward of a microbatch; keeps what its backward needs under ``action.microbatch``."""

    def backward_stage(self, action: Action, microbatch: MicrobatchT, *, is_last: bool) -> None:
        """Run the stage's backward; ``is_last``: the stage's last one in the list, which synchronises gradients."""


def execute(
    actions: Sequence[Action],
    runtime: StageRuntime[T],
    next_microbatch: Callable[[int], T],
    release: Callable[[T], None] | None = None,
) -> None:
    """Run a list in order.

    next_microbatch(k) gives what the list calls microbatch k, asked once, right before its first action: in plan order
    or any that is ready (``data.order: arrival``). It may block. release gets a microbatch after its last action, when
    nothing saved for backward refers to it any more. Point-to-point kinds raise NotImplementedError.
    """
    remaining_uses = Counter(action.microbatch for action in actions)
    remaining_backwards = Counter(a.stage for a in actions if a.kind is ActionKind.BACKWARD_STAGE)
    in_flight: dict[int, T] = {}
    for action in actions:
        if not action.kind.is_compute:
            raise NotImplementedError(
                f"action {action}: transfers between pipeline ranks are not executed yet; "
                "set backbone.pipeline_parallel_size to 1"
            )
        k = action.microbatch
        if k not in in_flight:
            in_flight[k] = next_microbatch(k)
        if action.kind is ActionKind.FORWARD_STAGE:
            runtime.forward_stage(action, in_flight[k])
        else:
            remaining_backwards[action.stage] -= 1
            runtime.backward_stage(action, in_flight[k], is_last=remaining_backwards[action.stage] == 0)
        remaining_uses[k] -= 1
        if remaining_uses[k] == 0:
            microbatch = in_flight.pop(k)
            if release is not None:
                release(microbatch)
