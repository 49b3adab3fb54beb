"""Reads the text form of actions, so that a test can write its schedule down."""

from __future__ import annotations

import re

from flowtrain.pipeline.actions import Action, ActionKind, MemoryKind, MemoryStrategy, Payload, StageModule

_NUMBER = "(0|[1-9][0-9]*)"
_FORM = re.compile(
    rf"(\w+) (?:(encoder) )?s{_NUMBER}(?: c([1-9][0-9]*))? m{_NUMBER}(?:\.{_NUMBER})?"
    rf"(?: ([a-z]+(?:/[0-9]+)?))?(?: (->|<-){_NUMBER})?"
)


def parse_strategy(text: str) -> MemoryStrategy:
    """Inverse of ``str`` of a memory strategy."""
    kind, slash, every = text.partition("/")
    return MemoryStrategy(MemoryKind(kind), int(every) if slash else 1)


def parse_action(line: str) -> Action:
    """Inverse of ``str`` of an action; raises ValueError for any other line."""
    match = _FORM.fullmatch(line)
    if match is None:
        raise ValueError(f"action {line!r} is not of the form 'F s0 m3 keep' or 'isend s0 c1 m3.1 activation ->1'")
    kind, module, stage, segment, microbatch, sub_microbatch, carried, _, peer = match.groups()
    action = Action(
        kind=ActionKind(kind),
        stage=int(stage),
        microbatch=int(microbatch),
        segment=int(segment or 0),
        module=StageModule(module or StageModule.BACKBONE),
        sub_microbatch=None if sub_microbatch is None else int(sub_microbatch),
        memory=parse_strategy(carried) if carried and peer is None else None,
        peer=None if peer is None else int(peer),
        payload=None if peer is None else Payload(carried),
    )
    if str(action) != line:
        raise ValueError(f"action {line!r} is written {action}")
    return action


def parse_actions(text: str) -> tuple[Action, ...]:
    """One action per line; empty lines are skipped."""
    return tuple(parse_action(line.strip()) for line in text.splitlines() if line.strip())
