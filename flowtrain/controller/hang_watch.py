"""Finds backbone ranks that hang, names the one that the others wait for, and keeps the stacks of all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from flowtrain.controller.stalls import Hang, HangLimits, silences, standing_text
from flowtrain.controller.state import Role
from flowtrain.controller.worker_group import WorkerGroup
from flowtrain.types.events import Event, UnitDone
from flowtrain.types.whereabouts import WAIT_FOR_DATA, Whereabouts

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long a rank may take to say what it does, or to write its stacks."""


def find_hang(answers: Mapping[str, Whereabouts], silent_s: Mapping[str, float], limits: HangLimits) -> Hang | None:
    """Return the rank that the others wait for, or None while there is hope.

    answers: of the ranks that say what they do. silent_s: for how long each of the others has said nothing.

    A rank that is silent for too long hangs. Otherwise all ranks must be in one action for too long, and none of them
    in one that may last: a rank that is only slow moves on, and then so do the others. Then the one that has begun
    least hangs.
    """
    silent = max(silent_s, key=silent_s.__getitem__, default=None)
    if silent is not None:
        return limits.silent(silent, silent_s[silent]) if silent_s[silent] >= limits.silence_s else None
    if not answers or any(each.may_last or each.for_s < limits.action_s for each in answers.values()):
        return None
    name = min(answers, key=lambda each: (answers[each].unit, answers[each].place))
    where = answers[name]
    return limits.busy(name, f"{where.what} of step {where.step}", where.for_s)


class HangWatch:
    """Asks the ranks what they do while no unit ends. Call ``poll`` often; it never waits for a rank that works.

    directory: gets the stacks. found: receives a hang.
    """

    def __init__(
        self,
        actors: WorkerGroup,
        limits: HangLimits,
        directory: Path,
        found: Callable[[Hang], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._limits = limits
        self._directory = directory
        self._found = found
        self._clock = clock
        self._calls: dict[ray.ObjectRef[Any], str] = {}
        self._step = 0
        self.begin()

    def begin(self) -> None:
        """Note that the backbone has begun, or begun again."""
        self._calls = {}
        self._progress_s = self._asked_s = self._judged_s = self._clock()
        self._answers: dict[str, Whereabouts] = {}
        self._silent_s: dict[str, float] = {}

    def take(self, event: Event) -> None:
        """Note that a unit ended."""
        if isinstance(event, UnitDone):
            self._step = event.unit.step
            self.begin()

    def poll(self) -> None:
        """Ask when it is time to, and judge the answers when they are there."""
        now_s = self._clock()
        if self._calls:
            done, waiting = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
            if not waiting or now_s - self._asked_s > min(ANSWER_S, self._limits.round_s):
                self._judge(done, now_s)
        elif now_s - max(self._progress_s, self._asked_s) > self._limits.round_s:
            self._asked_s = now_s
            running = set(self._actors.runs.values())  # the others have returned
            ranks = self._actors.of_role(Role.BACKBONE)
            self._calls = {each.whereabouts.remote(): name for name, each in ranks.items() if name in running}

    def _judge(self, done: list[ray.ObjectRef[Any]], now_s: float) -> None:
        calls, self._calls = self._calls, {}
        answers: dict[str, Whereabouts] = {}
        for ref in done:
            try:
                answers[calls[ref]] = ray.get(ref, timeout=0)
            except ray.exceptions.RayError:
                return  # it has ended, which the watcher sees too
        more_s, self._judged_s = self._limits.counted_s(now_s - self._judged_s), now_s
        silent = set(calls.values()) - answers.keys()
        silent_s = {name: self._silent_s.get(name, 0.0) + more_s for name in silent}
        self._answers, self._silent_s = answers, silent_s
        hang = find_hang(answers, silent_s, self._limits)
        if hang is not None:
            self._found(replace(hang, what=f"{hang.what}; {self._keep_stacks(answers)}"))

    def standing(self) -> list[str]:
        """Return what ranks have been in for ``limits.stall_warning_s``, by their last answers."""
        least_s = self._limits.warning_s
        found = [
            (name, f"in {where.what}", where.for_s)
            for name, where in self._answers.items()
            if where.for_s >= least_s and (where.what == WAIT_FOR_DATA or not where.may_last)
        ]
        return standing_text([*silences(self._silent_s, least_s), *found])

    def _keep_stacks(self, answers: Mapping[str, Whereabouts]) -> str:
        """Let the ranks that answer write their stacks; returns a line about them."""
        directory = self._directory / f"step-{self._step + 1:08d}"
        ranks = self._actors.of_role(Role.BACKBONE)
        calls: list[ray.ObjectRef[Any]] = [ranks[name].dump_stacks.remote(str(directory)) for name in answers]
        done = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_S)[0] if calls else []
        doing = "; ".join(f"{name}: {each.what}" for name, each in sorted(answers.items()))
        logger.warning("what the ranks do: %s", doing or "no rank answers")
        written = sum(_is_written(call) for call in done)
        return f"stacks of {written} of {len(ranks)} ranks are in {directory}"


def _is_written(call: ray.ObjectRef[Any]) -> bool:
    try:
        ray.get(call, timeout=0)
    except (ray.exceptions.RayError, OSError) as error:
        logger.warning("the stacks of a rank were not written: %s", error)
        return False
    return True
