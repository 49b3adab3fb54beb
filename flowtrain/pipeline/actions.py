"""The schedule IR: a list of actions per rank, which the executor runs.

The six kinds are those of PipeWeaver's Table 2. Schedules (1F1B, interleaved, searched) only produce such lists. An
action has one short text form, for messages, logs and golden tests::

    F s0 m3 keep
    isend s0 m3 activation ->1
    wait_irecv s5 c1 m3.1 activation <-0
    B encoder s2 m3.1 recompute/2
    B s4 m3 keep*2+recompute*3

``s`` is the stage, ``c`` the segment (left out if 0), ``m`` the microbatch and its sub-microbatch. The module is left
out for the backbone. An arrow points to the peer that receives, or comes from the peer that sends.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
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
        """True for the two kinds at the sending end of a transfer."""
        return self in (ActionKind.ISEND, ActionKind.WAIT_ISEND)

    @cached_property
    def launch(self) -> ActionKind:
        """The kind of the launch that a wait waits for; for a launch, the kind itself."""
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
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class MemoryStrategy:
    """What a stage does with its layers' activations between forward and backward.

    Its text forms:

    - ``keep`` keeps all;
    - ``recompute`` runs every layer's forward again in the backward pass;
    - ``selective`` keeps the results that are costly to compute and recomputes the rest of each layer;
    - ``recompute/n`` recomputes one layer in n and keeps the others;
    - ``offload`` keeps all in pinned host memory.
    """

    kind: MemoryKind
    every: int = 1
    """The n of ``recompute/n``; 1 for the other forms."""

    KEEP: ClassVar[MemoryStrategy]
    RECOMPUTE: ClassVar[MemoryStrategy]
    SELECTIVE: ClassVar[MemoryStrategy]
    OFFLOAD: ClassVar[MemoryStrategy]

    def __post_init__(self) -> None:
        if self.every < 1 or (self.every > 1 and self.kind is not MemoryKind.RECOMPUTE):
            raise ValueError(f"every ({self.every}) must be at least 1, and 1 for {self.kind}")

    def of_layers(self, num_layers: int) -> tuple[MemoryKind, ...]:
        """Return the kind of each of a stage's layers; under ``recompute/n`` the first of every n recomputes."""
        return tuple(MemoryKind.KEEP if layer % self.every else self.kind for layer in range(num_layers))

    def __str__(self) -> str:
        return self.kind if self.every == 1 else f"{self.kind}/{self.every}"


MemoryStrategy.KEEP = MemoryStrategy(MemoryKind.KEEP)
MemoryStrategy.RECOMPUTE = MemoryStrategy(MemoryKind.RECOMPUTE)
MemoryStrategy.SELECTIVE = MemoryStrategy(MemoryKind.SELECTIVE)
MemoryStrategy.OFFLOAD = MemoryStrategy(MemoryKind.OFFLOAD)


@dataclass(frozen=True, slots=True)
class LayerStrategies:
    """A memory kind for each layer of a stage. Its text form is ``keep*2+recompute*3``, in the order of the layers."""

    kinds: tuple[MemoryKind, ...]

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("a list of memory strategies needs an entry for each layer, and it is empty")

    def of_layers(self, num_layers: int) -> tuple[MemoryKind, ...]:
        """Return the kind of each of a stage's layers."""
        assert num_layers == len(self.kinds), (num_layers, str(self))
        return self.kinds

    def __str__(self) -> str:
        return "+".join(f"{kind}*{len(list(run))}" for kind, run in groupby(self.kinds))


StageMemory = MemoryStrategy | LayerStrategies
"""What the layers of a stage keep for the backward pass."""


def stage_memory(kinds: Sequence[MemoryKind]) -> StageMemory:
    """Return the strategy of a stage whose layers have these kinds; the uniform one where all are equal."""
    if len(set(kinds)) > 1:
        return LayerStrategies(tuple(kinds))
    return MemoryStrategy(kinds[0]) if kinds else MemoryStrategy.KEEP


class Payload(enum.StrEnum):
    """What a transfer carries: activations between forward passes, gradients between backward passes."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank. A wait names the same transfer as its launch."""

    kind: ActionKind
    stage: int
    """Global stage index within its module. For a transfer, the stage of this rank that produces or uses the payload:
    stage s's isend of an activation matches stage s+1's irecv."""
    microbatch: int
    """Index in the order in which the ranks fetch them; usually they start them in that order too."""
    segment: int = 0
    """Pipeline segment (PipeWeaver's): the model chunk of an interleaved schedule."""
    module: StageModule = StageModule.BACKBONE
    sub_microbatch: int | None = None
    """Part of the microbatch; None for the whole. Parts may join into the whole at the next stage; the transfers
    between the two stages carry the parts."""
    memory: StageMemory | None = None
    """For compute kinds only; the same for a forward and its backward."""
    peer: int | None = None
    """Pipeline rank at the other end; for transfers only."""
    payload: Payload | None = None
    """What the transfer carries; for transfers only."""

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
"""Like ``Action(...)``, but one object for equal arguments: schedules of different lengths share most actions."""

Schedule = tuple[tuple[Action, ...], ...]  # the action lists of all pipeline ranks, by rank


_NUMBER = "(0|[1-9][0-9]*)"
_FORM = re.compile(
    rf"(\w+) (?:(encoder) )?s{_NUMBER}(?: c([1-9][0-9]*))? m{_NUMBER}(?:\.{_NUMBER})?"
    rf"(?: ([a-z][a-z0-9/*+]*))?(?: (->|<-){_NUMBER})?"
)


def parse_action(line: str) -> Action:
    """Inverse of ``str`` of an action; raises ValueError for any other line."""
    match = _FORM.fullmatch(line)
    if match is None:
        raise ValueError(f"action {line!r} is not of the form 'F s0 m3 keep' or 'isend s0 c1 m3.1 activation ->1'")
    kind, module, stage, segment, microbatch, sub_microbatch, carried, _, peer = match.groups()
    action = shared_action(
        ActionKind(kind),
        int(stage),
        int(microbatch),
        segment=int(segment or 0),
        module=StageModule(module or StageModule.BACKBONE),
        sub_microbatch=None if sub_microbatch is None else int(sub_microbatch),
        memory=parse_memory(carried) if carried and peer is None else None,
        peer=None if peer is None else int(peer),
        payload=None if peer is None else Payload(carried),
    )
    if str(action) != line:
        raise ValueError(f"action {line!r} is written {action}")
    return action


def parse_memory(text: str) -> StageMemory:
    """Inverse of ``str`` of a memory strategy."""
    if "*" not in text:
        kind, slash, every = text.partition("/")
        return MemoryStrategy(MemoryKind(kind), int(every) if slash else 1)
    kinds: list[MemoryKind] = []
    for run in text.split("+"):
        kind, _, count = run.partition("*")
        kinds += [MemoryKind(kind)] * int(count)
    return LayerStrategies(tuple(kinds))


def parse_schedule(lists: Sequence[Sequence[str]]) -> Schedule:
    """Return the action lists of all ranks from their text forms; raises ValueError for a line that is no action."""
    return tuple(tuple(parse_action(line) for line in lines) for lines in lists)


def schedule_text(lists: Schedule) -> tuple[tuple[str, ...], ...]:
    """Return the text form of action lists; inverse of `parse_schedule`."""
    return tuple(tuple(str(action) for action in actions) for actions in lists)
