from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.data.permutation import Permutation
from flowtrain.data.sampler import Sampler
from flowtrain.errors import CheckpointError
from flowtrain.types.samples import SampleRef, SamplerState

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**31)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[float], int, bool]:
    sizes = draw(SIZES)
    weight = st.one_of(st.integers(1, 20).map(float), st.floats(0.01, 10, allow_nan=False))
    weights = draw(st.lists(weight, min_size=len(sizes), max_size=len(sizes)))
    return sizes, weights, draw(SEEDS), draw(st.booleans())


@settings(deadline=None)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 3), st.integers(0, 3))
def test_a_permutation_hits_every_row_once(size: int, seed: int, source: int, epoch: int) -> None:
    permutation = Permutation(size, seed, source, epoch)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


def test_permutations_differ_by_seed_source_and_epoch() -> None:
    orders = {
        tuple(Permutation(50, *key)[i] for i in range(50)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(orders) == 4


def test_a_permutation_spreads_rows_evenly() -> None:
    # Each of 10 x 10 cells (place in the order, row) expects 400 of 40,000; 3 sigma is about 57.
    cells: Counter[tuple[int, int]] = Counter()
    for epoch in range(40):
        permutation = Permutation(1000, 7, 0, epoch)
        cells.update((i // 100, permutation[i] // 100) for i in range(1000))
    assert len(cells) == 100
    assert all(abs(count - 400) < 100 for count in cells.values())


def test_small_permutations_reach_every_order() -> None:
    for size, num_orders in ((2, 2), (3, 6), (4, 24)):
        orders = {tuple(Permutation(size, seed, 0, 0)[i] for i in range(size)) for seed in range(600)}
        assert len(orders) == num_orders


def test_a_source_of_a_billion_rows_costs_nothing() -> None:
    rows = [ref.row for ref in Sampler([10**9], [1.0], seed=3).take(1000)]
    assert len(set(rows)) == 1000
    assert max(rows) > 9 * 10**8 and min(rows) < 10**8


@settings(deadline=None)
@given(mixtures())
def test_every_epoch_of_every_source_visits_each_row_once(mixture: tuple[list[int], list[float], int, bool]) -> None:
    sizes, weights, seed, shuffle = mixture
    refs = Sampler(sizes, weights, seed, shuffle).take(400)
    assert [ref.position for ref in refs] == list(range(400))
    for source, size in enumerate(sizes):
        drawn = [ref for ref in refs if ref.source == source]
        assert [ref.epoch for ref in drawn] == [i // size for i in range(len(drawn))]
        for start in range(0, len(drawn) - size + 1, size):
            assert sorted(ref.row for ref in drawn[start : start + size]) == list(range(size))
        tail = [ref.row for ref in drawn[len(drawn) - len(drawn) % size :]]
        assert len(set(tail)) == len(tail) and all(0 <= row < size for row in tail)


@settings(deadline=None)
@given(mixtures(), st.integers(0, 60), st.integers(0, 60))
def test_taking_in_parts_is_taking_at_once(
    mixture: tuple[list[int], list[float], int, bool], first: int, second: int
) -> None:
    parts, whole = Sampler(*mixture), Sampler(*mixture)
    assert parts.take(first) + parts.take(second) == whole.take(first + second)


@settings(deadline=None)
@given(mixtures(), st.integers(0, 200))
def test_restoring_continues_exactly(mixture: tuple[list[int], list[float], int, bool], drawn: int) -> None:
    sampler, resumed = Sampler(*mixture), Sampler(*mixture)
    sampler.take(drawn)
    stored = json.loads(json.dumps(sampler.state().to_dict()))
    resumed.take(17)
    resumed.restore(SamplerState.from_dict(stored))
    assert resumed.state() == sampler.state()
    assert resumed.take(100) == sampler.take(100)


@settings(deadline=None)
@given(mixtures())
def test_shares_are_exact_within_one_sample_at_every_position(
    mixture: tuple[list[int], list[float], int, bool],
) -> None:
    sizes, weights, *_ = mixture
    exact = [Fraction(str(weight)) for weight in weights]
    counts = [0] * len(sizes)
    for number, ref in enumerate(Sampler(*mixture).take(300), start=1):
        counts[ref.source] += 1
        for weight, count in zip(exact, counts, strict=True):
            assert abs(count - number * weight / sum(exact)) < 1


def test_many_unequal_sources_stay_within_one_sample() -> None:
    # With the largest deficit alone, small sources would get too few samples here.
    weights = [100.0, 50.0, *([1.0] * 30)]
    counts = [0] * len(weights)
    for number, ref in enumerate(Sampler([10] * len(weights), weights, seed=0).take(2000), start=1):
        counts[ref.source] += 1
        assert all(abs(c - number * w / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))


def test_without_shuffling_rows_come_in_order() -> None:
    refs = Sampler([3], [1.0], seed=5, shuffle=False).take(5)
    assert refs == [SampleRef(p, 0, p % 3, p // 3) for p in range(5)]


@pytest.mark.parametrize(("other", "named"), [(([4, 5], 1), "seed 0"), (([4, 6], 0), r"rows \(4, 5\)")])
def test_a_state_of_another_order_is_refused(other: tuple[list[int], int], named: str) -> None:
    state = Sampler([4, 5], [1.0, 1.0], seed=0).state()
    sizes, seed = other
    with pytest.raises(CheckpointError, match=named):
        Sampler(sizes, [1.0, 1.0], seed).restore(state)
