"""The schedule IR: what one rank does, as a list of actions that the executor runs and the simulator times.

The six kinds are PipeWeaver's Table 2. Schedules only produce such lists (1F1B, interleaved, searched ones). An action
has a one-line text form for logs, golden tests and files::

    forward_stage module=backbone stage=0 segment=0 microbatch=3 memory=keep
    isend module=backbone stage=0 segment=0 microbatch=3.1 peer=1 payload=activation
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class ActionKind(enum.StrEnum):
    """What an action does (PipeWeaver, Table 2)."""

    FORWARD_STAGE = "forward_stage"
    BACKWARD_STAGE = "backward_stage"
    ISEND = "isend"
    WAIT_ISEND = "wait_isend"
    IRECV = "irecv"
    WAIT_IRECV = "wait_irecv"

    @property
    def is_compute(self) -> bool:
        """True for the kinds that run a stage, False for point-to-point transfers."""
        return self in (ActionKind.FORWARD_STAGE, ActionKind.BACKWARD_STAGE)


class StageModule(enum.StrEnum):
    """The module whose layers a stage holds."""

    ENCODER = "encoder"
    BACKBONE = "backbone"


class MemoryStrategy(enum.StrEnum):
    """What a stage does with its activations between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


class Payload(enum.StrEnum):
    """What a transfer carries: activations run with the forward passes, gradients with the backward passes."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    stage: global stage index within its module. segment: pipeline segment (PipeWeaver's; also the model chunk of an
    interleaved schedule). microbatch: index in the order in which the rank starts them. sub_microbatch: part of it, or
    None for the whole (sub-microbatches may join into one microbatch downstream). memory: compute kinds only.
    peer: pipeline rank at the other end, and payload: what travels; transfers only.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    segment: int = 0
    module: StageModule = StageModule.BACKBONE
    sub_microbatch: int | None = None
    memory: MemoryStrategy | None = None
    peer: int | None = None
    payload: Payload | None = None

    def __post_init__(self) -> None:
        indices = {"stage": self.stage, "segment": self.segment, "microbatch": self.microbatch}
        indices |= {"sub_microbatch": self.sub_microbatch or 0, "peer": self.peer or 0}
        for name, value in indices.items():
            if value < 0:
                raise ValueError(f"{self.kind}: {name} ({value}) is negative")
        if self.kind.is_compute and (self.peer is not None or self.payload is not None):
            raise ValueError(f"{self.kind}: a stage action has neither peer ({self.peer}) nor payload ({self.payload})")
        if not self.kind.is_compute and (self.peer is None or self.payload is None or self.memory is not None):
            raise ValueError(
                f"{self.kind}: a transfer needs peer ({self.peer}) and payload ({self.payload}), and has no memory "
                f"strategy ({self.memory})"
            )

    def __str__(self) -> str:
        microbatch = str(self.microbatch) if self.sub_microbatch is None else f"{self.microbatch}.{self.sub_microbatch}"
        fields = {"module": self.module, "stage": self.stage, "segment": self.segment, "microbatch": microbatch}
        fields |= {"memory": self.memory, "peer": self.peer, "payload": self.payload}
        return " ".join([self.kind, *(f"{name}={value}" for name, value in fields.items() if value is not None)])


_FIELDS = frozenset({"module", "stage", "segment", "microbatch", "memory", "peer", "payload"})


def parse_action(line: str) -> Action:
    """Read an action from its text form; raises ValueError with the line when it is malformed."""
    kind, *words = line.split()
    try:
        fields = dict(word.split("=", 1) for word in words)
        unknown = fields.keys() - _FIELDS
        if unknown or len(fields) != len(words):
            raise ValueError(f"unknown or repeated fields {sorted(unknown)}")
        microbatch, _, sub_microbatch = fields["microbatch"].partition(".")
        return Action(
            kind=ActionKind(kind),
            stage=int(fields["stage"]),
            microbatch=int(microbatch),
            segment=int(fields["segment"]),
            module=StageModule(fields["module"]),
            sub_microbatch=int(sub_microbatch) if sub_microbatch else None,
            memory=MemoryStrategy(fields["memory"]) if "memory" in fields else None,
            peer=int(fields["peer"]) if "peer" in fields else None,
            payload=Payload(fields["payload"]) if "payload" in fields else None,
        )
    except KeyError as error:
        raise ValueError(f"action {line!r}: field {error} is missing") from error
    except ValueError as error:
        raise ValueError(f"action {line!r}: {error}") from error


def format_actions(actions: Iterable[Action]) -> str:
    """Text form of a list, one action a line."""
    return "".join(f"{action}\n" for action in actions)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Inverse of `format_actions`; empty lines and lines starting with ``#`` are skipped."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(parse_action(line) for line in lines if line and not line.startswith("#"))
