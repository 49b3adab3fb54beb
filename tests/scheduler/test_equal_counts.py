"""Equal counts: every rank gets the same number of microbatches, and no sample is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.equal_counts import with_equal_counts
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from tests.scheduler.packing_problems import PROFILE

CAPACITY = 20


def equal_counts(bins: list[list[int]], lengths: list[int], rules: PackingRules) -> list[tuple[int, ...]]:
    return list(with_equal_counts(Bins.of(bins), Lengths.of(lengths), rules))


def plain_equal_counts(bins: list[list[int]], lengths: list[int], rules: PackingRules) -> list[tuple[int, ...]]:
    """Halve the costliest bin that can be halved, again and again; then fill up with empty ones."""
    result = [tuple(members) for members in bins]
    num_bins = max(1, -(-len(bins) // rules.dp_size)) * rules.dp_size
    while len(result) < num_bins:
        costs = [rules.cost([lengths[i] for i in members]) for members in result]
        divisible = [number for number, members in enumerate(result) if len(members) > 1]
        if not divisible:
            return result + [()] * (num_bins - len(result))
        costliest = max(divisible, key=lambda number: costs[number])
        halves: tuple[list[int], list[int]] = ([], [])
        for index in sorted(result[costliest], key=lambda i: (-lengths[i], i)):
            first, second = (sum(lengths[i] for i in half) for half in halves)
            halves[first > second].append(index)
        result[costliest] = tuple(sorted(halves[0]))
        result.append(tuple(sorted(halves[1])))
    return result


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Bins in any order of samples, and the samples' lengths."""
    shapes = draw(st.lists(st.integers(1, 6), max_size=9))
    lengths = draw(st.lists(st.integers(1, 5), min_size=sum(shapes), max_size=sum(shapes)))
    numbers = iter(draw(st.permutations(range(len(lengths)))))
    return [sorted(next(numbers) for _ in range(shape)) for shape in shapes], lengths


@settings(deadline=None)
@given(packed(), st.integers(1, 12))
def test_equal_counts_lose_nothing_and_split_the_costliest(
    problem: tuple[list[list[int]], list[int]], dp_size: int
) -> None:
    bins, lengths = problem
    rules = PackingRules(CAPACITY, PROFILE, dp_size)
    result = equal_counts(bins, lengths, rules)
    assert sorted(index for members in result for index in members) == list(range(len(lengths)))
    assert len(result) == max(1, -(-len(bins) // dp_size)) * dp_size
    num_empty = sum(not members for members in result)
    assert num_empty == max(0, len(result) - len(lengths)), "an empty microbatch where a bin could have been split"
    assert result == plain_equal_counts(bins, lengths, rules)


def test_the_costliest_bin_is_halved_evenly() -> None:
    bins = [[4, 5], [0, 1, 2, 3], []]
    result = equal_counts(bins, [8, 1, 7, 2, 5, 5], PackingRules(CAPACITY, eq3(CAPACITY), dp_size=4))
    assert result == [(4, 5), (0, 1), (), (2, 3)]


def test_the_longest_sample_counts_where_the_cost_says_so() -> None:
    # Both bins have ten tokens; by Eq. 3, the one with the long sample is costlier.
    bins = [[0, 1], [2, 3]]
    assert equal_counts(bins, [5, 5, 9, 1], PackingRules(CAPACITY, eq3(CAPACITY), 3)) == [(0, 1), (2,), (3,)]


@pytest.mark.parametrize("num_bins", [2, 4])
def test_a_fitting_number_of_bins_is_left_alone(num_bins: int) -> None:
    bins = Bins.of([[number] for number in range(num_bins)])
    rules = PackingRules(CAPACITY, eq3(CAPACITY), dp_size=2)
    assert with_equal_counts(bins, Lengths.of([3] * num_bins), rules) is bins


def test_no_sample_makes_one_slot_of_empty_bins() -> None:
    assert equal_counts([], [], PackingRules(CAPACITY, eq3(CAPACITY), dp_size=3)) == [(), (), ()]
