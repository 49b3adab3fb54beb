"""Finds encoders and feeders that hang, whether or not the backbone waits for them yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from flowtrain.controller.hang_watch import Hang
from flowtrain.controller.state import Role
from flowtrain.controller.worker_group import WorkerGroup
from flowtrain.types.whereabouts import Whereabouts

ROUNDS = 4
"""Each producer is asked so many times within the limit."""
PRODUCERS = (Role.ENCODER, Role.FEEDER)


def what_hangs(where: Whereabouts, limit_s: float) -> str | None:
    """Return what a producer is stuck in; None while it moves, or waits for somebody else."""
    if where.may_last or where.for_s < limit_s:
        return None
    return f"it has been in {where.what} for {where.for_s:.0f} s"


@dataclass
class _Asked:
    """A producer, and what it was asked last. num_missed: rounds without an answer, one after another."""

    handle: ActorHandle
    call: ray.ObjectRef[Any]
    has_answered: bool = False
    num_missed: int = 0


class ProducerWatch:
    """Asks each encoder and feeder what it does, a few times within the limit. Call ``poll`` often; it never waits.

    Silence is counted in rounds of this watch: if the driver itself was paused, nobody else is blamed for that time.

    limit_s: ``limits.collective_timeout_s``. start_limit_s: for a first answer, since a process that loads its model
    gives none. found: receives a hang.
    """

    def __init__(
        self,
        actors: WorkerGroup,
        limit_s: float,
        start_limit_s: float,
        found: Callable[[Hang], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._limit_s = limit_s
        self._start_limit_s = max(start_limit_s, limit_s)
        self._found = found
        self._clock = clock
        self._round_s = limit_s / ROUNDS
        self._asked: dict[str, _Asked] = {}
        self._last_s = clock()

    def poll(self) -> None:
        """Ask when it is time to, and judge the answers to the question before."""
        now_s = self._clock()
        if now_s - self._last_s < self._round_s:
            return
        self._last_s = now_s
        running = set(self._actors.runs.values())  # the others have returned
        for role in PRODUCERS:
            for name, handle in self._actors.of_role(role).items():
                if name in running:
                    self._look_at(name, handle)

    def _look_at(self, name: str, handle: ActorHandle) -> None:
        asked = self._asked.get(name)
        if asked is None or asked.handle is not handle:  # it was started again
            self._asked[name] = _Asked(handle, handle.whereabouts.remote())
            return
        done, _ = ray.wait([asked.call], num_returns=1, timeout=0)
        what = self._answered(asked) if done else self._silent(asked)
        if what is not None:
            del self._asked[name]
            self._found(Hang(name, f"{what}, more than limits.collective_timeout_s allows"))

    def _answered(self, asked: _Asked) -> str | None:
        try:
            where: Whereabouts = ray.get(asked.call, timeout=0)
        except ray.exceptions.RayError:
            return None  # it has ended, which the watcher sees too
        asked.has_answered, asked.num_missed = True, 0
        asked.call = asked.handle.whereabouts.remote()
        return what_hangs(where, self._limit_s)

    def _silent(self, asked: _Asked) -> str | None:
        asked.num_missed += 1
        silent_s = asked.num_missed * self._round_s
        limit_s = self._limit_s if asked.has_answered else self._start_limit_s
        return f"it has not answered for {silent_s:.0f} s" if silent_s >= limit_s else None
