"""Costs, buckets, equal counts and zig-zag dispatch, each on its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.scheduler.buckets import bucket_of
from flowtrain.scheduler.cost import make_cost_model
from flowtrain.scheduler.dispatch import get_dispatcher, zigzag
from flowtrain.scheduler.equal_counts import with_equal_counts

CAPACITY = 20
cost_lists = st.lists(st.floats(0.0, 4.0), max_size=40)


def test_eq3_is_tokens_and_the_longest_squared() -> None:
    cost = make_cost_model("eq3", 100)
    assert cost([50, 30]) == pytest.approx(80 / 100 + (50 / 100) ** 2)
    assert cost([]) == 0.0


def test_tokens_cost_is_the_fill() -> None:
    assert make_cost_model("tokens", 100)([50, 30]) == pytest.approx(0.8)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.cost \('guess'\).*eq3, tokens"):
        make_cost_model("guess", 100)
    with pytest.raises(ConfigError, match=r"scheduler\.dispatch \('zagzig'\).*zigzag"):
        get_dispatcher("zagzig")


@settings(deadline=None)
@given(cost_lists, st.integers(1, 6))
def test_buckets_hold_similar_costs_dearest_first(costs: list[float], num_buckets: int) -> None:
    buckets = bucket_of(costs, num_buckets)
    assert len(buckets) == len(costs)
    assert all(0 <= bucket < num_buckets for bucket in buckets)
    spread = (max(costs) - min(costs)) / num_buckets if costs else 0.0
    for cost, bucket in zip(costs, buckets, strict=True):
        for other, other_bucket in zip(costs, buckets, strict=True):
            if bucket == other_bucket:
                assert abs(cost - other) <= spread * (1 + 1e-9) + 1e-12
            elif bucket < other_bucket:
                assert cost >= other


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 8), st.integers(1, 4), st.data())
def test_zigzag_gives_every_rank_one_of_every_slot(
    dp_size: int, passes: int, buckets: int, data: st.DataObject
) -> None:
    num = dp_size * passes
    costs = data.draw(st.lists(st.floats(0.0, 4.0), min_size=num, max_size=num))
    slots = zigzag(costs, bucket_of(costs, buckets), dp_size)
    assert len(slots) == passes and all(len(slot) == dp_size for slot in slots)
    assert sorted(index for slot in slots for index in slot) == list(range(num))
    totals = [sum(costs[slot[rank]] for slot in slots) for rank in range(dp_size)]
    # A snake over a descending sequence leaves ranks apart by at most what one microbatch can differ.
    assert max(totals) - min(totals) <= (max(costs) - min(costs) if costs else 0.0) + 1e-9


def test_zigzag_reverses_each_pass_and_carries_over_buckets() -> None:
    # Dearest bucket: 3 microbatches, so its second pass is finished by the cheap bucket, still backwards.
    costs = [9.0, 8.0, 7.0, 1.0, 3.0, 2.0]
    assert zigzag(costs, [0, 0, 0, 1, 1, 1], dp_size=2) == ((0, 1), (4, 2), (5, 3))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=9), st.integers(1, 5))
def test_equal_counts_lose_nothing(bins_of_lengths: list[list[int]], dp_size: int) -> None:
    lengths = [length for members in bins_of_lengths for length in members]
    numbers = iter(range(len(lengths)))
    bins = tuple(tuple(next(numbers) for _ in members) for members in bins_of_lengths)
    result = with_equal_counts(bins, lengths, make_cost_model("eq3", CAPACITY), dp_size)
    assert sorted(index for members in result for index in members) == list(range(len(lengths)))
    assert len(result) == max(1, -(-len(bins) // dp_size)) * dp_size
    num_empty = sum(not members for members in result)
    assert num_empty == max(0, len(result) - len(lengths)), "an empty microbatch where a bin could have been split"


def test_the_dearest_bin_is_halved_evenly() -> None:
    lengths = [8, 1, 7, 2, 5, 5]
    result = with_equal_counts(((4, 5), (0, 1, 2, 3), ()), lengths, make_cost_model("eq3", CAPACITY), dp_size=4)
    assert result == ((4, 5), (0, 1), (), (2, 3))
