"""``data.order``: which positions a unit runs, when it is planned, and where a resume continues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from flowtrain.flow.parts import Parts
from flowtrain.types.plan import EncodeBatch, Unit, UnitKind
from flowtrain.types.samples import SamplerState, SizedSample

MakeBatches = Callable[[int, Sequence[SizedSample]], tuple[EncodeBatch, ...]]
"""Builds encode batches from a unit's index and samples."""


def no_batches(unit_index: int, samples: Sequence[SizedSample]) -> tuple[EncodeBatch, ...]:
    """Return no encode batch, for modes without encoder actors."""
    return ()


class Order(Protocol):
    """Decides which samples units run."""

    def add(self, unit: Unit, samples: Sequence[SizedSample], sampler_state: SamplerState) -> None:
        """Take in a sized unit without its rejected samples. sampler_state: state after the unit."""

    def is_planned_at_once(self, unit: Unit) -> bool:
        """Whether a unit is planned as soon as it is sized; otherwise when a rank asks for its plan."""

    def choose(self, unit: Unit) -> tuple[Unit, Sequence[SizedSample]] | None:
        """Return what a sized unit runs, once; None while too little is ready. Call it for steps in their order."""

    def state_after(self, unit: Unit) -> SamplerState:
        """Return the state from which a run continues after a unit that was just consumed. Call it once a unit."""

    def describe_wait(self, unit: Unit) -> str:
        """Return what ``choose`` waits for."""


class InOrder:
    """``deterministic``: a unit runs its own positions. It is planned, with its encode batches, when it is sized."""

    def __init__(self) -> None:
        self._samples: dict[int, Sequence[SizedSample]] = {}
        self._states: dict[int, SamplerState] = {}

    def add(self, unit: Unit, samples: Sequence[SizedSample], sampler_state: SamplerState) -> None:
        """See ``Order``."""
        self._samples[unit.index] = samples
        self._states[unit.index] = sampler_state

    def is_planned_at_once(self, unit: Unit) -> bool:
        """Always."""
        return True

    def choose(self, unit: Unit) -> tuple[Unit, Sequence[SizedSample]] | None:
        """See ``Order``."""
        return unit, self._samples.pop(unit.index)

    def state_after(self, unit: Unit) -> SamplerState:
        """See ``Order``."""
        return self._states.pop(unit.index)

    def describe_wait(self, unit: Unit) -> str:
        """See ``Order``."""
        return "nothing"


@dataclass(frozen=True)
class _Group:
    """The positions that a step would run in ``deterministic`` order."""

    unit: Unit
    state_before: SamplerState
    """The sampler's state at the first position."""


