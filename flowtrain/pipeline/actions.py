"""The schedule IR: what one rank does, as a list of actions that the executor runs.

The six kinds are PipeWeaver's Table 2. Schedules only produce such lists (1F1B, interleaved, searched ones). An action
has one text form, a line short enough that hundreds can be read, for messages, logs and golden tests::

    F s0 m3 keep
    isend s0 m3 activation ->1
    wait_irecv s5 c1 m3.1 activation <-0
    B encoder s2 m3.1 recompute/2

``s`` is the stage, ``c`` the segment (left out when 0), ``m`` the microbatch and its sub-microbatch; the module is left
out for the backbone; an arrow points at or comes from the peer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar


class ActionKind(enum.StrEnum):
    """What an action does (PipeWeaver, Table 2)."""

    FORWARD_STAGE = "F"
    BACKWARD_STAGE = "B"
    ISEND = "isend"
    WAIT_ISEND = "wait_isend"
    IRECV = "irecv"
    WAIT_IRECV = "wait_irecv"

    @cached_property
    def is_compute(self) -> bool:
        """True for the kinds that run a stage, False for point-to-point transfers."""
        return self in (ActionKind.FORWARD_STAGE, ActionKind.BACKWARD_STAGE)

    @cached_property
    def is_launch(self) -> bool:
        """True for the kinds that start a transfer, False for computing and waiting."""
        return self in (ActionKind.ISEND, ActionKind.IRECV)

    @cached_property
    def is_wait(self) -> bool:
        """True for the kinds that wait for a transfer to end."""
        return self in (ActionKind.WAIT_ISEND, ActionKind.WAIT_IRECV)

    @cached_property
    def is_sending(self) -> bool:
        """True for the two kinds of the sending end of a transfer."""
        return self in (ActionKind.ISEND, ActionKind.WAIT_ISEND)

    @cached_property
    def launch(self) -> ActionKind:
        """The kind whose end a wait waits for; a launch itself."""
        assert not self.is_compute
        return ActionKind.ISEND if self.is_sending else ActionKind.IRECV


class StageModule(enum.StrEnum):
    """The module whose layers a stage holds; a microbatch passes the encoder's stages before the backbone's."""

    ENCODER = "encoder"
    BACKBONE = "backbone"


class MemoryKind(enum.StrEnum):
    """What a layer does with its activations between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SELECTIVE = "selective"


@dataclass(frozen=True, slots=True)
class MemoryStrategy:
    """What a stage does with its layers' activations between forward and backward; text forms below.

    ``keep`` keeps all, ``recompute`` runs every layer's forward again in the backward pass, ``selective`` keeps what is
    costly to compute and recomputes the rest of each layer, ``recompute/n`` (``every`` n, at least 2) recomputes one
    layer in n and keeps the others.
    """

    kind: MemoryKind
    every: int = 1

    KEEP: ClassVar[MemoryStrategy]
    RECOMPUTE: ClassVar[MemoryStrategy]
    SELECTIVE: ClassVar[MemoryStrategy]

    def __post_init__(self) -> None:
        if self.every < 1 or (self.every > 1 and self.kind is not MemoryKind.RECOMPUTE):
            raise ValueError(f"every ({self.every}) must be at least 1, and 1 for {self.kind}")

    def __str__(self) -> str:
        return self.kind if self.every == 1 else f"{self.kind}/{self.every}"


MemoryStrategy.KEEP = MemoryStrategy(MemoryKind.KEEP)
MemoryStrategy.RECOMPUTE = MemoryStrategy(MemoryKind.RECOMPUTE)
MemoryStrategy.SELECTIVE = MemoryStrategy(MemoryKind.SELECTIVE)


class Payload(enum.StrEnum):
    """What a transfer carries: activations run with the forward passes, gradients with the backward passes."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    stage: global stage index within its module; of a transfer, the stage of this rank that makes or takes the payload,
    so that stage s's isend of an activation meets stage s+1's irecv. segment: pipeline segment (PipeWeaver's), which is
    the model chunk of an interleaved schedule. microbatch: index in the order in which the rank starts them.
    sub_microbatch: part of it, or None for the whole; parts may join into the whole at the next stage, and transfers
    between the two are of the parts. memory: compute kinds only, the same for a forward and its backward.
    peer: pipeline rank at the other end, and payload: what travels; transfers only. A wait names the same transfer as
    its launch.
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
        if min(self.stage, self.segment, self.microbatch, self.sub_microbatch or 0, self.peer or 0) < 0:
            raise ValueError(
                f"{self.kind}: stage ({self.stage}), segment ({self.segment}), microbatch ({self.microbatch}), "
                f"sub_microbatch ({self.sub_microbatch}) and peer ({self.peer}) must not be negative"
            )
        if self.kind.is_compute:
            if self.peer is not None or self.payload is not None:
                raise ValueError(
                    f"{self.kind}: a stage action has neither peer ({self.peer}) nor payload ({self.payload})"
                )
        elif self.peer is None or self.payload is None or self.memory is not None:
            raise ValueError(
                f"{self.kind}: a transfer needs peer ({self.peer}) and payload ({self.payload}), and has no memory "
                f"strategy ({self.memory})"
            )

    @property
    def launch(self) -> Action:
        """The launch that a wait waits for."""
        return replace(self, kind=self.kind.launch)

    def __str__(self) -> str:
        words = [self.kind.value]
        if self.module is not StageModule.BACKBONE:
            words.append(self.module)
        words.append(f"s{self.stage}")
        if self.segment:
            words.append(f"c{self.segment}")
        words.append(f"m{self.microbatch}" if self.sub_microbatch is None else self._part())
        if self.memory is not None:
            words.append(str(self.memory))
        if self.payload is not None:
            words += [self.payload, f"{'->' if self.kind.is_sending else '<-'}{self.peer}"]
        return " ".join(words)

    def _part(self) -> str:
        return f"m{self.microbatch}.{self.sub_microbatch}"


shared_action = lru_cache(maxsize=1 << 16)(Action)
"""An action like ``Action(...)``, one object for equal arguments: schedules of other lengths share most of theirs."""

Schedule = tuple[tuple[Action, ...], ...]  # the action lists of all pipeline ranks, by rank
