"""How long encoders had nothing to encode, cut where units end."""

from __future__ import annotations


class IdleTime:
    """Intervals in which encoders held no lease. Times are seconds on the run's clock."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # of owners that are idle now
        self._past: list[tuple[float, float]] = []

    def note(self, owner: int, is_idle: bool, now_s: float) -> None:
        """Note what an encoder is from now on; one that is gone is not idle."""
        if is_idle:
            self._since.setdefault(owner, now_s)
        elif (since_s := self._since.pop(owner, None)) is not None:
            self._past.append((since_s, now_s))

    def take(self, start_s: float, end_s: float) -> float:
        """Return the idle seconds of all encoders within a window, and forget what was before its end."""
        running = [(since_s, end_s) for since_s in self._since.values()]
        total_s = sum(
            max(0.0, min(last_s, end_s) - max(first_s, start_s)) for first_s, last_s in [*self._past, *running]
        )
        self._past = [each for each in self._past if each[1] > end_s]
        return total_s
