"""What each feeder has sized: feeders take unit after unit at their own pace, and a unit is sized when all have."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from flowtrain.flow.steps import Steps
from flowtrain.types.messages import FeedReport
from flowtrain.types.plan import Unit
from flowtrain.types.samples import Rejection, SamplerState, SizedSample

_position = attrgetter("ref.position")


@dataclass(frozen=True, slots=True)
class SizedUnit:
    """A unit that all feeders have sized."""

    samples: list[SizedSample]
    """Without rejected ones, in the order of their positions."""
    rejections: list[Rejection]
    """In the order of their positions."""
    sampler_state: SamplerState
    """After the unit."""


@dataclass(slots=True)
class _Share:
    """What feeders have reported of a unit so far."""

    unit: Unit
    samples: list[SizedSample] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    num_reports: int = 0


class Feeding:
    """The units between the first that is not sized and the last that a feeder has reported its share of.

    A sample belongs to one feeder. Every feeder draws all samples and reports its own, unit by unit, so that a plan
    never depends on the number of feeders.

    steps: the run's units.
    num_feeders: feeders of the run.
    sampler_state: state before the first unit that is sized.
    """

    def __init__(self, steps: Steps, num_feeders: int, sampler_state: SamplerState) -> None:
        self._steps = steps
        self._states = [sampler_state] * num_feeders
        self._num_ahead = [0] * num_feeders  # units that a feeder has reported beyond the sized ones
        self._shares: deque[_Share] = deque()
        self._feeder_of: dict[int, int] = {}

    def take_over(self, earlier: Feeding) -> tuple[int, ...]:
        """Go on with the feeders of an earlier flow; returns their processes."""
        self._feeder_of = earlier._feeder_of
        return tuple(self._feeder_of)

    def join(self, owner: int, feeder: int) -> None:
        """Note that a process is the feeder with this number."""
        assert 0 <= feeder < len(self._states), f"feeder {feeder} of {len(self._states)}"
        self._feeder_of[owner] = feeder

    def state_of(self, owner: int) -> SamplerState:
        """Return the sampler's state after the last unit that a feeder reported; its successor continues there."""
        return self._states[self._feeder_of[owner]]

    def next_unit(self, owner: int) -> Unit | None:
        """Return the unit whose share a feeder sizes next; None past the end."""
        return self._steps.upcoming(self._num_ahead[self._feeder_of[owner]])

    def report(self, owner: int, report: FeedReport) -> SizedUnit | None:
        """Take in a feeder's share of its next unit. Returns the unit's samples with the last share, else None."""
        feeder, unit = self._feeder_of[owner], report.unit
        assert unit is not None and unit == self.next_unit(owner), f"unit {unit} was reported by feeder {feeder}"
        assert report.sampler_state is not None, f"unit {unit} was reported without a state"
        number = self._num_ahead[feeder]
        if number == len(self._shares):
            self._shares.append(_Share(unit))
        share = self._shares[number]
        share.samples += report.sized
        share.rejections += report.rejections
        share.num_reports += 1
        self._num_ahead[feeder] += 1
        self._states[feeder] = report.sampler_state
        if share.num_reports < len(self._states):
            return None
        assert number == 0, f"unit {unit} was sized before an earlier one"
        self._shares.popleft()
        self._num_ahead = [count - 1 for count in self._num_ahead]
        if len(self._states) > 1:
            share.samples.sort(key=_position)
            share.rejections.sort(key=_position)
        return SizedUnit(share.samples, share.rejections, report.sampler_state)
