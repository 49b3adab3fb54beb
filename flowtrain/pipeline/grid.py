"""Shows action lists one below the other, around the actions that an error is about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NoReturn

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Action, ActionKind, Payload, StageModule

_AROUND = 4  # actions shown on either side of a mark, fewer where a row has several
_LEGEND = (
    "[ ] marks the actions concerned. F, B: forward, backward of a microbatch; A>r: launch of its activation to rank "
    "r; G<r: launch of its gradient from rank r; w: the wait for that; ^s: stage, ^es: stage of the encoder"
)


def refuse(lists: Sequence[Sequence[Action]], why: str, marks: Sequence[tuple[int, int]]) -> NoReturn:
    """Raise ScheduleError with the reason and the grid; marks: (rank, index in its list) of the actions concerned."""
    raise ScheduleError(f"{why}\n{draw_grid(lists, marks)}" if any(lists) else why)


def draw_grid(lists: Sequence[Sequence[Action]], marks: Sequence[tuple[int, int]]) -> str:
    """One row per rank, with its actions around the marks in order, and a legend.

    A rank without a mark is shown around its best match for the first mark: an action of the same microbatch, best the
    other end of the same transfer, then one of the same kind.
    """
    about = lists[marks[0][0]][marks[0][1]] if marks else None
    several_stages = any(len({(each.module, each.stage) for each in actions}) > 1 for actions in lists)
    rows = []
    for rank, actions in enumerate(lists):
        own_marks = [index for where, index in marks if where == rank]
        middles = own_marks or [_best_match(actions, about, marks[0][0])] if about else [0]
        around = _AROUND if len(middles) == 1 else _AROUND // 2
        shown = sorted({index for middle in middles for index in range(middle - around, middle + around + 1)})
        row = [f"rank {rank}", "..." if shown[0] > 0 else ""]
        for previous, index in zip([shown[0] - 1, *shown], shown, strict=False):
            cell = _cell(actions[index], several_stages) if 0 <= index < len(actions) else ""
            row += ["..."] * (index > previous + 1) + [f"[{cell}]" if index in own_marks else f" {cell} "]
        rows.append([*row, "..." if shown[-1] + 1 < len(actions) else ""])
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    lines = (" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)
    return "\n".join([*(f"  {line.rstrip()}" for line in lines), f"  {_LEGEND}"])


def _best_match(actions: Sequence[Action], about: Action, rank: int) -> int:
    """Index of the action that is most closely related to another rank's action; otherwise of the first one."""

    def likeness(index: int) -> tuple[bool, bool, bool]:
        action = actions[index]
        is_other_end = action.peer == rank and action.payload is about.payload
        return action.microbatch == about.microbatch, is_other_end, action.kind is about.kind

    return max(range(len(actions)), key=likeness, default=0)  # max takes the first of equals


def _cell(action: Action, several_stages: bool) -> str:
    part = "" if action.sub_microbatch is None else f".{action.sub_microbatch}"
    module = "e" if action.module is StageModule.ENCODER else ""
    stage = f"^{module}{action.stage}" if several_stages else ""
    if action.kind.is_compute:
        return f"{'F' if action.kind is ActionKind.FORWARD_STAGE else 'B'}{action.microbatch}{part}{stage}"
    payload = "A" if action.payload is Payload.ACTIVATION else "G"
    arrow = ">" if action.kind.is_sending else "<"
    wait = "w" if action.kind.is_wait else ""
    return f"{wait}{payload}{action.microbatch}{part}{stage}{arrow}{action.peer}"