class ArrivalWindow:
    """Chooses positions that are ready for each step, oldest first; no position waits longer than W steps.

    A step's *group* are the positions that it would run in ``deterministic`` order. A position runs at most ``window``
    (W) steps after its group's step; that last step takes it even if it is not ready.

    Some steps close the window: the last one, and those that an evaluation follows. A closing step takes all that is
    left of its own and earlier groups, and no step before it takes positions of later groups. So every evaluation
    comes after the same trained positions as in ``deterministic`` order, and no older position waits in the pool then.

    window: W, in steps.
    last_step: the run's last step.
    close_every: steps between evaluations, of each held-out set.
    """

    def __init__(self, window: int, last_step: int, close_every: Collection[int] = ()) -> None:
        assert window >= 1 and all(every >= 1 for every in close_every), (window, close_every)
        self._window = window
        self._last_step = last_step
        self._close_every = tuple(close_every)
        self._groups: dict[int, list[int]] = {}  # by step, ascending: positions that no step has taken

    def add_group(self, step: int, positions: Sequence[int]) -> None:
        """Add a step's group, its positions ascending. Call it for steps in their order."""
        assert not self._groups or step > next(reversed(self._groups)), (step, list(self._groups))
        if positions:
            self._groups[step] = list(positions)

    def deadline(self, step: int) -> int:
        """Return the last step that may run positions of this step's group."""
        return min(step + self._window, self._closing(step))

    def choose(self, step: int, size: int, is_done: Callable[[int], bool]) -> tuple[int, ...] | None:
        """Take the positions that a step runs, ascending; None while there are too few.

        Call it for steps in their order. First come positions whose last step this is, then the oldest that are done.

        size: positions of the step.
        is_done: whether a position is ready or rejected.
        """
        chosen: list[int] = []
        for group, positions in self._groups.items():
            if len(chosen) == size or group > self._closing(step):
                break
            due = self.deadline(group) <= step
            chosen.extend(islice((p for p in positions if due or is_done(p)), size - len(chosen)))
        if len(chosen) < size:
            return None
        self._take(chosen)
        return tuple(chosen)

    def open_positions(self, step: int) -> tuple[int, ...]:
        """Return the positions of this step's group and earlier ones that no step has taken."""
        return tuple(p for group, positions in self._groups.items() if group <= step for p in positions)

    def _take(self, chosen: Sequence[int]) -> None:
        taken = set(chosen)
        for group, positions in list(self._groups.items()):
            left = [position for position in positions if position not in taken]
            if left:
                self._groups[group] = left
            else:
                del self._groups[group]

    def _closing(self, step: int) -> int:
        """Return the first step, from this one on, that closes the window."""
        return min([self._last_step, *(-(-step // every) * every for every in self._close_every)])


class ByArrival:
    """``arrival``: a step is planned when a rank asks for it, from the positions ready then; evaluations stay in order.

    Encoders encode group after group, each as soon as it is sized. A resume draws and sizes again from the first group
    that is not fully consumed; the sampler's state lists the consumed positions of that group and later ones.

    window: chooses the positions of a step.
    parts: the parts table.
    make_batches: builds a group's encode batches.
    sampler_state: state before the first group.
    """

    def __init__(
        self, window: ArrivalWindow, parts: Parts, make_batches: MakeBatches, sampler_state: SamplerState
    ) -> None:
        self._window = window
        self._parts = parts
        self._make_batches = make_batches
        self._state = sampler_state
        self._groups: deque[_Group] = deque()
        self._samples: dict[int, SizedSample] = {}
        self._evaluations: dict[int, Sequence[SizedSample]] = {}

    def add(self, unit: Unit, samples: Sequence[SizedSample], sampler_state: SamplerState) -> None:
        """See ``Order``; puts a group's encode batches in line."""
        if unit.kind is UnitKind.EVAL:
            self._evaluations[unit.index] = samples
            return
        self._groups.append(_Group(unit, self._state))
        self._state = sampler_state
        self._parts.add_batches(self._make_batches(unit.index, samples))
        self._samples.update((sample.position, sample) for sample in samples)
        self._window.add_group(unit.step, [p for p in unit.positions if not self._parts.is_consumed(p)])

    def is_planned_at_once(self, unit: Unit) -> bool:
        """Only evaluations are planned at once."""
        return unit.kind is UnitKind.EVAL

    def choose(self, unit: Unit) -> tuple[Unit, Sequence[SizedSample]] | None:
        """See ``Order``."""
        if unit.kind is UnitKind.EVAL:
            return unit, self._evaluations.pop(unit.index)
        chosen = self._window.choose(unit.step, unit.num_positions, self._parts.is_done)
        if chosen is None:
            return None
        samples = [self._samples.pop(position, None) for position in chosen]
        wanted = [sample for sample in samples if sample and not self._parts.is_rejected(sample.position)]
        return replace(unit, chosen=chosen), wanted

    def state_after(self, unit: Unit) -> SamplerState:
        """See ``Order``."""
        consumed = self._parts.consumed
        while self._groups and self._groups[0].unit.positions[-1] < consumed.frontier:
            self._groups.popleft()
        if not self._groups:
            return consumed.state_from(self._state, consumed.frontier)
        first = self._groups[0]
        return consumed.state_from(first.state_before, first.unit.first_position)

    def describe_wait(self, unit: Unit) -> str:
        """See ``Order``."""
        return self._parts.leases.describe_waits(self._parts[p] for p in self._window.open_positions(unit.step))
