from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.config.data import Shuffle
from flowtrain.costs.flops import IntArray
from flowtrain.data.permutation import Permutation
from flowtrain.data.sampler import Draw, Sampler
from flowtrain.errors import CheckpointError
from flowtrain.types.samples import SampleRef, SamplerState

SEEDS = st.integers(0, 2**31)


def table(*block_rows: int) -> IntArray:
    """First rows of blocks with so many rows."""
    return np.cumsum([0, *block_rows])


class Order(NamedTuple):
    """What a sampler is made of."""

    tables: list[IntArray]
    weights: list[float]
    seed: int = 0
    shuffle: Shuffle = "blocks"
    shuffle_blocks: int = 3

    @property
    def sizes(self) -> list[int]:
        return [int(each[-1]) for each in self.tables]

    def sampler(self) -> Sampler:
        return Sampler(*self)


def sampler_of(sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: Shuffle = "rows") -> Sampler:
    return Sampler([table(size) for size in sizes], weights, seed, shuffle, 1)


TABLES = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any).map(lambda block_rows: table(*block_rows))


@st.composite
def orders(draw: st.DrawFn, shuffles: Sequence[Shuffle] = ("blocks", "rows", "none")) -> Order:
    tables = draw(st.lists(TABLES, min_size=1, max_size=4))
    weight = st.one_of(st.integers(1, 20).map(float), st.floats(0.01, 10, allow_nan=False))
    weights = draw(st.lists(weight, min_size=len(tables), max_size=len(tables)))
    return Order(tables, weights, draw(SEEDS), draw(st.sampled_from(shuffles)), draw(st.integers(1, 15)))


def block_of(order: Order, ref: SampleRef) -> int:
    return int(np.searchsorted(order.tables[ref.source], ref.row, side="right")) - 1


def stored(state: SamplerState) -> SamplerState:
    """A state that has gone through a checkpoint."""
    return SamplerState.from_dict(json.loads(json.dumps(state.to_dict())))


@settings(deadline=None)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 3), st.integers(0, 3))
def test_a_permutation_hits_every_row_once(size: int, seed: int, source: int, epoch: int) -> None:
    permutation = Permutation(size, seed, source, epoch)
    items = [permutation[i] for i in range(size)]
    assert sorted(items) == list(range(size))
    assert permutation.items().tolist() == items


def test_permutations_differ_by_seed_source_epoch_and_purpose() -> None:
    keys: list[tuple[int | str, ...]] = [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (0, 0, 0, "blocks"),
        (0, 0, 0, "rows", 0),
        (0, 0, 0, "rows", 1),
    ]
    assert len({tuple(Permutation(50, *key).items().tolist()) for key in keys}) == len(keys)


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
        reached = {tuple(Permutation(size, seed, 0, 0)[i] for i in range(size)) for seed in range(600)}
        assert len(reached) == num_orders


@pytest.mark.parametrize("shuffle", ["blocks", "rows"])
def test_a_source_of_a_billion_rows_costs_nothing(shuffle: Shuffle) -> None:
    blocks = np.linspace(0, 10**9, 10_001, dtype=np.int64)
    rows = [ref.row for ref, _ in Sampler([blocks], [1.0], 3, shuffle, 64).take(1000)]
    assert len(set(rows)) == 1000
    assert max(rows) > 9 * 10**8 and min(rows) < 10**8


@pytest.mark.parametrize(
    ("sizes", "weights", "seed", "drawn"),
    [
        ([7], [1.0], 3, "0:6 0:1 0:4 0:5 0:2 0:0 0:3 0:1 0:0 0:4 0:3 0:6 0:5 0:2 0:1 0:2"),
        ([5, 3], [2.0, 1.0], 17, "0:4 0:3 1:0 0:2 0:0 1:1 0:1 0:0 1:2 0:3 0:2 1:1 0:4 0:1 1:2 0:2"),
    ],
)
def test_rows_come_in_the_order_of_earlier_versions(
    sizes: list[int], weights: list[float], seed: int, drawn: str
) -> None:
    found = [f"{ref.source}:{ref.row}" for ref, _ in sampler_of(sizes, weights, seed).take(16)]
    assert found == drawn.split()


@pytest.mark.parametrize(("shuffle", "digest"), [("rows", "c4dfeeb7819ff440"), ("none", "e1a3cfa8e9e084ee")])
def test_long_orders_are_those_of_earlier_versions(shuffle: Shuffle, digest: str) -> None:
    drawn = sampler_of([1000, 37, 10**9], [0.1, 0.25, 3.0], 7, shuffle).take(5000)
    plain = [(ref.position, ref.source, ref.row, ref.epoch) for ref, _ in drawn]
    assert hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest() == digest


