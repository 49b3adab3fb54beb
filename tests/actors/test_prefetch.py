"""The prefetch thread: order, contents, lost owners, errors that reach the training thread, and its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.actors import leading, prefetch
from flowtrain.actors.link import CoordinatorLink, Patience
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.actors.reading import Fetched, MicrobatchReader, share_nbytes, share_of
from flowtrain.actors.replica_channel import Alone, ReplicaChannel
from flowtrain.actors.spans import SpanLog
from flowtrain.config.flow import LimitsConfig
from flowtrain.emulation.thread_replica import ThreadChannel, ThreadReplica
from flowtrain.errors import AddressError, OwnerLostError, StallError
from flowtrain.training.batch import SampleText
from flowtrain.types.memory import Extent
from flowtrain.types.messages import LocateReply, MicrobatchLocation, PartLocation, PlanReply
from flowtrain.types.plan import StepPlan
from flowtrain.types.samples import TEXT_PART
from tests.actors.local import Background
from tests.flow.building import VISION, plan, sized

DIM = 4
REPLICA = 0
TEXT_NBYTES = 80
DISTANCE = 1 << 20
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "POLL_S", 0.01)
    monkeypatch.setattr(leading, "RETRY_S", 0.001)


class FakePool:
    """Bytes by address; an address may belong to a dead owner. read: parts and bytes of every read."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.lost: set[int] = set()
        self.read: list[tuple[int, int]] = []

    def put(self, array: np.ndarray) -> tuple[Extent, ...]:
        gva = (len(self.memory) + 1) * DISTANCE
        self.memory[gva] = array.reshape(-1).view(np.uint8)
        return (Extent(gva, array.nbytes),)

    def get_batch(self, parts: Sequence[Sequence[Extent]]) -> list[np.ndarray]:
        return [self._get(extent) for (extent,) in parts]

    def read_into(self, extents: Sequence[Extent], destination: np.ndarray) -> None:
        destination[:] = np.concatenate([np.empty(0, np.uint8), *map(self._get, extents)])

    def _get(self, extent: Extent) -> np.ndarray:
        offset = extent.gva % DISTANCE
        base = extent.gva - offset
        if base in self.lost:
            raise OwnerLostError("its owner is gone")
        if base not in self.memory:
            raise AddressError("freed")
        self.read.append((base, extent.nbytes))
        return self.memory[base][offset : offset + extent.nbytes]


@dataclass(frozen=True)
class Batch:
    """The samples of a microbatch as they were read; stands in for a packed one."""

    samples: tuple[SampleText, ...]
    features: torch.Tensor | None = None

    @property
    def feature_index(self) -> range:
        return range(sum(sample.num_rows for sample in self.samples))

    def with_features(self, features: torch.Tensor) -> Batch:
        return replace(self, features=features)

    def tensors(self) -> list[torch.Tensor]:
        return [] if self.features is None else [self.features]


def pack(samples: list[SampleText]) -> Any:
    return Batch(tuple(samples))


