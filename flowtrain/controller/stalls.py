"""What counts as a hang, and the warning that comes before: no step has ended for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flowtrain.config.flow import LimitsConfig
from flowtrain.types.events import Event, UnitDone

ROUNDS = 4
"""Actors are asked what they do so many times within the shortest limit."""
LEAST_ROUND_S = 1.0
"""The driver looks about so often."""
MAX_SHOWN = 4


@dataclass(frozen=True)
class Hang:
    """An actor that hangs. what: what it does, for the message. for_s: for how long."""

    name: str
    what: str
    for_s: float


@dataclass(frozen=True)
class HangLimits:
    """From when on an actor hangs, in seconds.

    action_s: in one action. silence_s: without an answer. warning_s: when a warning names what stands still.
    """

    action_s: float
    silence_s: float
    warning_s: float

    @property
    def round_s(self) -> float:
        """From one question to the next."""
        return max(LEAST_ROUND_S, min(self.action_s, self.silence_s, self.warning_s) / ROUNDS)

    @property
    def silence_key(self) -> str:
        """The limit of silence by its key."""
        return "limits.silence_timeout_s" if self.silence_s < self.action_s else "limits.collective_timeout_s"

    def counted_s(self, since_s: float) -> float:
        """Return how much of the time since the last look counts as silence.

        If the driver itself was paused, nobody else is blamed for that time.
        """
        return min(since_s, 2.0 * self.round_s)

    def silent(self, name: str, for_s: float, starts: bool = False) -> Hang:
        """Return the hang of an actor that does not answer. starts: it has the time of a start."""
        key = "limits.start_timeout_s" if starts else self.silence_key
        return Hang(name, f"it has not answered for {for_s:.0f} s, more than {key} allows", for_s)

    def busy(self, name: str, action: str, for_s: float) -> Hang:
        """Return the hang of an actor that is in one action for too long."""
        what = f"it has been in {action} for {for_s:.0f} s, more than limits.collective_timeout_s allows"
        return Hang(name, what, for_s)


def hang_limits(limits: LimitsConfig) -> HangLimits:
    """Return the limits of a run. An actor may not be silent for longer than it may be in one action."""
    longest_s = limits.collective_timeout_s
    return HangLimits(longest_s, min(longest_s, limits.silence_timeout_s), limits.stall_warning_s)


def standing_text(found: Iterable[tuple[str, str, float]]) -> list[str]:
    """Return what actors stand still in, one text for all that do so in the same.

    found: (name, what, seconds).
    """
    groups: dict[str, list[tuple[str, float]]] = {}
    for name, what, for_s in found:
        groups.setdefault(what, []).append((name, for_s))
    return [_group_text(what, group) for what, group in groups.items()]


def _group_text(what: str, group: list[tuple[str, float]]) -> str:
    names = sorted(name for name, _ in group)
    shown = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")
    return f"{shown}: {what} for {max(for_s for _, for_s in group):.0f} s"


class StallWatch:
    """Warns when no unit has ended for ``limits.stall_warning_s``, and again after as much time.

    The first unit of a start has its limit besides, since models are loaded and compiled in it. A long step in which
    everybody moves is no stall.

    standing: returns what actors stand still in. warn: shows a line to the user.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        standing: Callable[[], list[str]],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._standing, self._warn, self._clock = limits, standing, warn, clock
        self.begin()

    def begin(self) -> None:
        """Note that the backbone has begun, or begun again."""
        self._since_s = self._clock()
        self._next_s = self._since_s + max(self._limits.stall_warning_s, self._limits.start_limit_s)

    def take(self, event: Event) -> None:
        """Note that a unit ended."""
        if isinstance(event, UnitDone):
            self._since_s = self._clock()
            self._next_s = self._since_s + self._limits.stall_warning_s

    def poll(self) -> None:
        """Warn if it is time to; call it often."""
        now_s = self._clock()
        if now_s >= self._next_s and (standing := self._standing()):
            self._next_s = now_s + self._limits.stall_warning_s
            limits = hang_limits(self._limits)
            self._warn(
                f"no step has ended for {now_s - self._since_s:.0f} s; {'; '.join(standing)}. What hangs is started "
                f"again: after {limits.silence_s:g} s without an answer ({limits.silence_key}), or after "
                f"{limits.action_s:g} s in one action (limits.collective_timeout_s); a wait for data ends the run "
                f"after {self._limits.stall_timeout_s:g} s (limits.stall_timeout_s)"
            )


def silences(silent_s: Mapping[str, float], least_s: float) -> list[tuple[str, str, float]]:
    """Return the actors that have said nothing for so long, for ``standing_text``."""
    return [(name, "no answer", for_s) for name, for_s in silent_s.items() if for_s >= least_s]
