from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from flowtrain.errors import AddressError, OutOfPoolMemory
from flowtrain.mempool.arena import Arena, Hold, Run
from flowtrain.mempool.free_runs import FreeRuns

ALIGNMENT = 64
KNOB = "encoders.vision.segment_nbytes"


def arena(bound: int = 64 * 100) -> Arena:
    return Arena(bound, ALIGNMENT, KNOB)


def fragmented(gaps: int) -> Arena:
    """Return an arena whose free bytes are ``gaps`` runs of 64 bytes with used ones between."""
    result = arena(2 * gaps * ALIGNMENT)
    runs = [result.allocate(ALIGNMENT) for _ in range(2 * gaps)]
    for run in sorted(runs)[::2]:
        result.free(run)
    assert len(result.free_runs()) == gaps
    return result


def test_a_part_gets_one_aligned_run_of_its_own_length() -> None:
    a = arena()
    assert a.allocate(100) == ((0, 100),)
    assert a.allocate(1) == ((128, 1),)
    assert (a.used_nbytes, a.free_nbytes) == (192, 6400 - 192)


def test_a_run_that_fits_exactly_is_found_whatever_its_class() -> None:
    for units in range(1, 300):
        a = arena(units * ALIGNMENT)
        assert a.allocate(units * ALIGNMENT) == ((0, units * ALIGNMENT),)


def test_a_part_spans_several_runs_when_none_is_long_enough() -> None:
    a = fragmented(gaps=5)
    runs = a.allocate(4 * ALIGNMENT + 1)
    assert len(runs) == 5 and [nbytes for _, nbytes in runs] == [64, 64, 64, 64, 1]
    assert a.free_nbytes == 0
    a.free(runs)
    assert a.free_nbytes == 5 * ALIGNMENT


def test_spreading_takes_the_fewest_pieces() -> None:
    a = arena(64 * 20)
    (start, _), *_ = a.allocate(64 * 20)
    a.free([(start, 64 * 20)])
    wide, wall, narrow = a.allocate(64 * 10), a.allocate(64), a.allocate(64 * 9)
    a.free(wide)
    a.free(narrow)
    assert len(wall) == 1 and len(a.allocate(64 * 15)) == 2


def test_only_the_number_of_free_bytes_decides_and_the_error_says_so() -> None:
    a = fragmented(gaps=5)
    with pytest.raises(OutOfPoolMemory) as caught:
        a.allocate(5 * ALIGNMENT + 1)
    for part in ("384 bytes asked", "320 of 640 free", "largest free block 64", KNOB):
        assert part in str(caught.value)
    assert a.free_nbytes == 5 * ALIGNMENT


def test_the_closest_run_is_cut_also_beside_the_one_that_was_freed_last() -> None:
    a = arena(64 * 100)
    small, _, large, _ = (a.allocate(64 * units) for units in (4, 1, 40, 1))
    a.free(small)
    a.free(large)  # touched last
    assert a.allocate(64 * 4) == small
    assert a.allocate(64 * 30)[0][0] == large[0][0]


def test_neighbours_coalesce_on_both_sides() -> None:
    a = arena(64 * 4)
    first, second, third, fourth = (a.allocate(64) for _ in range(4))
    a.free(first)
    a.free(third)
    assert len(a.free_runs()) == 2
    a.free(second)
    assert a.free_runs() == [(0, 192)]
    a.free(fourth)
    assert a.free_runs() == [(0, 256)] and a.largest_free_nbytes == 256


def test_a_promise_keeps_bytes_from_others_and_survives_fragmentation() -> None:
    a = fragmented(gaps=6)
    hold = a.hold(5 * ALIGNMENT)
    a.allocate(ALIGNMENT)
    with pytest.raises(OutOfPoolMemory, match="promised to leases"):
        a.allocate(1)
    a.allocate(3 * ALIGNMENT, hold)
    a.allocate(100, hold)
    with pytest.raises(OutOfPoolMemory, match="lease that it belongs to has 0 bytes left"):
        a.allocate(1, hold)
    a.unhold(hold)
    with pytest.raises(AddressError, match="not open"):
        a.unhold(hold)


def test_what_is_left_of_a_promise_is_given_back() -> None:
    a = arena(64 * 4)
    hold = a.hold(64 * 4)
    a.allocate(64, hold)
    a.unhold(hold)
    assert a.available_nbytes == 64 * 3


