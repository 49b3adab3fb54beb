"""The computations and transfers of action lists, and the order that they need: how microbatches pass the stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowtrain.pipeline.actions import Action, ActionKind, StageModule
from flowtrain.pipeline.grid import refuse

WHOLE = -1  # in place of a sub-microbatch: the whole microbatch

Work = tuple[bool, int, int, int]
"""A computation: (is a backward, position of its stage in the flow, microbatch, sub-microbatch or WHOLE)."""

Transfer = tuple[bool, int, int, int]
"""A transfer: (carries a gradient, position of the stage that produces it, microbatch, sub-microbatch or WHOLE)."""

_MODULE_ORDER = tuple(StageModule)


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The stages in the order in which a microbatch passes them, and the place of every computation in the lists."""

    positions: dict[tuple[StageModule, int], int]
    """Position in that order of every (module, stage)."""
    ranks: tuple[int, ...]
    """Rank of each stage, by position."""
    parts: dict[tuple[int, int], tuple[int, ...]]
    """How a microbatch is cut, by (position, microbatch): (WHOLE,) or (0, 1, ...)."""
    places: dict[Work, tuple[int, int]]
    """(rank, index in the rank's list) of every computation."""
    num_frozen: int = 0
    """Stages at the beginning without a backward: gradients end at the first stage that has one."""

    def work(self, action: Action) -> Work:
        """What a compute action computes."""
        part = WHOLE if action.sub_microbatch is None else action.sub_microbatch
        is_backward = action.kind is ActionKind.BACKWARD_STAGE
        return is_backward, self.positions[action.module, action.stage], action.microbatch, part

    def needs(self, work: Work) -> list[Work]:
        """The computations whose results ``work`` uses.

        A forward uses those of the stage before; a backward uses those of the stage after and its own forward.
        """
        is_backward, position, microbatch, part = work
        if is_backward:
            forward = [(False, position, microbatch, part)]
            if position + 1 == len(self.ranks):
                return forward
            return [*forward, (True, position + 1, microbatch, self._joined(position + 1, microbatch, part))]
        if position == 0:
            return []
        return [(False, position - 1, microbatch, each) for each in self._cut(position - 1, microbatch, part)]

    def sends(self, work: Work) -> list[Transfer]:
        """The transfers that carry the result of ``work`` to another rank."""
        is_backward, position, microbatch, part = work
        following = position - 1 if is_backward else position + 1
        first = self.num_frozen if is_backward else 0
        if not first <= following < len(self.ranks) or self.ranks[following] == self.ranks[position]:
            return []
        if not is_backward:
            return [work]
        return [(True, position, microbatch, each) for each in self._cut(following, microbatch, part)]

    def ends(self, transfer: Transfer) -> tuple[Work, Work]:
        """The computation that produces what a transfer carries, and the one that uses it."""
        is_gradient, position, microbatch, part = transfer
        if is_gradient:
            producer = (True, position, microbatch, self._joined(position, microbatch, part))
            return producer, (True, position - 1, microbatch, part)
        return transfer, (False, position + 1, microbatch, self._joined(position + 1, microbatch, part))

    def _joined(self, position: int, microbatch: int, part: int) -> int:
        """A stage's name for a part of the stage before it: the same part, or the whole that it joins."""
        return part if part in self.parts[position, microbatch] else WHOLE

    def _cut(self, position: int, microbatch: int, part: int) -> tuple[int, ...]:
        """A stage's names for a part of the stage after it: the same part, or all parts of a whole."""
        parts = self.parts[position, microbatch]
        return (part,) if part in parts else parts


def trace_dataflow(
    lists: Sequence[Sequence[Action]],
    *,
    training: bool,
    num_microbatches: int,
    frozen: Collection[StageModule] = (),
) -> Dataflow:
    """Derive the flow from the compute actions of all ranks.

    frozen: modules without backward, which a microbatch passes before all others (`Partition.frozen`).
    Raises ScheduleError unless every stage is on one rank and runs the forward of every (sub-)microbatch once, and its
    backward once if training and not frozen, otherwise never. Parts of a microbatch may join at a later stage; a whole
    one is never cut again.
    """
    flow = _find_stages(lists, frozen)
    parts: dict[tuple[int, int], list[int]] = {}
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            if not action.kind.is_compute:
                continue
            work = flow.work(action)
            if work in flow.places:
                refuse(lists, f"{action} runs twice", [flow.places[work], (rank, index)])
            flow.places[work] = (rank, index)
            is_backward, position, microbatch, part = work
            if not is_backward:
                parts.setdefault((position, microbatch), []).append(part)
    flow.parts.update((where, tuple(sorted(each))) for where, each in parts.items())
    _check_complete(lists, flow, num_microbatches)
    _check_backwards(lists, flow, training)
    return flow


