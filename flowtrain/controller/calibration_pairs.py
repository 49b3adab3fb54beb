"""Measured and predicted seconds of a run's spans, and the factors that they give. No Ray, no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from flowtrain.costs.calibration import FEWEST, Calibration, DeviceTotal, factor, part_factors, robust_remainder

UPDATE = "optimizer"
"""The kind of pairs, and the name of spans, that the optimizer's factor comes from; an encoder's is its name."""


@dataclass(frozen=True, slots=True)
class JoinedPass:
    """A rank's pass with collectives, in seconds."""

    start_s: float
    measured_s: float
    layers_s: float
    """Predicted, of computing without the head."""
    head_s: float
    """Predicted."""
    collectives_s: float
    """Predicted, of what computing does not hide."""
    meets_first: bool = False
    """Whether the ranks meet before they compute, and not while or after they do."""

    def computing_s(self, layers: float, head: float) -> float:
        """Return its time without collectives; layers, head: factors."""
        return layers * self.layers_s + head * self.head_s

    def meeting_s(self, layers: float, head: float) -> float:
        """Return when it comes to the others; arguments as above."""
        return self.start_s if self.meets_first else self.start_s + self.computing_s(layers, head)


@dataclass(slots=True)
class Pairs:
    """Measured and predicted seconds by what they are of, from any number of steps and runs."""

    measured: defaultdict[str, list[float]] = field(default_factory=partial(defaultdict, list))
    predicted: defaultdict[str, list[float]] = field(default_factory=partial(defaultdict, list))
    num_spans: Counter[str] = field(default_factory=Counter)
    """Spans that these are of."""
    joined: list[tuple[JoinedPass, ...]] = field(default_factory=list)
    """Passes of the ranks that meet in their collectives."""
    ends: list[JoinedPass] = field(default_factory=list)
    """First forwards and last backwards of replicas that meet no other."""
    stages: list[DeviceTotal] = field(default_factory=list)
    """Passes of a run's stages without collectives; parts: layers, head."""
    devices: list[DeviceTotal] = field(default_factory=list)
    """All that a device does in a run, where processes or threads share it; parts: layers, head, an encoder."""

    def add(self, kind: str, measured: float, predicted: float, num_spans: int = 1) -> None:
        """Add a pair of so many spans; a prediction of nothing says nothing."""
        if predicted > 0.0:
            self.measured[kind].append(measured)
            self.predicted[kind].append(predicted)
            self.num_spans[kind] += num_spans

    def calibration(self, run: str, encoders: Sequence[str]) -> Calibration:
        """Return the factors."""
        factors = {
            kind: factor(self.measured[kind], self.predicted[kind], self.num_spans[kind]) for kind in self._known()
        }
        of_stages, of_devices = (sum(total.num_spans for total in each) for each in (self.stages, self.devices))
        layers, head, encoder = part_factors(self.devices, 3)
        collectives = ends = layers
        if of_stages >= FEWEST:
            layers, head = part_factors(self.stages, 2)
            ends = robust_remainder(*_beside_computing(self.ends, layers, head))
        if len(self.joined) >= FEWEST:
            # The rank that comes last waits for no other; the others' waits are none of the collectives' time.
            last = [max(ranks, key=lambda each: each.meeting_s(layers, head)) for ranks in self.joined]
            measured, computing, joined = _beside_computing(last, layers, head)
            if of_stages >= FEWEST:
                collectives = robust_remainder(measured, computing, joined)
            else:  # every pass has collectives, so all get one factor
                _, computing, joined = _beside_computing(last, 1.0, 1.0)
                together = [sum(each) for each in zip(computing, joined, strict=True)]
                layers = head = collectives = ends = factor(measured, together)
        counted = [*(self.num_spans[kind] for kind in factors), of_stages, of_devices, len(self.joined)]
        return Calibration(
            run=run,
            backbone=layers,
            head=head,
            encoders={name: factors.get(name, encoder) for name in encoders},
            collectives=collectives,
            ends=ends,
            optimizer=factors.get(UPDATE, 1.0),
            num_spans=sum(each for each in counted if each >= FEWEST),
        )

    def _known(self) -> list[str]:
        return [kind for kind, count in self.num_spans.items() if count >= FEWEST]


def _beside_computing(
    passes: Sequence[JoinedPass], layers: float, head: float
) -> tuple[list[float], list[float], list[float]]:
    """What passes took, their predicted computing with these factors, and their predicted collectives."""
    computing = [each.computing_s(layers, head) for each in passes]
    return [each.measured_s for each in passes], computing, [each.collectives_s for each in passes]