@given(st.lists(st.integers(1, 12), min_size=2, max_size=30), st.data())
def test_a_part_never_has_more_pieces_than_it_must(lengths: list[int], data: st.DataObject) -> None:
    a = arena(sum(lengths) * ALIGNMENT)
    runs = [a.allocate(length * ALIGNMENT) for length in lengths]
    for run in data.draw(st.lists(st.sampled_from(runs), unique=True, min_size=1)):
        a.free(run)
    longest_first = sorted((nbytes for _, nbytes in a.free_runs()), reverse=True)
    assert a.fragmentation == pytest.approx(1 - longest_first[0] / a.free_nbytes)
    need = data.draw(st.integers(1, a.free_nbytes))
    fewest = next(k for k in range(1, len(longest_first) + 1) if sum(longest_first[:k]) >= a.aligned(need))
    assert len(a.allocate(need)) == fewest


def test_an_empty_and_a_full_arena_are_not_fragmented() -> None:
    a = arena()
    assert a.fragmentation == 0.0
    a.allocate(a.bound_nbytes)
    assert a.fragmentation == 0.0


def test_what_is_undone_goes_back_into_its_promise() -> None:
    a = arena(64 * 8)
    hold = a.hold(64 * 4)
    runs = a.allocate(64 * 3, hold)
    assert (a.free_nbytes, a.available_nbytes) == (64 * 5, 64 * 4)
    a.give_back(runs, hold)
    assert (a.free_nbytes, a.available_nbytes) == (64 * 8, 64 * 4)
    a.free(a.allocate(64 * 4, hold))


@pytest.mark.parametrize("runs", [[(0, 64)], [(64, 64)], [(128, 64)], [(256, 100), (256, 100)], [(256, 64)]])
def test_double_foreign_and_partial_frees_are_refused_whole(runs: list[Run]) -> None:
    a = arena()
    once, other = a.allocate(64), a.allocate(64)
    a.allocate(128)
    kept = a.allocate(100)
    a.free(once)
    a.free(other)
    with pytest.raises(AddressError, match="cannot free"):
        a.free([*kept, *runs])
    assert a.used_nbytes == 256


def test_growth_joins_the_free_end() -> None:
    a = arena(64 * 2)
    a.allocate(64)
    a.grow(64 * 6 + 63)
    assert a.bound_nbytes == 64 * 6 and a.free_runs() == [(64, 64 * 5)]
    with pytest.raises(AddressError, match="shrink"):
        a.grow(64)


def test_nothing_is_asked_nothing_is_taken() -> None:
    a = arena(64)
    a.allocate(64)
    assert a.allocate(0) == ()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=60))
def test_the_index_of_free_runs_agrees_with_a_set_of_bytes(wanted: list[tuple[int, int]]) -> None:
    index, free = FreeRuns(), set(range(1000))
    index.add(0, 1000)
    for back, nbytes in wanted:
        start = index.take(nbytes)
        longest = _longest(free)
        assert (start is None) == (longest < nbytes)
        if start is not None:
            taken = set(range(start, start + nbytes))
            assert taken <= free
            free -= taken
        if back and back not in free:
            index.add(back, 1)
            free.add(back)
        largest = index.largest()
        assert (largest[1] if largest else 0) == _longest(free)
    assert {byte for start, nbytes in index.runs() for byte in range(start, start + nbytes)} == free


def _longest(free: set[int]) -> int:
    longest = run = 0
    for byte in range(1001):
        run = run + 1 if byte in free else 0
        longest = max(longest, run)
    return longest


def test_stale_entries_of_the_index_do_not_pile_up() -> None:
    index = FreeRuns()
    index.add(0, 1 << 20)
    kept: list[tuple[int, int]] = []
    for step in range(5000):
        nbytes = 1000 + step * 7919 % 501
        start = index.take(nbytes)
        assert start is not None
        kept.append((start, nbytes))
        if len(kept) > 100:
            index.add(*kept.pop(step * 31 % 100))
    assert sum(len(heap) for heap in index._heaps.values()) < 3 * len(index) + 200


