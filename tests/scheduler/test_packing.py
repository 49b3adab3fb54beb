"""Invariants of every packing method, and the sorts and the segment tree that they use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.registry import PACKERS, get_packer
from flowtrain.scheduler.packing.segment_tree import add, discard, empty_tree, smallest_at_least
from flowtrain.scheduler.packing.sorting import descending_order, group
from tests.scheduler.packing_problems import packing_problems

METHODS = {"best_fit_balanced", "best_fit", "best_fit_decreasing", "balanced", "isf", "groups", "sequential", "random"}
OPEN_ENDED = sorted(METHODS - {"best_fit_balanced"})  # that one searches: fast for a step, too slow for a data set


def check_bins(bins: Bins, lengths: Lengths, capacity: int) -> None:
    """Every sample in one bin, none over capacity, none empty, ascending inside; on arrays, so for any size."""
    assert np.array_equal(np.sort(bins.members), np.arange(len(lengths)))
    assert bins.offsets[0] == 0 and bins.offsets[-1] == len(lengths)
    assert bins.members.dtype == bins.offsets.dtype == np.int64
    assert (np.diff(bins.offsets) >= 1).all(), "an empty bin"
    assert bins.tokens(lengths).max(initial=0) <= capacity
    follows = np.ones(len(lengths), dtype=bool)
    follows[bins.offsets[:-1]] = False  # the first sample of a bin has none before it
    assert (np.diff(bins.members, prepend=-1)[follows] > 0).all(), "indices of a bin do not ascend"


def test_the_registry_has_every_method() -> None:
    assert set(PACKERS) == METHODS


def test_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.packing \('tightest'\).*best_fit_decreasing, balanced"):
        get_packer("tightest")


@pytest.mark.parametrize("name", sorted(METHODS))
@settings(deadline=None)
@given(problem=packing_problems())
def test_every_method_keeps_the_contract(name: str, problem: tuple[Lengths, PackingRules]) -> None:
    lengths, rules = problem
    before = lengths.tokens.copy(), lengths.vision.copy()
    bins = get_packer(name)(lengths, rules)
    check_bins(bins, lengths, rules.capacity)
    assert len(bins) >= -(-lengths.tokens.sum() // rules.capacity)
    assert np.array_equal(before, (lengths.tokens, lengths.vision)), "the packer changed its input"
    again = get_packer(name)(Lengths(*before), rules)
    assert np.array_equal(bins.members, again.members) and np.array_equal(bins.offsets, again.offsets)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_sample_needs_no_bin(name: str) -> None:
    assert list(get_packer(name)(Lengths.of([]), PackingRules(10, eq3(10), dp_size=4))) == []


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("length", [0, 11])
def test_a_length_outside_the_capacity_is_a_fault(name: str, length: int) -> None:
    with pytest.raises(AssertionError):
        get_packer(name)(Lengths.of([3, length, 4]), PackingRules(10, eq3(10)))


@pytest.mark.parametrize("name", OPEN_ENDED)
def test_a_data_set_is_packed_like_a_step(name: str) -> None:
    rng = np.random.default_rng(5)
    tokens = np.clip(rng.lognormal(6.2, 0.9, 200_000), 4, 8192).astype(np.int64)
    lengths = Lengths(tokens, tokens // 300)
    check_bins(get_packer(name)(lengths, PackingRules(8192, eq3(8192))), lengths, 8192)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_only_the_methods_that_draw_look_at_the_seed(name: str) -> None:
    lengths = Lengths.of([1 + index * 7 % 13 for index in range(80)], [index % 4 for index in range(80)])
    results = {tuple(get_packer(name)(lengths, PackingRules(40, eq3(40), seed=seed))) for seed in range(4)}
    assert len(results) == (4 if name in ("isf", "random") else 1)


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 1 << 40)), max_size=60))
def test_descending_order_is_the_stable_sort(values: list[int]) -> None:
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))
    assert descending_order(np.array(values, dtype=np.int64)).tolist() == expected


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_group_collects_each_bin_in_order(num_bins: int, data: st.DataObject) -> None:
    number = data.draw(st.lists(st.integers(0, num_bins - 1), max_size=40))
    members, offsets = group(np.array(number, dtype=np.int64), num_bins)
    expected = [tuple(index for index, bin_ in enumerate(number) if bin_ == wanted) for wanted in range(num_bins)]
    assert list(Bins(members, offsets)) == expected


@pytest.mark.parametrize("number", [-1, 3])
def test_group_refuses_a_bin_that_is_not_there(number: int) -> None:
    with pytest.raises(AssertionError):
        group(np.array([0, number]), 3)


@settings(deadline=None)
@given(st.integers(1, 33), st.data())
def test_tree_answers_like_a_set(capacity: int, data: st.DataObject) -> None:
    tree, present = empty_tree(capacity), set()
    residuals = st.integers(1, capacity)
    for adds, residual, need in data.draw(st.lists(st.tuples(st.booleans(), residuals, residuals), max_size=40)):
        if adds:
            add(tree, residual)
            present.add(residual)
        elif residual in present:
            discard(tree, residual)
            present.discard(residual)
        assert smallest_at_least(tree, need) == min((r for r in present if r >= need), default=0)
    assert tree[1] == max(present, default=0)
