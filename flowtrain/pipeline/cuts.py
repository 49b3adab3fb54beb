"""Where to cut layers into stages: by their number, parameters or time, and OmniBal's ranked candidates (4.2).

A cut of ``n`` units into stages is the tuple of numbers of units, one for each stage, each at least 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate, pairwise

import numpy as np

from flowtrain.costs.flops import FloatArray
from flowtrain.costs.layer_costs import LayerCosts
from flowtrain.pipeline.partition import balanced_counts, split_layers

RADIUS = 3
"""r: how far each cut of a candidate may lie from the anchor's, in units (OmniBal 5.2)."""
NUM_CANDIDATES = 15
"""K: candidates that are timed (OmniBal 5.2)."""

Cut = tuple[int, ...]


def uniform_cut(costs: LayerCosts, num_stages: int) -> Cut:
    """Return the cut with the most even numbers of layers: Megatron's, the paper's layer-based one."""
    if costs.sizes.max() > 1:
        return balanced_counts(costs.sizes.tolist(), num_stages, 1)
    return tuple(map(len, split_layers(len(costs.sizes), num_stages)))


def parameters_cut(costs: LayerCosts, num_stages: int) -> Cut:
    """Return the cut whose largest number of parameters is the smallest: DeepSpeed's ``parameters``."""
    return balanced_counts(costs.parameters.tolist(), num_stages, 1)


def profile_cut(costs: LayerCosts, num_stages: int) -> Cut:
    """Return the cut whose slowest stage is the fastest; PipeDream's, and the anchor of ``ranked_cuts``."""
    return balanced_counts(costs.seconds.tolist(), num_stages, 1)


@dataclass(frozen=True, slots=True)
class CutMetrics:
    """The paper's metrics of a cut, in units of the mean stage's time; their sum ranks candidates."""

    variance: float
    """VAR(fwd_time): the sum over stages of the squared difference from the mean (Eq. 4)."""
    sent: float
    """SUM(comm): what the stages send (Eq. 5)."""

    @property
    def total(self) -> float:
        """The smaller, the better."""
        return self.variance + self.sent


def metrics_of(costs: LayerCosts, cut: Cut) -> CutMetrics:
    """Return the metrics of a cut."""
    bounds = [0, *accumulate(cut)]
    terms = _Terms.of(costs, len(cut))
    variance = sum(terms.stage(start, end) for start, end in pairwise(bounds))
    return CutMetrics(variance, sum(terms.sending(end) for end in bounds[1:-1]))


def ranked_cuts(costs: LayerCosts, num_stages: int, *, radius: int = RADIUS, keep: int = NUM_CANDIDATES) -> list[Cut]:
    """Return the best cuts within a radius of the anchor, the best first; exact, by dynamic programming.

    The paper jitters every cut of the anchor and ranks all ``(2 r + 1) ** (N - 1)`` candidates. Both metrics are sums
    over stages, so the best ``keep`` of all are found stage by stage.
    """
    num_units, terms = len(costs.sizes), _Terms.of(costs, num_stages)
    ends = list(accumulate(profile_cut(costs, num_stages)))
    # best[end]: (metric, cut) of the first stages, which hold the units before ``end``, the best first.
    best: dict[int, list[tuple[float, Cut]]] = {0: [(0.0, ())]}
    for stage, anchor in enumerate(ends):
        is_last = stage == num_stages - 1
        places = [num_units] if is_last else range(anchor - radius, anchor + radius + 1)
        found = {end: nsmallest(keep, _extended(best, terms, end, is_last=is_last)) for end in places}
        best = {end: each for end, each in found.items() if each}
    return [cut for _, cut in best[num_units]]


def _extended(
    best: dict[int, list[tuple[float, Cut]]], terms: _Terms, end: int, *, is_last: bool
) -> Iterable[tuple[float, Cut]]:
    """Every kept beginning, with one more stage up to ``end``."""
    for start, each in best.items():
        if not start < end <= terms.num_units:
            continue
        cost = terms.stage(start, end) + (0.0 if is_last else terms.sending(end))
        for metric, cut in each:
            yield metric + cost, (*cut, end - start)


@dataclass(frozen=True, slots=True, eq=False)
class _Terms:
    """What a stage adds to the metrics."""

    until: FloatArray
    """Seconds of the units before each place, ``[U + 1]``, in units of the mean stage."""
    sent: FloatArray

    @classmethod
    def of(cls, costs: LayerCosts, num_stages: int) -> _Terms:
        mean = float(costs.seconds.sum()) / num_stages
        return cls(np.concatenate([[0.0], np.cumsum(costs.seconds)]) / mean, costs.sent_s / mean)

    @property
    def num_units(self) -> int:
        return len(self.sent)

    def stage(self, start: int, end: int) -> float:
        return float(self.until[end] - self.until[start] - 1.0) ** 2

    def sending(self, end: int) -> float:
        return float(self.sent[end - 1])


def named_cut(method: str, costs: LayerCosts, num_stages: int) -> Cut:
    """Return the cut of ``pipeline.partition: uniform | parameters | profile``."""
    return {"uniform": uniform_cut, "parameters": parameters_cut, "profile": profile_cut}[method](costs, num_stages)


def stage_sums(values: Sequence[float] | FloatArray, cut: Cut) -> FloatArray:
    """Return the sum of each stage's units, ``[N]``."""
    return np.add.reduceat(np.asarray(values, dtype=np.float64), [0, *accumulate(cut)][:-1])
