"""``data.order``: from which positions a unit is planned, when, and where a resume goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flowtrain.mempool.directory import Directory
from flowtrain.scheduler.window import ArrivalWindow
from flowtrain.types.plan import EncodeBatch, Unit, UnitKind
from flowtrain.types.samples import SizedSample

SamplerState = dict[str, int | list[int]]
MakeBatches = Callable[[int, Sequence[SizedSample]], tuple[EncodeBatch, ...]]
"""From a unit's index and samples to encode batches."""


class Order(Protocol):
    """Decides what units are made of."""

    def add(self, unit: Unit, samples: Sequence[SizedSample], sampler_state: SamplerState) -> None:
        """Take in a unit that was sized, without rejected samples; sampler_state: behind it."""

    def is_planned_at_once(self, unit: Unit) -> bool:
        """Whether a unit is planned as soon as it is sized, or only when a rank asks for its plan."""

    def choose(self, unit: Unit) -> tuple[Unit, Sequence[SizedSample]] | None:
        """Return what a sized unit runs, once, or None while too little is ready. Steps are asked for in order."""

    def state_behind(self, unit: Unit) -> SamplerState:
        """Return where a run goes on behind a unit that was just consumed, once."""

    def describe_wait(self, unit: Unit) -> str:
        """Say what ``choose`` waits for."""


class InOrder:
    """``deterministic``: a unit runs its own positions, and is planned, with its encode batches, when it is sized."""

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

    def state_behind(self, unit: Unit) -> SamplerState:
        """See ``Order``."""
        return self._states.pop(unit.index)

    def describe_wait(self, unit: Unit) -> str:
        """See ``Order``."""
        return "nothing"


@dataclass(frozen=True)
class _Group:
    """What a step would run in order. state_before: the sampler's, at its first position."""

    unit: Unit
    state_before: SamplerState


class ByArrival:
    """``arrival``: a step is planned when a rank asks for it, from what is ready by then; evaluations stay in order.

    What a step would run in order, its group, is encoded in that order as soon as it is sized. A resume draws and sizes
    again from the first group of which something is left; what was consumed of later ones is in the sampler's state.
    sampler_state: before the first group.
    """

    def __init__(
        self, window: ArrivalWindow, directory: Directory, make_batches: MakeBatches, sampler_state: SamplerState
    ) -> None:
        self._window = window
        self._directory = directory
        self._make_batches = make_batches
        self._state = sampler_state
        self._groups: deque[_Group] = deque()
        self._samples: dict[int, SizedSample] = {}
        self._evaluations: dict[int, Sequence[SizedSample]] = {}

    def add(self, unit: Unit, samples: Sequence[SizedSample], sampler_state: SamplerState) -> None:
        """See ``Order``; a group's encode batches are put in line."""
        if unit.kind is UnitKind.EVAL:
            self._evaluations[unit.index] = samples
            return
        self._groups.append(_Group(unit, self._state))
        self._state = sampler_state
        self._directory.add_batches(self._make_batches(unit.index, samples))
        self._samples.update((sample.position, sample) for sample in samples)
        left = [position for position in unit.positions if not self._directory.is_consumed(position)]
        self._window.add_group(unit.step, left)

    def is_planned_at_once(self, unit: Unit) -> bool:
        """Evaluations are."""
        return unit.kind is UnitKind.EVAL

    def choose(self, unit: Unit) -> tuple[Unit, Sequence[SizedSample]] | None:
        """See ``Order``."""
        if unit.kind is UnitKind.EVAL:
            return unit, self._evaluations.pop(unit.index)
        chosen = self._window.choose(unit.step, unit.num_positions, self._directory.is_done)
        if chosen is None:
            return None
        samples = [self._samples.pop(position, None) for position in chosen]
        wanted = [sample for sample in samples if sample and not self._directory.is_rejected(sample.position)]
        return replace(unit, chosen=chosen), wanted

    def state_behind(self, unit: Unit) -> SamplerState:
        """See ``Order``."""
        consumed = self._directory.consumed
        while self._groups and self._groups[0].unit.positions[-1] < consumed.frontier:
            self._groups.popleft()
        if not self._groups:
            return consumed.state_from(self._state, consumed.frontier)
        first = self._groups[0]
        return consumed.state_from(first.state_before, first.unit.first_position)

    def describe_wait(self, unit: Unit) -> str:
        """See ``Order``."""
        return self._directory.describe_positions(self._window.open_positions(unit.step))
