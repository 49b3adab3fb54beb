"""Costs, buckets and dispatch, each alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.costs.flops import FloatArray, backbone_training_flops
from flowtrain.costs.model_spec import TransformerSpec
from flowtrain.errors import ConfigError
from flowtrain.scheduler.buckets import ALIKE, bucket_of
from flowtrain.scheduler.cost import make_cost_model
from flowtrain.scheduler.dispatch import DISPATCHERS, get_dispatcher, lpt, zigzag
from flowtrain.scheduler.packing.base import Bins, Lengths
from flowtrain.types.plan import CostModel

costs_of_one = st.integers(0, 4_000_000).map(lambda millionths: millionths / 1e6)
cost_lists = st.lists(costs_of_one, max_size=40)
NO_VISION = np.zeros(40, dtype=np.int64)
SPEC = TransformerSpec(2, 8, 16, 2, 2, 4, 50)


def dealt(name: str, costs: list[float], num_buckets: int, dp_size: int) -> tuple[FloatArray, list[list[int]]]:
    """Return the costs by slot and rank, and the slots."""
    array = np.array(costs, dtype=np.float64)
    slots = get_dispatcher(name)(array, NO_VISION[: len(costs)], bucket_of(array, num_buckets), dp_size)
    return array[slots], slots.tolist()


def test_eq3_is_tokens_and_the_longest_squared() -> None:
    cost = make_cost_model("eq3", 100)
    assert cost([50, 30]) == pytest.approx(80 / 100 + (50 / 100) ** 2)
    assert cost([]) == 0.0


def test_tokens_cost_is_the_fill() -> None:
    assert make_cost_model("tokens", 100)([50, 30]) == pytest.approx(0.8)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.sampled_from([(), ("backbone",)]))
def test_flops_are_those_of_the_cost_model_for_packed_attention(lengths: list[int], freeze: tuple[str, ...]) -> None:
    cost = make_cost_model("flops", 100, SPEC, freeze)
    assert cost(lengths) == pytest.approx(backbone_training_flops(SPEC, lengths, freeze))


def test_profile_is_the_fitted_model() -> None:
    fitted = CostModel("profile", per_token=2.0, per_longest=0.5, constant=3.0)
    assert make_cost_model("profile", 100, profile=fitted) is fitted
    assert fitted([2, 4]) == 3.0 + 2.0 * 6 + 0.5 * 16
    assert fitted([]) == 0.0, "a rank without samples would seem to work"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 30), max_size=4), min_size=1, max_size=8))
def test_costs_of_bins_are_the_cost_of_each(bins_of_lengths: list[list[int]]) -> None:
    numbers = iter(range(100))
    bins = Bins.of([next(numbers) for _ in members] for members in bins_of_lengths)
    lengths = Lengths.of(length for members in bins_of_lengths for length in members)
    cost = CostModel("any", per_token=1.0, per_longest=0.25, per_square=0.5, constant=7.0)
    assert bins.costs(lengths, cost).tolist() == pytest.approx([cost(members) for members in bins_of_lengths])
    assert bins.tokens(lengths).tolist() == [sum(members) for members in bins_of_lengths]


def test_what_a_cost_needs_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.cost \('guess'\).*eq3, tokens"):
        make_cost_model("guess", 100)
    with pytest.raises(ConfigError, match=r"'flops'.*backbone"):
        make_cost_model("flops", 100)
    with pytest.raises(ConfigError, match=r"'profile'.*scheduler\.cost_profile"):
        make_cost_model("profile", 100)
    with pytest.raises(ConfigError, match=r"scheduler\.dispatch \('zagzig'\).*zigzag"):
        get_dispatcher("zagzig")


@settings(deadline=None)
@given(cost_lists, st.integers(1, 6))
def test_buckets_hold_similar_costs_costliest_first(costs: list[float], num_buckets: int) -> None:
    buckets = bucket_of(np.array(costs, dtype=np.float64), num_buckets).tolist()
    assert len(buckets) == len(costs)
    assert all(0 <= bucket < num_buckets for bucket in buckets)
    spread = max((max(costs) - min(costs)) / num_buckets, ALIKE * np.mean(costs)) if costs else 0.0
    for cost, bucket in zip(costs, buckets, strict=True):
        for other, other_bucket in zip(costs, buckets, strict=True):
            if bucket == other_bucket:
                assert abs(cost - other) <= spread * (1 + 1e-9) + 1e-12
            elif bucket < other_bucket:
                assert cost >= other


@pytest.mark.parametrize("name", sorted(DISPATCHERS))
@settings(deadline=None)
@given(dp_size=st.integers(1, 5), passes=st.integers(0, 8), num_buckets=st.integers(1, 4), data=st.data())
def test_every_rank_gets_one_of_every_slot(
    name: str, dp_size: int, passes: int, num_buckets: int, data: st.DataObject
) -> None:
    num = dp_size * passes
    costs = data.draw(st.lists(costs_of_one, min_size=num, max_size=num))
    by_slot, slots = dealt(name, costs, num_buckets, dp_size)
    assert by_slot.shape == (passes, dp_size)
    assert sorted(index for slot in slots for index in slot) == list(range(num))
    # The members of a slot are neighbours in cost, so the sum of the costliest is the smallest possible.
    assert [max(slot) for slot in by_slot.tolist()] == sorted(costs, reverse=True)[::dp_size]
    assert dealt(name, costs, num_buckets, dp_size)[1] == slots


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4), st.data())
def test_vision_takes_slots_apart_by_no_more_than_what_is_alike(
    dp_size: int, passes: int, num_buckets: int, data: st.DataObject
) -> None:
    num = dp_size * passes
    costs = np.array(data.draw(st.lists(st.integers(0, 9999).map(lambda c: 1 + c / 1e6), min_size=num, max_size=num)))
    vision = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)))
    costliest = costs[lpt(costs, vision, bucket_of(costs, num_buckets), dp_size)].max(axis=1)
    least = np.sort(costs)[::-1][::dp_size]
    assert (costliest <= least + ALIKE * costs.mean() * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["zigzag", "lpt"])
@settings(deadline=None)
@given(dp_size=st.integers(1, 5), passes=st.integers(1, 8), data=st.data())
def test_ranks_differ_by_one_microbatch_at_most(name: str, dp_size: int, passes: int, data: st.DataObject) -> None:
    num = dp_size * passes
    costs = data.draw(st.lists(costs_of_one, min_size=num, max_size=num))
    totals = dealt(name, costs, 3, dp_size)[0].sum(axis=0)
    assert totals.max() - totals.min() <= max(costs) - min(costs) + 1e-9


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 8), st.data())
def test_no_swap_inside_a_slot_is_left_that_helps_the_costliest_rank(
    dp_size: int, passes: int, data: st.DataObject
) -> None:
    num = dp_size * passes
    costs = data.draw(st.lists(costs_of_one.map(lambda cost: cost + 0.5), min_size=num, max_size=num))
    by_slot = dealt("lpt", costs, 1, dp_size)[0]
    totals = by_slot.sum(axis=0)
    costliest = totals.argmax()
    for slot in by_slot:
        for rank in range(dp_size):
            moved = slot[costliest] - slot[rank]
            assert max(totals[costliest] - moved, totals[rank] + moved) >= totals[costliest] * (1 - 2e-5)


def test_zigzag_reverses_each_pass_and_carries_over_buckets() -> None:
    # Costliest bucket: 3 microbatches, so the cheap bucket finishes its second pass, still backwards.
    costs = np.array([9.0, 8.0, 7.0, 1.0, 3.0, 2.0])
    assert zigzag(costs, NO_VISION[:6], np.array([0, 0, 0, 1, 1, 1]), dp_size=2).tolist() == [[0, 1], [4, 2], [5, 3]]


def test_lpt_evens_what_zigzag_leaves() -> None:
    costs = np.array([9.0, 6.0, 5.0, 4.0, 3.0, 1.0])
    buckets = np.zeros(6, dtype=np.int64)
    assert costs[zigzag(costs, NO_VISION[:6], buckets, 2)].sum(axis=0).tolist() == [16.0, 12.0]
    assert costs[lpt(costs, NO_VISION[:6], buckets, 2)].sum(axis=0).tolist() == [14.0, 14.0]


@pytest.mark.parametrize("name", sorted(DISPATCHERS))
def test_where_costs_are_alike_neighbours_in_vision_share_a_slot(name: str) -> None:
    costs = np.array([2.0, 2.0001, 1.9999, 2.00005, 1.0, 1.0])
    vision = np.array([5, 0, 5, 0, 5, 0])
    slots = get_dispatcher(name)(costs, vision, np.zeros(6, dtype=np.int64), 2).tolist()
    assert [sorted(slot) for slot in slots] == [[0, 2], [1, 3], [4, 5]]
