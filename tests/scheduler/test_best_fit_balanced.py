"""The default method: even bins, a step that is never costlier than the paper's, a start that cannot fail."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowtrain.costs.flops import FloatArray
from flowtrain.scheduler.cost import eq3, tokens
from flowtrain.scheduler.layout import Layout, lay_out
from flowtrain.scheduler.packing.base import Lengths, PackingRules
from flowtrain.scheduler.packing.best_fit_balanced import best_fit_balanced
from flowtrain.scheduler.packing.best_fit_decreasing import best_fit_decreasing
from flowtrain.scheduler.packing.starting_bins import deal
from flowtrain.scheduler.summary import slot_imbalances, step_cost, step_imbalance
from flowtrain.types.plan import CostModel

CAPACITY = 40
COSTS = {
    "tokens": tokens(CAPACITY),
    "eq3": eq3(CAPACITY),
    "squares": CostModel("squares", per_token=1.0, per_square=0.1, constant=2.0),
    "steep": CostModel("steep", per_token=0.0, per_square=1.0),
    "constant": CostModel("constant", per_token=0.0, constant=2.0),
}
STUCK = [27, 27, 13, 13, 11, 9, 9, 9]
"""Dealing gets stuck here, but best fit does not."""
BETTER_AS_THEY_COME = [22, 38, 10, 40, 7, 5, 16, 19]
"""Best fit needs four bins in the given order, and five with the longest first."""
length_lists = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)


def slot_costs(layout: Layout, lengths: Lengths, rules: PackingRules) -> FloatArray:
    return layout.bins.costs(lengths, rules.cost)[layout.slots]


@pytest.mark.parametrize("cost", sorted(COSTS))
@settings(deadline=None)
@given(sizes=length_lists, dp_size=st.integers(1, 4))
@example(sizes=[20] * 8, dp_size=2)  # full to the last token
@example(sizes=[21] * 7, dp_size=2)  # one in each
@example(sizes=[40, 1, 1, 1], dp_size=2)  # one dwarfs the others
@example(sizes=STUCK, dp_size=1)
@example(sizes=[*STUCK, *STUCK, 40, 40, 40, 20, 39], dp_size=2)  # and leaves a bin too few to fill the last slot
def test_bins_hold_everything_and_need_no_more_slots_than_best_fit(cost: str, sizes: list[int], dp_size: int) -> None:
    lengths, rules = Lengths.of(sizes), PackingRules(CAPACITY, COSTS[cost], dp_size)
    bins = best_fit_balanced(lengths, rules)
    assert sorted(bins.members.tolist()) == list(range(len(sizes)))
    assert bins.tokens(lengths).max() <= CAPACITY
    assert all(bins), "an empty bin"
    num_slots = -(-len(best_fit_decreasing(lengths, rules)) // dp_size)
    if len(sizes) > num_slots * dp_size:
        assert len(bins) % dp_size == 0, "the planner would have to split"
    else:
        assert len(bins) <= len(sizes)
        assert len(bins) == len(sizes) or len(bins) % dp_size == 0


@pytest.mark.parametrize("cost", sorted(COSTS))
@settings(deadline=None)
@given(sizes=length_lists, dp_size=st.integers(1, 4))
@example(sizes=BETTER_AS_THEY_COME, dp_size=4)
def test_a_step_is_never_costlier_than_the_papers(cost: str, sizes: list[int], dp_size: int) -> None:
    lengths, rules = Lengths.of(sizes), PackingRules(CAPACITY, COSTS[cost], dp_size)
    ours = lay_out(lengths, rules, "best_fit_balanced", "lpt", 4)
    papers = lay_out(lengths, rules, "best_fit", "zigzag", 4)
    total = slot_costs(ours, lengths, rules).sum()
    # Up to one per cent above an even share of its cost, nothing else is tried.
    assert step_cost(slot_costs(ours, lengths, rules)) <= max(
        step_cost(slot_costs(papers, lengths, rules)) * (1 + 1e-9), 1.01 * total / dp_size
    )


def optimal_step_cost(sizes: list[int], cost: CostModel, num_slots: int, dp_size: int) -> float:
    """Try every way to put the samples into the bins of ``num_slots`` slots, none empty unless samples are too few."""
    best, num_bins = np.inf, num_slots * dp_size
    for assignment in itertools.product(range(num_bins), repeat=len(sizes)):
        bins = [[s for s, b in zip(sizes, assignment, strict=True) if b == number] for number in range(num_bins)]
        if max(map(sum, bins)) <= CAPACITY and sum(map(bool, bins)) == min(num_bins, len(sizes)):
            costs = sorted(map(cost, bins), reverse=True)
            best = min(best, sum(costs[::dp_size]))
    return best


@pytest.mark.parametrize("cost", sorted(COSTS))
@given(sizes=st.lists(st.integers(1, CAPACITY), min_size=3, max_size=6))
def test_the_gap_to_the_optimum_is_bounded_on_small_cases(cost: str, sizes: list[int]) -> None:
    lengths, rules = Lengths.of(sizes), PackingRules(CAPACITY, COSTS[cost], 2)
    layout = lay_out(lengths, rules, "best_fit_balanced", "lpt", 4)
    optimum = optimal_step_cost(sizes, rules.cost, len(layout.slots), 2)
    # The worst of 2,000 random cases was 1.23; longest-first dealing alone has a proven 7/6 for costs that add.
    assert step_cost(slot_costs(layout, lengths, rules)) <= optimum * 4 / 3 + 1e-9


@pytest.mark.parametrize("fill", [0.6, 0.9, 0.995])
def test_even_bins_on_lengths_like_those_of_tiled_images(fill: float) -> None:
    rng = np.random.default_rng(3)
    capacity, dp_size, num_slots = 8192, 8, 4
    sizes: list[int] = []
    while sum(sizes) < fill * capacity * dp_size * num_slots:
        sizes.append(int(rng.choice([1, 3, 5])) * 256 + int(rng.integers(40, 300)))
    rules = PackingRules(capacity, eq3(capacity), dp_size)
    lengths = Lengths.of(sizes[:-1])
    costs = slot_costs(lay_out(lengths, rules, "best_fit_balanced", "lpt", 4), lengths, rules)
    assert step_imbalance(costs) < 0.005
    assert slot_imbalances(costs).max() < 0.015


@settings(deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=150), st.integers(1, 100), st.integers(0, 3))
def test_each_sample_is_dealt_to_the_cheapest_bin_with_room(lengths: list[int], num_bins: int, first: int) -> None:
    sizes, number = np.array(sorted(lengths, reverse=True)), np.full(len(lengths), -1, dtype=np.int64)
    model = COSTS["eq3"]
    coefficients = model.per_token, model.per_longest, model.per_square
    found = deal(sizes, number, first, first + num_bins, CAPACITY, *coefficients)
    tokens, costs = [0] * num_bins, [-np.inf] * num_bins
    for index, size in enumerate(sizes.tolist()):
        room = [each for each in range(num_bins) if tokens[each] + size <= CAPACITY]
        if not room:
            assert not found and number[index] == -1
            return
        best = min(room, key=lambda each: costs[each])
        assert number[index] == first + best
        if not tokens[best]:
            costs[best] = model.per_longest * size**2
        tokens[best] += size
        costs[best] += model.per_token * size + model.per_square * size**2
    assert found


@pytest.mark.parametrize("distribution", ["even", "heavy"])
def test_bins_are_as_even_where_there_are_more_than_a_round_tries(distribution: str) -> None:
    """Against batches of few bins, each of which could be exchanged with each other."""
    generator = np.random.default_rng(0)
    drawn = generator.uniform(100, 3000, 8192) if distribution == "even" else 100 + 300 * generator.pareto(1.3, 8192)
    sizes = drawn.clip(64, 8192).astype(np.int64).tolist()
    rules = PackingRules(8192, eq3(8192), 16)

    def excess(part: list[int]) -> float:
        lengths = Lengths.of(part)
        costs = best_fit_balanced(lengths, rules).costs(lengths, rules.cost)
        return float(np.sort(costs)[::-1][::16].sum() * 16 / costs.sum() - 1.0)

    parts = [excess(sizes[start : start + 1024]) for start in range(0, 8192, 1024)]
    assert excess(sizes) <= sum(parts) / len(parts) + 1e-3
