"""Cuts of layers into stages, against enumeration."""

from __future__ import annotations

from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.costs.layer_costs import LayerCosts
from flowtrain.pipeline.cuts import Cut, metrics_of, named_cut, profile_cut, ranked_cuts, stage_sums


@st.composite
def layered(draw: st.DrawFn) -> tuple[LayerCosts, int]:
    num_units = draw(st.integers(2, 9))
    column = st.lists(st.floats(0.1, 5.0), min_size=num_units, max_size=num_units)
    seconds, sent, parameters = (np.array(draw(column)) for _ in range(3))
    sizes = np.ones(num_units, dtype=np.int64)
    sizes[draw(st.integers(0, num_units - 1))] = draw(st.sampled_from([1, 1, 3]))
    return LayerCosts(sizes, seconds, sent * 0.1, parameters), draw(st.integers(1, min(4, num_units)))


def jittered(costs: LayerCosts, num_stages: int, radius: int) -> list[Cut]:
    """All candidates of the paper."""
    ends, num_units = list(accumulate(profile_cut(costs, num_stages)))[:-1], len(costs.sizes)
    found = []
    for shifts in product(range(-radius, radius + 1), repeat=len(ends)):
        bounds = [0, *(end + shift for end, shift in zip(ends, shifts, strict=True)), num_units]
        cut = tuple(int(each) for each in np.diff(bounds))
        if min(cut) >= 1:
            found.append(cut)
    return found


@given(layered(), st.integers(0, 3), st.integers(1, 12))
def test_the_best_of_all_jittered_cuts_are_found(world: tuple[LayerCosts, int], radius: int, keep: int) -> None:
    costs, num_stages = world
    every = sorted(metrics_of(costs, cut).total for cut in jittered(costs, num_stages, radius))
    found = ranked_cuts(costs, num_stages, radius=radius, keep=keep)
    assert len(found) == len(set(found)) == min(keep, len(every))
    assert [metrics_of(costs, cut).total for cut in found] == pytest.approx(every[:keep])


@pytest.mark.parametrize(("method", "column"), [("parameters", "parameters"), ("profile", "seconds")])
@given(world=layered())
def test_a_named_cut_has_the_smallest_largest_stage(method: str, column: str, world: tuple[LayerCosts, int]) -> None:
    costs, num_stages = world
    values = getattr(costs, column)
    every = jittered(costs, num_stages, len(values))
    worst = stage_sums(values, named_cut(method, costs, num_stages)).max()
    assert worst == pytest.approx(min(stage_sums(values, cut).max() for cut in every))


@given(layered())
def test_a_uniform_cut_is_even_and_counts_add_up(world: tuple[LayerCosts, int]) -> None:
    costs, num_stages = world
    cut = named_cut("uniform", costs, num_stages)
    counts = costs.counts(cut)
    assert len(counts) == num_stages and sum(counts) == costs.sizes.sum() and min(cut) >= 1
    if costs.sizes.max() == 1:
        assert max(counts) - min(counts) <= 1


def test_transfers_move_a_cut_to_where_little_is_sent() -> None:
    seconds, sizes = np.ones(8), np.ones(8, dtype=np.int64)
    sent = np.full(8, 1.0)
    sent[4] = 0.0
    costs = LayerCosts(sizes, seconds, sent, seconds)
    assert profile_cut(costs, 2) == (4, 4) and ranked_cuts(costs, 2)[0] == (5, 3)
    free = LayerCosts(sizes, seconds, 0 * sent, seconds)
    assert ranked_cuts(free, 2)[0] == (4, 4)