def test_blocks_come_in_an_order_that_never_changes() -> None:
    """Another order here would break every resume."""
    sampler = Sampler([table(2, 0, 3, 1, 2), table(4)], [2.0, 1.0], 11, "blocks", 2)
    found = " ".join(f"{ref.source}:{ref.row}/{lane}" for ref, lane in sampler.take(16))
    assert found == "0:6/0 0:7/0 1:2/1 0:5/0 0:4/1 1:1/1 0:1/0 0:0/0 1:3/1 0:3/1 0:2/1 1:0/1 0:2/1 0:6/0 1:0/1 0:4/1"


@settings(deadline=None)
@given(orders())
def test_every_epoch_of_every_source_visits_each_row_once(order: Order) -> None:
    drawn = order.sampler().take(400)
    assert [draw.ref.position for draw in drawn] == list(range(400))
    for source, size in enumerate(order.sizes):
        refs = [ref for ref, _ in drawn if ref.source == source]
        assert [ref.epoch for ref in refs] == [i // size for i in range(len(refs))]
        for start in range(0, len(refs) - size + 1, size):
            assert sorted(ref.row for ref in refs[start : start + size]) == list(range(size))
        tail = [ref.row for ref in refs[len(refs) - len(refs) % size :]]
        assert len(set(tail)) == len(tail) and all(0 <= row < size for row in tail)


@settings(deadline=None)
@given(orders(["blocks"]))
def test_few_blocks_are_open_and_each_has_one_lane(order: Order) -> None:
    rows_left = [dict(enumerate(np.diff(each).tolist())) for each in order.tables]
    left: dict[tuple[int, int, int], int] = {}
    lanes: dict[tuple[int, int, int], int] = {}
    for ref, lane in order.sampler().take(300):
        block = (ref.source, ref.epoch, block_of(order, ref))
        assert lanes.setdefault(block, lane) == lane
        assert ref.source <= lane < order.shuffle_blocks + ref.source
        left[block] = left.get(block, rows_left[ref.source][block[2]]) - 1
        opened = [other for other, rows in left.items() if rows and other[0] == ref.source]
        assert len(opened) <= order.shuffle_blocks
        assert len({lanes[other] for other in opened}) == len(opened)
        assert {other[1] for other in opened} <= {ref.epoch}


@settings(deadline=None)
@given(orders(), st.integers(0, 200))
def test_open_blocks_have_the_rows_that_are_still_to_come(order: Order, num_drawn: int) -> None:
    sampler = order.sampler()
    begun = {(ref.source, ref.epoch, block_of(order, ref)) for ref, _ in sampler.take(num_drawn)}
    resumed = order.sampler()
    resumed.restore(stored(sampler.state()))
    for source, size in enumerate(order.sizes):
        count = sampler.state().counts[source]
        lookahead = sampler.copy()
        coming: dict[int, list[int]] = {}
        while (state := lookahead.state()).counts[source] < -(-count // size) * size:
            ((ref, _),) = lookahead.take(1)
            if ref.source == source:
                coming.setdefault(block_of(order, ref), []).append(ref.row)
            assert state.next_position < 10_000
        expected = {block: rows for block, rows in coming.items() if (source, count // size, block) in begun}
        for each in (sampler, resumed):
            found = {block: rows.tolist() for block, rows in each.open_rows(source).items()}
            assert found == ({} if order.shuffle == "rows" else expected)


@settings(deadline=None)
@given(orders(), st.integers(0, 60), st.integers(0, 60))
def test_taking_in_parts_is_taking_at_once(order: Order, first: int, second: int) -> None:
    parts, whole = order.sampler(), order.sampler()
    assert parts.take(first) + parts.take(second) == whole.take(first + second)


@settings(deadline=None)
@given(orders(), st.lists(st.integers(0, 120), min_size=1, max_size=5))
def test_restoring_continues_exactly(order: Order, runs: list[int]) -> None:
    """However often a run is stopped, its samples are those of one that never was."""
    drawn: list[Draw] = []
    state = None
    for count in runs:
        sampler = order.sampler()
        if state is not None:
            sampler.take(17)
            sampler.restore(state)
            assert sampler.state() == state
        drawn += sampler.take(count)
        state = stored(sampler.state())
    assert drawn == order.sampler().take(sum(runs))


@settings(deadline=None)
@given(orders(), st.integers(0, 60))
def test_a_copy_looks_ahead(order: Order, num_drawn: int) -> None:
    sampler, undisturbed = order.sampler(), order.sampler()
    sampler.take(num_drawn)
    undisturbed.take(num_drawn)
    ahead = sampler.copy().take(100)
    assert sampler.state() == undisturbed.state()
    assert sampler.take(100) == ahead == undisturbed.take(100)


@settings(deadline=None)
@given(orders())
def test_shares_are_exact_within_one_sample_at_every_position(order: Order) -> None:
    exact = [Fraction(str(weight)) for weight in order.weights]
    counts = [0] * len(exact)
    for number, (ref, _) in enumerate(order.sampler().take(300), start=1):
        counts[ref.source] += 1
        for weight, count in zip(exact, counts, strict=True):
            assert abs(count - number * weight / sum(exact)) < 1


def test_many_unequal_sources_stay_within_one_sample() -> None:
    # With the largest deficit alone, small sources would get too few samples here.
    weights = [100.0, 50.0, *([1.0] * 30)]
    counts = [0] * len(weights)
    for number, (ref, _) in enumerate(sampler_of([10] * len(weights), weights, seed=0).take(2000), start=1):
        counts[ref.source] += 1
        assert all(abs(c - number * w / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))


def test_without_shuffling_rows_come_in_order_and_a_block_is_a_lane() -> None:
    drawn = Sampler([table(1, 0, 2)], [1.0], 5, "none", 64).take(5)
    assert drawn == [Draw(SampleRef(p, 0, p % 3, p // 3), (0, 2, 2)[p % 3]) for p in range(5)]


def test_shuffled_rows_have_lanes_of_their_own() -> None:
    assert [lane for _, lane in sampler_of([5, 3], [2.0, 1.0], 17).take(10)] == list(range(10))


def test_rows_do_not_depend_on_blocks() -> None:
    one, other = (Order([each], [1.0], 5, "rows", 4).sampler() for each in (table(9), table(3, 3, 3)))
    taken = one.take(4)
    other.restore(stored(one.state()))
    assert other.state() == one.state() and len(taken) == 4
    assert other.take(20) == one.take(20)


GIVEN = Order([table(2, 2), table(5)], [1.0, 1.0])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (GIVEN._replace(seed=1), "seed 0, this run has seed 1"),
        (GIVEN._replace(tables=[table(2, 2), table(6)]), r"rows \(4, 5\), this run has rows \(4, 6\)"),
        (GIVEN._replace(tables=[table(1, 3), table(5)]), r"blocks of the sources .* \('\w{16}', '\w{16}'\), this run"),
        (GIVEN._replace(shuffle="rows"), "data.shuffle blocks, this run has data.shuffle rows"),
        (GIVEN._replace(shuffle="none"), "data.shuffle blocks, this run has data.shuffle none"),
        (GIVEN._replace(shuffle_blocks=4), "data.shuffle_blocks 3, this run has data.shuffle_blocks 4"),
    ],
)
def test_a_state_of_another_order_is_refused(other: Order, named: str) -> None:
    sampler = GIVEN.sampler()
    sampler.take(3)
    with pytest.raises(CheckpointError, match=named):
        other.sampler().restore(stored(sampler.state()))


def test_the_first_position_is_the_same_in_any_blocks() -> None:
    """A run's start knows the sizes of its sources, and need not know their blocks."""
    sizes_only = GIVEN._replace(tables=[table(4), table(5)]).sampler()
    sampler = GIVEN.sampler()
    sampler.restore(stored(sizes_only.state()))
    assert sampler.take(30) == GIVEN.sampler().take(30)


@pytest.mark.parametrize("shuffle", ["rows", "none"])
def test_a_checkpoint_from_before_blocks_continues_row_by_row(shuffle: Shuffle) -> None:
    sampler, resumed = (Order([table(4), table(5)], [1.0, 1.0], 0, shuffle).sampler() for _ in range(2))
    sampler.take(7)
    plain = sampler.state().to_dict()
    old = {key: plain[key] for key in ("next_position", "counts", "seed", "sizes")}
    resumed.restore(SamplerState.from_dict(old))
    assert resumed.take(30) == sampler.take(30)
    with pytest.raises(CheckpointError, match="set data.shuffle to rows, which is the old order, or start a new run"):
        GIVEN.sampler().restore(SamplerState.from_dict(old))
