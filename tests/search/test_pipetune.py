"""PipeTune's search: what it returns can run, fits memory, is never slower by the simulator, and near the best."""

from __future__ import annotations

import pickle
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.config.pipeline import PipeTuneConfig
from flowtrain.pipeline.actions import StageModule, parse_schedule
from flowtrain.pipeline.validate import validate
from flowtrain.scheduler.layout import Arrangement
from flowtrain.search.early import early_schedule
from flowtrain.search.one_f_one_b import IN_TIME, NOTHING_EARLY, best_of, step_s
from flowtrain.search.orders import MOST_CLUSTERS, cluster_orders, clusters_of, slot_counts
from flowtrain.search.works import slot_times, works_of
from tests.search.worlds import CAPACITY, default_of, drawn, make_samples, make_search, sizes_of

seeds, few = st.integers(0, 2**32 - 1), settings(deadline=None, max_examples=20)


def members(arrangement: Arrangement) -> list[int]:
    return sorted(arrangement.bins.members.tolist())


@few
@given(
    seed=seeds,
    count=st.integers(1, 60),
    pp=st.integers(1, 4),
    dp=st.integers(1, 3),
    packing=st.sampled_from(["sequential", "best_fit_balanced"]),
)
def test_what_is_found_runs_every_sample_once_and_is_never_slower(
    seed: int, count: int, pp: int, dp: int, packing: str
) -> None:
    search, sizes = make_search(pp, dp), sizes_of(drawn(seed, count))
    rules, default = default_of(search, sizes, packing)
    found = search(sizes, rules, default)
    assert members(found) == list(range(count))
    num_slots, ranks = found.slots.shape
    assert ranks == dp and sorted(found.slots.reshape(-1).tolist()) == list(range(len(found.bins)))
    works = works_of(sizes, found.bins, found.slots, "vision")
    assert works.num_tokens.max() <= CAPACITY and works.num_tokens.sum() == sizes.tokens.sum()
    assert works.patches.sum() == sizes.parts["vision"].patches.sum()
    assert search.room.fits(works, num_slots)
    assert search.seconds(sizes, found) <= search.seconds(sizes, default)
    for lists in map(parse_schedule, found.schedules):
        validate(lists, training=True, num_microbatches=num_slots, partition=search.simulator.partition)
    again = pickle.loads(pickle.dumps(search))(sizes, rules, default)
    assert (again.slots == found.slots).all() and again.schedules == found.schedules, "in any process the same"


@few
@given(seed=seeds, count=st.integers(2, 40), pp=st.integers(1, 4), ahead=st.booleans(), stretch=st.floats(1, 3))
def test_ranking_takes_the_simulators_seconds_where_links_take_none(
    seed: int, count: int, pp: int, ahead: bool, stretch: float
) -> None:
    search, sizes = make_search(pp, instant_links=True), sizes_of(drawn(seed, count))
    _, default = default_of(search, sizes)
    times = slot_times(search.simulator, works_of(sizes, default.bins, default.slots, "vision"), 1)
    num_slots = len(default.slots)
    order, early = np.random.default_rng(seed).permutation(num_slots), np.zeros(num_slots, dtype=np.int64)
    room, held = (1e18 if ahead else NOTHING_EARLY), np.ones(num_slots)
    seconds = step_s(order, times.forward, times.backward, times.encode, times.moved, held, room, stretch, early)
    ordered = Arrangement(default.bins, default.slots[order])
    assert ahead or (early == IN_TIME).all()
    lists = early_schedule(search.simulator.partition, order, early.tolist(), times)
    validate(lists, training=True, num_microbatches=num_slots, partition=search.simulator.partition)
    assert seconds == pytest.approx(search.listed_s(sizes, ordered, lists), rel=1e-9)
    if not ahead:
        assert seconds == pytest.approx(search.seconds(sizes, ordered), rel=1e-9)


@few
@given(seed=seeds, count=st.integers(4, 24), room=st.floats(0, 5), stretch=st.floats(1, 3))
def test_outputs_that_wait_never_take_more_than_the_room(seed: int, count: int, room: float, stretch: float) -> None:
    rng = np.random.default_rng(seed)
    forward, backward = rng.random((2, 3, count)) + 0.1
    encode, held, early = rng.random(count) / 4, rng.random(count), np.zeros(count, dtype=np.int64)
    order = rng.permutation(count)
    step_s(order, forward, backward, encode, np.zeros(count), held, room, stretch, early)
    assert ((early == IN_TIME) | (early >= 0)).all()
    operations = [(False, 0), (False, 1)] + [each for k in range(count - 2) for each in ((False, k + 2), (True, k))]
    operations += [(True, count - 2), (True, count - 1)]
    held_now = 0.0
    for number, (is_backward, position) in enumerate(operations):
        held_now += held[order[early == number]].sum()
        assert held_now <= room + 1e-9
        if not is_backward and early[position] != IN_TIME:
            assert early[position] < number, "before its forward"
            held_now -= held[order[position]]
    assert held_now == pytest.approx(0.0, abs=1e-9)


