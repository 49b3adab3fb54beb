"""Shared by the packing tests: problems drawn by hypothesis, and the optimum of small ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from flowtrain.scheduler.cost import eq3, tokens
from flowtrain.scheduler.packing.base import Lengths, PackingRules
from flowtrain.types.plan import CostModel

PROFILE = CostModel("profile", per_token=3.0, per_longest=0.5, per_square=0.25, constant=40.0)
"""All four coefficients; sums of them are exact in floating point, so that equal costs compare as equal."""
COSTS = {
    "eq3": eq3,
    "tokens": tokens,
    "flops": lambda capacity: CostModel("flops", per_token=2.0, per_square=1.0),
    "profile": lambda capacity: PROFILE,
}


@st.composite
def packing_problems(
    draw: st.DrawFn, max_capacity: int = 40, max_samples: int = 60, costs: Sequence[str] = tuple(COSTS)
) -> tuple[Lengths, PackingRules]:
    capacity = draw(st.integers(1, max_capacity))
    longest = draw(st.integers(1, capacity))  # otherwise problems with only short samples would be rare
    samples = st.lists(st.tuples(st.integers(1, longest), st.integers(0, 6)), max_size=max_samples)
    drawn = draw(samples)
    rules = PackingRules(
        capacity, COSTS[draw(st.sampled_from(costs))](capacity), draw(st.integers(1, 4)), draw(st.integers(0, 9))
    )
    return Lengths.of((length for length, _ in drawn), (vision for _, vision in drawn)), rules


def optimum(lengths: Sequence[int], capacity: int, cost: CostModel, max_bins: int) -> tuple[int, float]:
    """Return the fewest bins, and the lowest cost of the costliest of at most ``max_bins`` bins, by trying all."""
    ordered = sorted(lengths, reverse=True)
    fewest, least = len(ordered), float("inf")
    bins: list[list[int]] = []

    def place(next_one: int) -> None:
        nonlocal fewest, least
        if next_one == len(ordered):
            fewest = min(fewest, len(bins))
            if len(bins) <= max_bins:
                least = min(least, max(map(cost, bins), default=0.0))
            return
        length = ordered[next_one]
        tried = set()
        for members in bins:
            if sum(members) + length <= capacity and tuple(members) not in tried:
                tried.add(tuple(members))
                members.append(length)
                place(next_one + 1)
                members.pop()
        bins.append([length])
        place(next_one + 1)
        bins.pop()

    place(0)
    return fewest, least
