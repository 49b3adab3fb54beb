"""Which units the ranks may begin, and where the run ends."""

from __future__ import annotations

from flowtrain.actors.agenda import Agenda
from flowtrain.types.plan import Unit, UnitKind


class Turns:
    """Gives all ranks the same answer for the same unit, whenever the user stops the run."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._begun = -1
        self._stop_requested = False
        self._stop_at: int | None = None

    def request_stop(self) -> None:
        """End the run after the step that is running and the evaluation that may follow it."""
        self._stop_requested = True

    def begin(self, unit_index: int) -> bool:
        """A rank is about to run a unit; False means stop."""
        if unit_index <= self._begun:
            return True
        # A round of evaluation belongs to the step before it: a resumed run starts behind both.
        if self._stop_requested and self._stop_at is None and self._kind_of(unit_index) is not UnitKind.EVAL:
            self._stop_at = unit_index
        if self.is_past_end(unit_index):
            return False
        self._begun = unit_index
        return True

    def is_past_end(self, unit_index: int) -> bool:
        """Whether a unit that no rank began will never come: the run was stopped, or its units are used up."""
        if self._stop_at is not None:
            return unit_index >= self._stop_at
        return self._agenda.upcoming is None and unit_index not in self._agenda.unfinished

    def may_size(self, unit: Unit) -> bool:
        """Whether the feeder may size a unit now: a stopping run sizes only what was begun; else the window decides."""
        return unit.index <= self._begun if self._stop_requested else self._agenda.is_near(unit)

    @property
    def are_over(self) -> bool:
        """Whether the producers have nothing left to do: the backbone stopped, or all units are done."""
        if self._stop_at is not None:
            return not any(unit_index < self._stop_at for unit_index in self._agenda.unfinished)
        return self._agenda.upcoming is None and not self._agenda.unfinished

    def _kind_of(self, unit_index: int) -> UnitKind | None:
        """Kind of the unit that is next to begin; None past the end."""
        unit = self._agenda.unfinished.get(unit_index) or self._agenda.upcoming
        return unit.kind if unit is not None else None