class FakeCoordinator(CoordinatorLink):
    """Units with two samples per microbatch, one with an image, one without. It answers like the real coordinator.

    ready: (unit, slot) that may run. ends_at: first unit that never comes. plans_early: the next unit's plan comes with
    the end of a unit.
    """

    def __init__(self, num_units: int = 1, num_slots: int = 3) -> None:
        self.pool = FakePool()
        self.plans: list[StepPlan] = []
        self.parts: dict[int, dict[str, tuple[Extent, ...]]] = {}
        per_unit = 2 * num_slots
        for unit in range(num_units):
            first = unit * per_unit
            samples = [sized(first + k, 0 if k % 2 else 16 * DIM, TEXT_NBYTES) for k in range(per_unit)]
            self.plans.append(plan(samples, index=unit, first=first, per_microbatch=2))
            for sample in samples:
                self.make(sample.position)
        self.ready = {(unit, slot) for unit in range(num_units) for slot in range(num_slots)}
        self.taken: set[tuple[int, int]] = set()
        self.rejected: set[int] = set()
        self.told: list[tuple[int, int]] = []
        self.released: list[tuple[int, int]] = []
        self.ends_at = num_units
        self.plans_early = False
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.changed = threading.Condition()

    def make(self, position: int) -> None:
        """Put a position's parts, also those that were lost."""
        parts = {TEXT_PART: self.pool.put(np.full((2, TEXT_NBYTES // 8), position, np.int32))}
        if position % 2 == 0:
            parts[VISION] = self.pool.put(np.full((4, DIM), position, np.float32))
        self.parts[position] = parts

    def make_ready(self, *slots: tuple[int, int]) -> None:
        with self.changed:
            self.ready.update(slots)
            self.changed.notify_all()

    @property
    def node_id(self) -> str:
        return "node"

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        method = question.__name__
        self.calls.append((method, *args))
        if self.error is not None:
            raise self.error
        return getattr(self, method)(*args)

    def next_plan(self, unit: int, dp_rank: int) -> PlanReply:
        assert dp_rank == REPLICA
        if unit >= self.ends_at:
            return PlanReply(None, is_past_end=True)
        if unit < len(self.plans):
            return PlanReply(self.plans[unit], is_past_end=False)
        time.sleep(0.005)
        return PlanReply(None, is_past_end=False)

    def locate(self, unit: int, slot: int | None, dp_rank: int, read: tuple[int, ...], limit: int) -> LocateReply:
        self.release(unit, read, dp_rank)
        if unit >= self.ends_at:
            return LocateReply((), is_past_end=True)
        with self.changed:
            free = sorted(s for u, s in (self.ready - self.taken if slot is None else self.ready) if u == unit)
            wanted = free[:limit] if slot is None else [s for s in range(slot, slot + limit) if s in free]
            if slot not in (None, *wanted[:1]) or not wanted:
                self.changed.wait(0.005)
                return LocateReply((), is_past_end=False)
            self.taken.update((unit, found) for found in wanted)
        self.told += [(unit, found) for found in wanted]
        return LocateReply(tuple(self.location(unit, found) for found in wanted), is_past_end=False)

    def release(self, unit: int, slots: tuple[int, ...], dp_rank: int, ends: bool = False) -> PlanReply:
        assert dp_rank == REPLICA and not set(self.released) & {(unit, slot) for slot in slots}
        self.released += [(unit, slot) for slot in slots]
        has_next = ends and self.plans_early and unit + 1 < len(self.plans)
        return PlanReply(self.plans[unit + 1] if has_next else None, is_past_end=False)

    def location(self, unit: int, slot: int) -> MicrobatchLocation:
        positions = [sample.position for sample in self.plans[unit].slots[slot][0].samples]
        parts = [
            PartLocation(position, name, extents)
            for position in positions
            if position not in self.rejected
            for name, extents in self.parts[position].items()
        ]
        return MicrobatchLocation(unit, slot, 0, tuple(parts), tuple(self.rejected & set(positions)))

    def describe_wait(self, unit: int, slot: int | None, dp_rank: int) -> str:
        return f"unit {unit}, slot {slot} waits for the moon"

    def num_located(self) -> int:
        return sum(call[0] == "locate" for call in self.calls)


def reader_of(
    link: FakeCoordinator,
    *,
    pack: Callable[[list[SampleText]], Any] = pack,
    staging: Any = None,
    has_pool: bool = True,
    **options: Any,
) -> MicrobatchReader:
    return MicrobatchReader(
        dp_rank=REPLICA,
        pool=link.pool if has_pool else None,  # type: ignore[arg-type]  # what it needs of one
        pack=pack,
        feature_dim=DIM,
        feature_dtype=torch.float32,
        spans=SpanLog("rank"),
        staging=staging,
        **options,
    )


def start(
    link: FakeCoordinator,
    reader: MicrobatchReader,
    channel: ReplicaChannel | None = None,
    *,
    arrival: bool = False,
    depth: int = 2,
    limits: LimitsConfig | None = None,
    whole_units: bool = False,
) -> Prefetcher:
    return Prefetcher(
        name="rank",
        link=link,
        channel=channel or Alone(),
        dp_rank=REPLICA,
        reader=reader,
        limits=limits or LimitsConfig(),
        depth=depth,
        arrival=arrival,
        first_unit=0,
        whole_units=whole_units,
    )


@contextmanager
def prefetcher(
    link: FakeCoordinator,
    *,
    pack: Callable[[list[SampleText]], Any] = pack,
    staging: Any = None,
    **options: Any,
) -> Iterator[Prefetcher]:
    """Return a prefetcher whose batches are the samples as they were read."""
    started = start(link, reader_of(link, pack=pack, staging=staging), **options)
    try:
        yield started
    finally:
        started.close()
        assert not started._thread.is_alive(), "the thread did not end"


@contextmanager
def replica(link: FakeCoordinator, tp: int, pp: int = 1, **options: Any) -> Iterator[list[Prefetcher]]:
    """Return the prefetchers of all ranks of a replica."""
    meeting, stage = ThreadReplica(tp * pp, LIMIT_S), ThreadReplica(tp, LIMIT_S)
    ranks = []
    for rank in range(tp * pp):
        exchange = partial(stage.complete, rank)
        reader = reader_of(link, has_pool=rank < tp, tp_rank=rank % tp, tp_size=tp, exchange=exchange)
        ranks.append(start(link, reader, ThreadChannel(rank, meeting), **options))
    try:
        yield ranks
    finally:
        closing = [Background(rank.close) for rank in ranks]
        for each in closing:
            each.join()
        assert not any(rank._thread.is_alive() for rank in ranks), "a thread did not end"


def all_take(ranks: list[Prefetcher]) -> list[Fetched]:
    """Let the training threads of all ranks take a microbatch."""
    taking = [Background(rank.next_microbatch) for rank in ranks]
    return [each.join() for each in taking]


def positions_of(fetched: Any) -> list[int]:
    return [sample.position for sample in fetched.batch.samples]


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_units_come_in_order_with_what_the_pool_holds() -> None:
    link = FakeCoordinator(num_units=2)
    with prefetcher(link) as fetching:
        for unit in range(2):
            assert fetching.next_plan() is link.plans[unit]
            for slot in range(3):
                fetched = fetching.next_microbatch()
                first = unit * 6 + slot * 2
                assert fetched.slot == slot and positions_of(fetched) == [first, first + 1]
                with_image, text_only = fetched.batch.samples  # type: ignore[attr-defined]  # as they were read
                assert with_image.text.shape == (2, TEXT_NBYTES // 8) and (with_image.text == first).all()
                assert (with_image.num_rows, text_only.num_rows) == (4, 0)
                assert torch.equal(fetched.batch.features, torch.full((4, DIM), float(first)))


class Staging:
    """Notes what is staged, by which thread, and which thread gets it."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.is_aside = False
        self.staged: list[Extent] = []
        self.handed_over: list[tuple[Any, Any, int]] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.is_aside = True
        yield
        self.is_aside = False

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def read_into(self, extents: Sequence[Extent], memory: torch.Tensor) -> None:
        self.staged += extents
        self.pool.read_into(extents, memory.numpy())

    def mark(self) -> str:
        return f"after {len(self.staged)} parts"

    def hand_over(self, tensors: Any, ready: Any) -> None:
        self.handed_over.append((tensors, ready, threading.get_ident()))


def test_features_are_staged_aside_and_handed_to_the_training_thread() -> None:
    link = FakeCoordinator(num_slots=1)
    staging = Staging(link.pool)

    def pack_aside(samples: list[SampleText]) -> Any:
        assert staging.is_aside, "copies run beside the training"
        return pack(samples)

    with prefetcher(link, pack=pack_aside, staging=staging) as fetching:
        fetching.next_plan()
        batch = fetching.next_microbatch().batch
    assert torch.equal(batch.features, torch.zeros(4, DIM))
    assert staging.staged == [*link.parts[0][VISION]], "text is packed on the host"
    ((tensors, ready, thread),) = staging.handed_over
    assert tensors[0] is batch.features and (ready, thread) == ("after 1 parts", threading.get_ident())


def test_the_plans_order_waits_for_its_next_microbatch() -> None:
    link = FakeCoordinator()
    link.ready = {(0, 1), (0, 2)}
    with prefetcher(link) as fetching:
        fetching.next_plan()
        wait_for(lambda: link.num_located() > 3)
        assert all(call[2] == 0 for call in link.calls if call[0] == "locate")
        link.make_ready((0, 0))
        assert [fetching.next_microbatch().slot for _ in range(3)] == [0, 1, 2]


def test_arrival_order_takes_what_is_ready() -> None:
    link = FakeCoordinator()
    link.ready = {(0, 2)}
    with prefetcher(link, arrival=True) as fetching:
        fetching.next_plan()
        assert fetching.next_microbatch().slot == 2
        link.make_ready((0, 1))
        assert fetching.next_microbatch().slot == 1
        link.make_ready((0, 0))
        assert fetching.next_microbatch().slot == 0


def test_rejected_samples_are_left_out() -> None:
    link = FakeCoordinator(num_slots=2)
    link.rejected = {0, 2, 3}
    with prefetcher(link) as fetching:
        fetching.next_plan()
        assert positions_of(fetching.next_microbatch()) == [1]
        assert positions_of(fetching.next_microbatch()) == []


@pytest.mark.parametrize("arrival", [False, True])
def test_a_part_whose_owner_died_is_asked_for_again(arrival: bool) -> None:
    link = FakeCoordinator()
    lost = link.parts[0][VISION]
    link.pool.lost.add(lost[0].gva)
    with prefetcher(link, arrival=arrival) as fetching:
        fetching.next_plan()
        wait_for(lambda: link.num_located() > 3)
        if arrival:
            asked = [call[2] for call in link.calls if call[0] == "locate"]
            assert asked[0] is None and set(asked[1:]) == {0}, "the microbatch that was taken stays taken"
        link.make(0)
        fetched = fetching.next_microbatch()
        assert positions_of(fetched) == [0, 1]
        assert sorted([fetching.next_microbatch().slot, fetching.next_microbatch().slot]) == [1, 2]


def test_what_lies_elsewhere_is_read_before_a_lost_part_is_asked_for_again() -> None:
    link = FakeCoordinator(num_slots=4)
    link.pool.lost.add(link.parts[2][VISION][0].gva)
    with prefetcher(link, depth=2) as fetching:
        fetching.next_plan()
        wait_for(lambda: link.num_located() > 3)
        asked = [call[2] for call in link.calls if call[0] == "locate"]
        assert asked[0] == 0 and set(asked[1:]) == {1}
        assert sorted(link.released) == [(0, 0), (0, 2)]
        link.make(2)
        assert [positions_of(fetching.next_microbatch()) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("arrival", [False, True])
def test_microbatches_before_a_lost_part_are_delivered_and_those_after_it_wait(arrival: bool) -> None:
    link = FakeCoordinator(num_slots=5)
    link.pool.lost.update(link.parts[position][VISION][0].gva for position in (2, 6))
    limits = LimitsConfig(stall_timeout_s=LIMIT_S)
    with prefetcher(link, depth=3, arrival=arrival, limits=limits) as fetching:
        fetching.next_plan()
        assert fetching.next_microbatch().slot == 0
        wait_for(lambda: len(link.released) == 2)
        assert link.released == [(0, 0), (0, 2)], "also what is kept needs the pool no more"
        link.make(2)
        assert [fetching.next_microbatch().slot for _ in range(2)] == [1, 2]
        link.make(6)
        assert [positions_of(fetching.next_microbatch()) for _ in range(2)] == [[6, 7], [8, 9]]
    assert len(link.released) == 5


def test_a_microbatch_that_is_read_does_not_wait_for_those_located_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeCoordinator()
    gate, get_batch = threading.Event(), link.pool.get_batch
    slow = link.parts[2][TEXT_PART]

    def get_slowly(parts: Sequence[Sequence[Extent]]) -> list[np.ndarray]:
        assert slow not in parts or gate.wait(LIMIT_S)
        return get_batch(parts)

    monkeypatch.setattr(link.pool, "get_batch", get_slowly)
    with prefetcher(link, depth=3, limits=LimitsConfig(stall_timeout_s=LIMIT_S / 2)) as fetching:
        fetching.next_plan()
        assert fetching.next_microbatch().slot == 0
        assert link.num_located() == 1
        gate.set()
        assert [fetching.next_microbatch().slot for _ in range(2)] == [1, 2]


def test_no_more_is_fetched_ahead_than_asked_for() -> None:
    link = FakeCoordinator(num_slots=8)
    built = []
    with prefetcher(link, depth=2, pack=lambda samples: built.append(samples) or pack(samples)) as fetching:
        fetching.next_plan()
        wait_for(lambda: len(built) == 3)  # one more than wait while it is read
        time.sleep(0.05)
        assert len(built) == 3
        fetching.next_microbatch()
        wait_for(lambda: len(built) == 4)


@pytest.mark.parametrize("arrival", [False, True])
def test_a_whole_unit_is_delivered_once_all_of_it_is_read(arrival: bool) -> None:
    link = FakeCoordinator(num_units=2, num_slots=4)
    link.pool.lost.add(link.parts[2][VISION][0].gva)
    link.ready.remove((0, 3))
    with prefetcher(link, depth=1, arrival=arrival, whole_units=True) as fetching:
        fetching.next_plan()
        wait_for(lambda: link.num_located() > 5)
        assert fetching._microbatches.empty()
        link.make(2)
        wait_for(lambda: len(link.released) == 3)
        assert fetching._microbatches.empty()
        link.make_ready((0, 3))
        assert sorted(fetching.next_microbatch().slot for _ in range(4)) == [0, 1, 2, 3]
        fetching.next_plan()
        assert [fetching.next_microbatch().slot for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("arrival", [False, True])
def test_what_was_read_is_released_before_anything_is_waited_for(arrival: bool) -> None:
    """Otherwise memory of later units would wait in the pool for another rank, whose earlier unit may need it."""
    link = FakeCoordinator(num_units=3, num_slots=2)
    link.ends_at = 9
    with prefetcher(link, depth=3, arrival=arrival) as fetching:
        wait_for(lambda: len(link.released) == 4)  # one more than wait while it is read
        assert sorted(link.told) == sorted(link.released)
        for unit in range(3):
            assert fetching.next_plan() is link.plans[unit]
            for _ in range(2):
                fetching.next_microbatch()
        assert sorted(link.released) == [(unit, slot) for unit in range(3) for slot in range(2)]


def test_a_unit_is_released_before_its_last_microbatch_is_handed_over() -> None:
    link = FakeCoordinator(num_units=2, num_slots=4)
    with prefetcher(link, depth=8) as fetching:
        for unit in range(2):
            fetching.next_plan()
            for _ in range(4):
                fetching.next_microbatch()
            assert {(unit, slot) for slot in range(4)} <= set(link.released)
        assert link.num_located() == 2, "all that are ready and have room come with one answer"
        assert [call for call in link.calls if call[0] == "release"] == [
            ("release", unit, (0, 1, 2, 3), REPLICA, True) for unit in range(2)
        ]


@pytest.mark.parametrize("arrival", [False, True])
def test_microbatches_are_asked_for_in_batches(arrival: bool) -> None:
    link = FakeCoordinator(num_slots=9)
    with prefetcher(link, depth=3, arrival=arrival) as fetching:
        fetching.next_plan()
        for num_located, num_told in ((1, 4), (2, 6), (3, 8), (4, 9)):
            wait_for(lambda: len(link.released) == num_told)  # noqa: B023
            assert (link.num_located(), len(link.told)) == (num_located, num_told)
            fetching.next_microbatch()
            if num_told < 8:
                assert link.num_located() == num_located, "there is room for one; two are asked for at once"
                fetching.next_microbatch()


def test_the_next_plan_comes_with_the_end_of_a_unit() -> None:
    link = FakeCoordinator(num_units=3)
    link.plans_early = True
    with prefetcher(link, depth=2) as fetching:
        for unit in range(3):
            assert fetching.next_plan() is link.plans[unit]
            assert [fetching.next_microbatch().slot for _ in range(3)] == [0, 1, 2]
        wait_for(lambda: not fetching._thread.is_alive())
    assert [call[1] for call in link.calls if call[0] == "next_plan"] == [0, 3]


def test_an_error_surfaces_wherever_the_training_thread_waits() -> None:
    link = FakeCoordinator()
    link.error = ValueError("bad answer")
    with prefetcher(link) as fetching:
        with pytest.raises(ValueError, match="bad answer"):
            fetching.next_plan()
        with pytest.raises(ValueError, match="bad answer"):
            fetching.next_microbatch()


def test_an_error_comes_after_what_was_fetched_before_it() -> None:
    link = FakeCoordinator()
    del link.pool.memory[link.parts[2][TEXT_PART][0].gva]
    with prefetcher(link, depth=1) as fetching:
        fetching.next_plan()
        assert fetching.next_microbatch().slot == 0
        with pytest.raises(AddressError):
            fetching.next_microbatch()


def test_a_wait_that_is_too_long_names_what_it_waits_for() -> None:
    link = FakeCoordinator()
    link.ready.clear()
    limits = LimitsConfig(stall_warning_s=0.01, stall_timeout_s=0.05)
    with prefetcher(link, limits=limits) as fetching:
        wait_for(lambda: not fetching._plans.empty())
        fetching.next_plan()
        with pytest.raises(StallError, match=r"rank waited .* unit 0, slot 0 waits for the moon"):
            fetching.next_microbatch()


def test_only_the_leader_warns_and_later_while_producers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[float, bool]] = []

    class Noted(Patience):
        def __init__(self, who: str, limits: LimitsConfig, describe: Callable[[], str], warns: bool = True) -> None:
            waits.append((limits.stall_warning_s, warns))
            super().__init__(who, limits, describe, warns)

    monkeypatch.setattr(prefetch, "Patience", Noted)
    link = FakeCoordinator(num_slots=2)
    with replica(link, tp=2, limits=LimitsConfig(stall_warning_s=60.0, start_timeout_s=400.0)) as (leader, other):
        for rank in (leader, other):
            rank.next_plan()
        for _ in range(2):
            all_take([leader, other])
    assert sorted(waits) == [(60.0, False), (60.0, True), *[(400.0, False)] * 2, *[(400.0, True)] * 2]


@pytest.mark.parametrize("part", [TEXT_PART, VISION])
def test_what_mends_itself_is_no_warning(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """The driver says that an owner died; until its parts are produced again, each attempt to read them fails."""
    link = FakeCoordinator(num_slots=2)
    link.pool.lost.add(link.parts[2][part][0].gva)
    with prefetcher(link, depth=2) as fetching:
        fetching.next_plan()
        wait_for(lambda: link.num_located() > 5)
        link.make(2)
        assert [fetching.next_microbatch().slot for _ in range(2)] == [0, 1]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_being_far_ahead_is_no_stall() -> None:
    link = FakeCoordinator(num_units=1)
    link.ends_at = 5
    limits = LimitsConfig(stall_warning_s=0.01, stall_timeout_s=0.02)
    with prefetcher(link, depth=8, limits=limits) as fetching:
        wait_for(lambda: sum(call == ("next_plan", 1, REPLICA) for call in link.calls) > 10)
        time.sleep(0.05)
        fetching.next_plan()
        assert [fetching.next_microbatch().slot for _ in range(3)] == [0, 1, 2]


def test_the_end_of_the_run_ends_the_thread() -> None:
    link = FakeCoordinator(num_units=2)
    with prefetcher(link, depth=8) as fetching:
        wait_for(lambda: not fetching._thread.is_alive())
        assert link.calls[-1] == ("next_plan", 2, REPLICA)


def test_a_stop_ends_the_wait_for_a_microbatch_that_never_comes() -> None:
    link = FakeCoordinator()
    link.ready.clear()
    with prefetcher(link) as fetching:
        fetching.next_plan()
        wait_for(lambda: link.num_located() > 0)
        link.ends_at = 0
        wait_for(lambda: not fetching._thread.is_alive())


@pytest.mark.parametrize("state", ["waits for a plan", "waits for a part", "has no room", "failed", "owner lost"])
def test_close_ends_the_thread_in_every_state(state: str) -> None:
    link = FakeCoordinator(num_units=0 if state == "waits for a plan" else 1)
    link.ends_at = 9
    if state == "waits for a part":
        link.ready.clear()
    elif state == "failed":
        link.pool.memory.clear()
    elif state == "owner lost":
        link.pool.lost.update(link.pool.memory)
    with prefetcher(link, depth=1) as fetching:
        wait_for(lambda: len(link.calls) > 2 or state == "failed")
        fetching.close()
        fetching.close()


# --- replicas of several ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("arrival", [False, True])
def test_a_replica_reads_features_once_and_texts_once(tp: int, pp: int, arrival: bool) -> None:
    link, counted = FakeCoordinator(num_units=2), 0
    with replica(link, tp, pp, depth=2, arrival=arrival) as ranks:
        for unit in range(2):
            assert all(rank.next_plan() == link.plans[unit] for rank in ranks)
            for slot in range(3):
                first = unit * 6 + slot * 2
                for rank, fetched in enumerate(all_take(ranks)):
                    counted += fetched.read_nbytes
                    assert (fetched.slot, positions_of(fetched)) == (slot, [first, first + 1])
                    texts = [int(sample.text[0, 0]) for sample in fetched.batch.samples]  # type: ignore[attr-defined]
                    assert texts == [first, first + 1]
                    if rank < tp:
                        assert torch.equal(fetched.batch.features, torch.full((4, DIM), float(first)))
                    else:
                        assert fetched.batch.features is None
    read_nbytes = {gva: sum(nbytes for base, nbytes in link.pool.read if base == gva) for gva, _ in link.pool.read}
    assert read_nbytes == {gva: array.nbytes for gva, array in link.pool.memory.items()}, "each byte once"
    assert counted == sum(nbytes for base, nbytes in link.pool.read if nbytes != TEXT_NBYTES)
    assert sorted(link.released) == [(unit, slot) for unit in range(2) for slot in range(3)]


@given(st.lists(st.integers(1, 500), max_size=8), st.integers(1, 5))
def test_shares_cover_the_bytes_once_in_order(sizes: list[int], count: int) -> None:
    extents = [Extent(1000 * number, nbytes) for number, nbytes in enumerate(sizes)]
    addresses = [extent.gva + offset for extent in extents for offset in range(extent.nbytes)]
    found = []
    for index in range(count):
        mine, place = share_of(extents, index, count)
        share = [extent.gva + offset for extent in mine for offset in range(extent.nbytes)]
        assert share == addresses[place]
        length = share_nbytes(len(addresses), count)
        assert place.start == min(index * length, len(addresses)) and len(share) <= length
        found += share
    assert found == addresses


def test_what_one_rank_could_not_read_all_read_again() -> None:
    link = FakeCoordinator(num_slots=2)
    link.pool.lost.add(link.parts[0][VISION][0].gva)
    with replica(link, tp=2, depth=4) as ranks:
        wait_for(lambda: link.num_located() > 3)
        assert link.released == [(0, 1)]
        link.make(0)
        for rank in ranks:
            rank.next_plan()
        for slot in range(2):
            assert [fetched.slot for fetched in all_take(ranks)] == [slot, slot]


@pytest.mark.parametrize("what", ["features", "text"])
def test_an_error_of_any_rank_is_raised_on_all(what: str) -> None:
    link = FakeCoordinator(num_slots=1)
    link.pool.memory.pop(link.parts[0][VISION if what == "features" else TEXT_PART][0].gva)
    with replica(link, tp=2, pp=2) as ranks:
        for rank in ranks:
            rank.next_plan()
            with pytest.raises(AddressError, match="freed"):
                rank.next_microbatch()


def test_an_error_of_the_coordinator_is_raised_on_all() -> None:
    link = FakeCoordinator()
    link.error = ValueError("bad answer")
    with replica(link, tp=2) as ranks:
        for rank in ranks:
            with pytest.raises(ValueError, match="bad answer"):
                rank.next_plan()


@pytest.mark.parametrize("state", ["waits for a plan", "waits for a part", "has no room", "owner lost"])
def test_the_end_of_the_leader_ends_all_threads(state: str) -> None:
    link = FakeCoordinator(num_units=0 if state == "waits for a plan" else 1)
    link.ends_at = 9
    if state == "waits for a part":
        link.ready.clear()
    elif state == "owner lost":
        link.pool.lost.update(link.pool.memory)
    with replica(link, tp=2, depth=1):
        wait_for(lambda: len(link.calls) > 2)


def test_only_the_leaders_queue_limits_what_is_read_ahead() -> None:
    link = FakeCoordinator(num_slots=8)
    with replica(link, tp=1, pp=2, depth=2) as ranks:
        leader, other = ranks
        leader.next_plan()
        other.next_plan()
        wait_for(lambda: len(link.released) == 3)
        assert [leader.next_microbatch().slot for _ in range(8)] == list(range(8))
        assert [other.next_microbatch().slot for _ in range(8)] == list(range(8))


def test_a_rank_that_failed_leaves_at_the_next_message() -> None:
    link = FakeCoordinator()
    link.ready.clear()
    meeting = ThreadReplica(2, LIMIT_S)
    leader, other = (
        start(link, reader_of(link, has_pool=rank == 0), ThreadChannel(rank, meeting)) for rank in range(2)
    )
    other.close(failed=True)
    assert not other._thread.is_alive()
    meeting.abort()  # its process ends
    leader.close(failed=True)
    assert not leader._thread.is_alive()


def test_the_leader_says_what_its_replica_waits_for() -> None:
    link = FakeCoordinator()
    link.ready.clear()
    limits = LimitsConfig(stall_warning_s=0.01, stall_timeout_s=0.05)
    with replica(link, tp=2, limits=limits) as ranks:
        leader, other = ranks
        waiting = Background(other.next_microbatch)
        wait_for(lambda: not leader._plans.empty())
        leader.next_plan()
        with pytest.raises(StallError, match=r"rank waited .* unit 0, slot 0 waits for the moon"):
            leader.next_microbatch()
        assert waiting.is_running, "its limit is a later one"
        link.make_ready(*[(0, slot) for slot in range(3)])
        wait_for(lambda: not leader._microbatches.empty())
        assert Background(leader.next_microbatch).join().slot == waiting.join().slot == 0
    assert all(call[0] != "describe_wait" or call[1:] == (0, 0, REPLICA) for call in link.calls)