class ArenaMachine(RuleBasedStateMachine):
    """Random requests, frees, promises and growth against a plain model."""

    live: Bundle[tuple[Run, ...]] = Bundle("live")
    promised: Bundle[Hold] = Bundle("promised")

    @initialize(units=st.integers(0, 60))
    def start(self, units: int) -> None:
        self.arena = arena(units * ALIGNMENT)
        self.used: dict[int, int] = {}
        self.holds: dict[Hold, int] = {}

    @rule(target=live, nbytes=st.integers(0, 12 * ALIGNMENT))
    def allocate(self, nbytes: int) -> tuple[Run, ...] | MultipleResults[tuple[Run, ...]]:
        fits = self.arena.aligned(nbytes) <= self.arena.free_nbytes - sum(self.holds.values())
        try:
            runs = self.arena.allocate(nbytes)
        except OutOfPoolMemory:
            assert not fits
            return multiple()
        assert fits
        return self._took(runs, nbytes)

    @rule(target=live, hold=promised, nbytes=st.integers(0, 12 * ALIGNMENT))
    def allocate_promised(self, hold: Hold, nbytes: int) -> tuple[Run, ...] | MultipleResults[tuple[Run, ...]]:
        need, left = self.arena.aligned(nbytes), self.holds.get(hold, -1)
        if need > left:
            with pytest.raises((OutOfPoolMemory, AddressError)):
                self.arena.allocate(nbytes, hold)
            return multiple()
        runs = self.arena.allocate(nbytes, hold)  # a promise never fails
        self.holds[hold] = left - need
        return self._took(runs, nbytes)

    def _took(self, runs: tuple[Run, ...], nbytes: int) -> tuple[Run, ...] | MultipleResults[tuple[Run, ...]]:
        assert sum(length for _, length in runs) == nbytes
        longest = max((length for _, length in runs), default=0)
        for offset, length in runs:
            assert offset % ALIGNMENT == 0 and offset not in self.used and 0 < length <= longest
            self.used[offset] = self.arena.aligned(length)
        return runs if runs else multiple()

    @rule(runs=consumes(live))
    def free(self, runs: tuple[Run, ...]) -> None:
        freed = self.arena.free(runs)
        assert freed == sum(self.used.pop(offset) for offset, _ in runs)
        with pytest.raises(AddressError):
            self.arena.free(runs)

    @rule(target=promised, nbytes=st.integers(1, 20 * ALIGNMENT))
    def hold(self, nbytes: int) -> Hold | MultipleResults[Hold]:
        need = self.arena.aligned(nbytes)
        if need > self.arena.free_nbytes - sum(self.holds.values()):
            with pytest.raises(OutOfPoolMemory):
                self.arena.hold(nbytes)
            return multiple()
        hold = self.arena.hold(nbytes)
        self.holds[hold] = need
        return hold

    @rule(hold=consumes(promised))
    def unhold(self, hold: Hold) -> None:
        self.arena.unhold(hold)
        del self.holds[hold]

    @rule(units=st.integers(0, 5))
    def grow(self, units: int) -> None:
        self.arena.grow(self.arena.bound_nbytes + units * ALIGNMENT)

    @rule(nbytes=st.lists(st.integers(1, 6 * ALIGNMENT), max_size=4))
    def give_up(self, nbytes: list[int]) -> None:
        before = (self.arena.free_runs(), self.arena.available_nbytes)
        runs: list[Run] = []
        for part in nbytes:
            if self.arena.aligned(part) <= self.arena.available_nbytes:
                runs.extend(self.arena.allocate(part))
        self.arena.give_back(runs, None)
        assert (self.arena.free_runs(), self.arena.available_nbytes) == before

    @invariant()
    def counts_add_up(self) -> None:
        a = self.arena
        assert a.free_nbytes + a.used_nbytes == a.bound_nbytes
        assert a.used_nbytes == sum(self.used.values()) and a.num_runs == len(self.used)
        assert a.available_nbytes == a.free_nbytes - sum(self.holds.values()) >= 0

    @invariant()
    def nothing_overlaps_and_neighbours_are_joined(self) -> None:
        free = self.arena.free_runs()
        end = 0
        for offset, length, is_free in sorted(
            [(o, n, True) for o, n in free] + [(o, n, False) for o, n in self.used.items()]
        ):
            assert offset == end and length > 0, "a gap or an overlap"
            assert not (is_free and (offset in {o + n for o, n in free})), "two free neighbours"
            end = offset + length
        assert end == self.arena.bound_nbytes
        assert self.arena.largest_free_nbytes == max((length for _, length in free), default=0)

    @invariant()
    def fragmentation_is_bounded_by_what_is_in_use(self) -> None:
        a = self.arena
        assert len(a.free_runs()) <= a.num_runs + 1, "two free runs without a used one between them"
        assert a.largest_free_nbytes * (a.num_runs + 1) >= a.free_nbytes
        assert 0 <= a.fragmentation <= 1 - 1 / (a.num_runs + 1)


TestArenaMachine = ArenaMachine.TestCase
