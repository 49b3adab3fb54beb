"""Finds encoders and feeders that hang, whether or not the backbone waits for them yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from flowtrain.controller.stalls import Hang, HangLimits, silences, standing_text
from flowtrain.controller.state import Role
from flowtrain.controller.worker_group import WorkerGroup
from flowtrain.types.whereabouts import STARTS, Whereabouts

PRODUCERS = (Role.ENCODER, Role.FEEDER)


def is_stuck(where: Whereabouts, limit_s: float) -> bool:
    """Whether a producer is in one thing for so long, and does not wait for somebody else."""
    return not where.may_last and where.for_s >= limit_s


@dataclass
class _Asked:
    """A producer, and what it was asked last.

    where: its last answer; None: it gave none yet. silent_s: since then.
    """

    handle: ActorHandle
    call: ray.ObjectRef[Any]
    where: Whereabouts | None = None
    silent_s: float = 0.0

    @property
    def starts(self) -> bool:
        """Whether it has not begun to work, as far as it has said."""
        return self.where is None or self.where.what in STARTS


class ProducerWatch:
    """Asks each encoder and feeder what it does, a few times within the limit. Call ``poll`` often; it never waits.

    start_limit_s: of silence while a process is made and loads its model. found: receives a hang.
    """

    def __init__(
        self,
        actors: WorkerGroup,
        limits: HangLimits,
        start_limit_s: float,
        found: Callable[[Hang], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._limits = limits
        self._start_limit_s = max(start_limit_s, limits.action_s)
        self._found = found
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self._last_s = clock()

    def poll(self) -> None:
        """Ask when it is time to, and judge the answers to the question before."""
        now_s = self._clock()
        if now_s - self._last_s < self._limits.round_s:
            return
        more_s, self._last_s = self._limits.counted_s(now_s - self._last_s), now_s
        running = set(self._actors.runs.values())  # the others have returned
        self._asked = {name: each for name, each in self._asked.items() if name in running}
        for role in PRODUCERS:
            for name, handle in self._actors.of_role(role).items():
                if name in running:
                    self._look_at(name, handle, more_s)

    def _look_at(self, name: str, handle: ActorHandle, more_s: float) -> None:
        asked = self._asked.get(name)
        if asked is None or asked.handle is not handle:  # it was started again
            self._asked[name] = _Asked(handle, handle.whereabouts.remote())
            return
        done, _ = ray.wait([asked.call], num_returns=1, timeout=0)
        hang = self._answered(name, asked) if done else self._silent(name, asked, more_s)
        if hang is not None:
            del self._asked[name]
            self._found(hang)

    def _answered(self, name: str, asked: _Asked) -> Hang | None:
        try:
            where: Whereabouts = ray.get(asked.call, timeout=0)
        except ray.exceptions.RayError:
            return None  # it has ended, which the watcher sees too
        asked.where, asked.silent_s = where, 0.0
        asked.call = asked.handle.whereabouts.remote()
        return self._limits.busy(name, where.what, where.for_s) if is_stuck(where, self._limits.action_s) else None

    def _silent(self, name: str, asked: _Asked, more_s: float) -> Hang | None:
        asked.silent_s += more_s
        limit_s = self._start_limit_s if asked.starts else self._limits.silence_s
        return self._limits.silent(name, asked.silent_s, asked.starts) if asked.silent_s >= limit_s else None

    def standing(self) -> list[str]:
        """Return what producers have been in for ``limits.stall_warning_s``, by their last answers."""
        least_s = self._limits.warning_s
        known = [(name, each, each.where) for name, each in self._asked.items() if each.where is not None]
        silent_s = {name: each.silent_s for name, each, _ in known}
        busy = [
            (name, f"in {where.what}", where.for_s)
            for name, each, where in known
            if not each.silent_s and is_stuck(where, least_s)
        ]
        return standing_text([*silences(silent_s, least_s), *busy])