@few
@given(seed=seeds, count=st.integers(4, 14), pp=st.integers(2, 4))
def test_orders_of_few_slots_are_near_the_best_of_all(seed: int, count: int, pp: int) -> None:
    search, sizes = make_search(pp, instant_links=True), sizes_of(drawn(seed, count))
    rules, default = default_of(search, sizes, "sequential")
    drafts = [draft for draft in search.drafts(sizes, rules, default) if len(draft.order) <= 8]
    for draft in map(search.improved, drafts):
        every = np.array(list(permutations(range(len(draft.order)))))
        assert draft.seconds <= 1.01 * best_of(every, *draft.facts)[1]


@given(latency=st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_clusters_hold_every_slot_once(latency: list[float]) -> None:
    clusters = clusters_of(np.array(latency))
    assert 1 <= len(clusters) <= MOST_CLUSTERS
    assert sorted(np.concatenate(clusters).tolist()) == list(range(len(latency)))
    slowest_first = [latency[slot] for cluster in clusters for slot in cluster]
    assert slowest_first == sorted(latency, reverse=True)
    orders = cluster_orders(np.array(latency))
    assert (np.sort(orders, axis=1) == np.arange(len(latency))).all()
    assert (orders[0] == np.arange(len(latency))).all()


@given(samples=st.integers(1, 2000), tokens=st.integers(1, 10**6), capacity=st.integers(64, 8192), dp=st.integers(1, 8))
def test_numbers_of_slots_hold_the_tokens(samples: int, tokens: int, capacity: int, dp: int) -> None:
    counts = slot_counts(samples, tokens, capacity, dp, 4)
    assert counts == sorted(set(counts)) and counts[0] * dp * capacity >= tokens
    assert (counts[0] - 1) * dp * capacity < tokens or counts[0] == 1


def parts(**on: bool) -> PipeTuneConfig:
    return PipeTuneConfig(**{"size": False, "order": False, "precompute": False, **on})


def test_each_part_can_be_switched() -> None:
    sizes = sizes_of(drawn(7, 40))
    seconds, slots, listed = {}, {}, {}
    names = {"none": {}, "size": {"size": True}, "order": {"order": True}, "precompute": {"precompute": True}}
    for name, on in {**names, "all": {"size": True, "order": True, "precompute": True}}.items():
        search = make_search(4, parts=parts(**on))
        rules, default = default_of(search, sizes)
        found = search(sizes, rules, default)
        seconds[name], slots[name] = search.seconds(sizes, found), len(found.slots)
        listed[name] = bool(found.schedules)
    assert all(seconds[name] <= seconds["none"] for name in seconds)
    assert seconds["all"] <= 1.001 * min(seconds.values())
    assert slots["size"] > slots["none"] == slots["order"], "four ranks want more microbatches than fit memory at least"
    assert not (listed["none"] or listed["size"] or listed["order"]) and listed["precompute"]


def test_less_memory_gives_smaller_microbatches_and_less_ahead() -> None:
    sizes = sizes_of(drawn(3, 60))
    search = make_search(2)
    rules, default = default_of(search, sizes, "balanced")
    works = works_of(sizes, default.bins, default.slots, "vision")
    least = search.room.limit_nbytes - search.room.first_left_nbytes(works, len(default.slots))
    tight = make_search(2, memory_nbytes=least - 1)
    assert not tight.room.fits(works, len(default.slots))
    found = tight(sizes, rules, default)
    largest = works_of(sizes, found.bins, found.slots, "vision").num_tokens.max()
    assert tight.room.fits(works_of(sizes, found.bins, found.slots, "vision"), len(found.slots))
    assert largest < works.num_tokens.max()


@pytest.mark.parametrize(("chunks", "has_encoder"), [(2, False), (1, False), (2, True)])
def test_pipelines_that_cannot_encode_ahead_are_still_arranged(chunks: int, has_encoder: bool) -> None:
    sizes = sizes_of(drawn(5, 40))
    search = make_search(2, 2, chunks=chunks, has_encoder=has_encoder)
    rules, default = default_of(search, sizes)
    found = search(sizes, rules, default)
    assert not found.schedules and members(found) == list(range(40))
    assert search.seconds(sizes, found) < search.seconds(sizes, default)


def test_images_are_encoded_while_the_first_rank_waits() -> None:
    sizes = sizes_of(make_samples([(256, 4)] * 12))
    search = make_search(4)
    rules, default = default_of(search, sizes, "balanced", 2600)
    found = search(sizes, rules, default)
    (first, *_) = parse_schedule(found.schedules[0])
    computed = [action for action in first if action.kind.is_compute]
    encodes = [index for index, action in enumerate(computed) if action.module is StageModule.ENCODER]
    assert any(computed[index + 1].module is StageModule.ENCODER for index in encodes), "one right after another"