def _find_stages(lists: Sequence[Sequence[Action]], frozen: Collection[StageModule]) -> Dataflow:
    """A flow with only its stages filled in."""
    assert StageModule.BACKBONE not in frozen, "gradients start at the backbone's loss"
    seen: dict[tuple[StageModule, int], tuple[int, int, int]] = {}  # rank, segment, index in the list
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            first = seen.setdefault((action.module, action.stage), (rank, action.segment, index))
            if first[0] != rank or first[1] != action.segment:
                why = (
                    f"stage {action.stage} of the {action.module} is segment {first[1]} on rank {first[0]}, and "
                    f"segment {action.segment} on rank {rank}; a stage has one segment and one rank"
                )
                refuse(lists, why, [(first[0], first[2]), (rank, index)])
    stages = sorted(seen, key=lambda stage: (_MODULE_ORDER.index(stage[0]), stage[1]))
    for module in StageModule:
        indices = [index for each, index in stages if each is module]
        if indices != list(range(len(indices))):
            refuse(lists, f"the lists have stages {indices} of the {module}; none may be missing", [])
    return Dataflow(
        positions={stage: position for position, stage in enumerate(stages)},
        ranks=tuple(seen[stage][0] for stage in stages),
        parts={},
        places={},
        num_frozen=sum(module in frozen for module, _ in stages),
    )


def _check_complete(lists: Sequence[Sequence[Action]], flow: Dataflow, num_microbatches: int) -> None:
    """Every stage runs every microbatch, whole or in all its parts, and does not cut a microbatch that came whole."""
    found = sorted({microbatch for _, microbatch in flow.parts})
    if found != list(range(num_microbatches)):
        refuse(lists, f"the lists run {len(found)} microbatches, {found}, not the first {num_microbatches}", [])
    for microbatch in found:
        before: tuple[int, ...] | None = None
        for position in range(len(flow.ranks)):
            parts = flow.parts.get((position, microbatch))
            if parts is None:
                shown = [place for work, place in flow.places.items() if work[2] == microbatch][:1]
                refuse(lists, f"{_stage_name(flow, position)} does not run microbatch {microbatch}", shown)
            complete = parts == (WHOLE,) or parts == tuple(range(len(parts)))
            if not complete or (before is not None and parts not in (before, (WHOLE,))):
                why = f"{_stage_name(flow, position)} runs {_parts_name(parts)} of microbatch {microbatch}"
                if before is not None:
                    why += f", and the stage before it {_parts_name(before)}"
                why += "; a microbatch comes whole or in parts 0, 1, ..., which may join and are not cut again"
                refuse(lists, why, [flow.places[False, position, microbatch, parts[0]]])
            before = parts


def _check_backwards(lists: Sequence[Sequence[Action]], flow: Dataflow, training: bool) -> None:
    """If training, each forward that is not frozen has a backward with the same memory strategy; others have none."""
    for (is_backward, position, microbatch, part), place in flow.places.items():
        action = lists[place[0]][place[1]]
        other_place = flow.places.get((not is_backward, position, microbatch, part))
        if is_backward and not training:
            refuse(lists, f"{action}: lists that only evaluate have no backward", [place])
        if is_backward and position < flow.num_frozen:
            refuse(lists, f"{action}: the {action.module} is frozen and has no backward", [place])
        if other_place is None:
            if training and position >= flow.num_frozen:
                refuse(lists, f"{action} has no {'forward' if is_backward else 'backward'}", [place])
            continue
        other = lists[other_place[0]][other_place[1]]
        if other.memory != action.memory:
            refuse(lists, f"{action} and {other} differ in their memory strategy", [place, other_place])


def _stage_name(flow: Dataflow, position: int) -> str:
    module, stage = list(flow.positions)[position]
    return f"stage {stage} of the {module}"


def _parts_name(parts: tuple[int, ...]) -> str:
    return "the whole" if parts == (WHOLE,) else f"parts {', '.join('whole' if p == WHOLE else str(p) for p in parts)}"
