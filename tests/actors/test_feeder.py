"""The feeder against a scripted coordinator: what it reports, what it puts, and how it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowtrain.actors.feeder import NAME, Feeder
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.data.feed import Feed, sampler_from_config
from flowtrain.data.sizing import SizedResult
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import SourceReadError
from flowtrain.types.memory import Extent
from flowtrain.types.messages import FeedOrder, FeedReport, Joined, PartReady, RoomOrder
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import Rejection
from tests.actors.conftest import BATCH, OVERSIZED_ROW
from tests.actors.scripted import INDEX, ScriptedLink, new_run_id, reader_of

STOP = FeedOrder(None, (), (), stop=True)
NO_ROOM = RoomOrder((), stop=False)


def unit_of(step: int) -> Unit:
    return Unit(step - 1, UnitKind.TRAIN, step, (step - 1) * BATCH, BATCH)


def size(unit: Unit) -> FeedOrder:
    return FeedOrder(unit, (), (), stop=False)


def joined_at(config: RunConfig, position: int) -> Joined:
    sampler = sampler_from_config(config, [np.array([0, size]) for size in SourceSet.from_config(config.data).sizes])
    if position:
        sampler.take(position)
    return Joined(INDEX, sampler.state(), position // BATCH)


@pytest.fixture(scope="module")
def expected(config: RunConfig) -> list[SizedResult | Rejection]:
    """Results of sizing the first three units."""
    feed = Feed.from_config(config)
    return [result for step in (1, 2, 3) for result in feed.next_unit(unit_of(step))]


def texts_of(report: FeedReport) -> tuple[Extent, ...]:
    """Return the extents of a unit's texts, which the backbone has read."""
    return tuple(extent for part in report.texts for extent in part.extents)


@pytest.fixture
def narrow(config: RunConfig) -> RunConfig:
    """A segment with room for four texts."""
    return override_config(config, ["pool.text_segment_nbytes=65536", "pool.alignment=16384"])


class World:
    """One feeder's run; it also reads the feeder's segment during the run."""

    def __init__(self, config: RunConfig, position: int = 0) -> None:
        self.link = ScriptedLink(joined_at(config, position))
        run_id = new_run_id()
        self.feeder = Feeder(config, run_id)
        self.pool = reader_of(config, self.link, run_id)
        self.texts: dict[int, np.ndarray] = {}

    def read(self, part: PartReady) -> None:
        self.texts[part.position] = self.pool.get(part.extents).view(np.int32).reshape(2, -1).copy()

    def reading(self, order: FeedOrder) -> Any:
        """Read the parts that a report names, then answer it with ``order``."""

        def answer(owner: int, report: FeedReport) -> FeedOrder:
            assert owner == INDEX
            for part in (*report.texts, *report.remade):
                self.read(part)
            return order

        return answer

    def run(self) -> list[FeedReport]:
        self.feeder.run(self.link)
        return [args[1] for args in self.link.said["feed"]]


def test_units_are_sized_and_their_text_lies_in_the_pool(
    config: RunConfig, expected: list[SizedResult | Rejection]
) -> None:
    world = World(config)
    world.link.answers("feed", size(unit_of(1)), world.reading(size(unit_of(2))), world.reading(STOP))
    asked, first, second = world.run()
    assert world.link.said["join"] == [(NAME, "node-0")]
    assert asked.unit is None and first.unit == unit_of(1) and second.unit == unit_of(2)
    good = [result for result in expected[: 2 * BATCH] if isinstance(result, SizedResult)]
    assert [*first.sized, *second.sized] == [result.sample for result in good]
    assert [rejection.ref.row for rejection in second.rejections] == [OVERSIZED_ROW] and not first.rejections
    for result in good:
        assert np.array_equal(world.texts[result.sample.position], result.text)
    assert second.sampler_state == joined_at(config, 2 * BATCH).sampler_state
    assert first.stats is not None and second.stats is not None
    assert second.stats.used_nbytes > first.stats.used_nbytes > 0
    assert [span.name for span in first.spans] == ["size"]


def test_a_successor_goes_on_where_the_last_report_ended(
    config: RunConfig, expected: list[SizedResult | Rejection]
) -> None:
    world = World(config, position=BATCH)
    world.link.answers("feed", size(unit_of(2)), STOP)
    _, report = world.run()
    assert [sample.ref for sample in report.sized] == [
        result.sample.ref for result in expected[BATCH : 2 * BATCH] if isinstance(result, SizedResult)
    ]


def test_text_is_produced_again_as_it_was(config: RunConfig, expected: list[SizedResult | Rejection]) -> None:
    lost = [result for result in expected[:3] if isinstance(result, SizedResult)]
    refs = tuple(result.sample.ref for result in lost)
    world = World(config, position=2 * BATCH)
    with_unit, alone = FeedOrder(unit_of(3), refs, (), stop=False), FeedOrder(None, refs[:1], (), stop=False)
    world.link.answers("feed", with_unit, world.reading(alone), STOP)
    _, both, again = world.run()
    assert [part.position for part in both.remade] == [ref.position for ref in refs] and both.unit == unit_of(3)
    assert [part.position for part in again.remade] == [refs[0].position] and again.unit is None
    for result in lost:
        assert np.array_equal(world.texts[result.sample.position], result.text)


def test_released_memory_is_free_again(config: RunConfig) -> None:
    world = World(config)
    world.link.answers(
        "feed", size(unit_of(1)), lambda owner, report: FeedOrder(None, (), texts_of(report), stop=False), STOP
    )
    *_, last = world.run()
    assert last.stats is not None and last.stats.used_nbytes == 0


def test_a_full_segment_waits_for_the_backbone(narrow: RunConfig) -> None:
    world = World(narrow)
    world.link.answers("feed", size(unit_of(1)), size(unit_of(2)), STOP)
    world.link.answers(
        "wait_for_room", NO_ROOM, NO_ROOM, lambda owner: RoomOrder(texts_of(world.link.said["feed"][1][1]), False)
    )
    reports = world.run()
    assert [report.unit and report.unit.step for report in reports] == [None, 1, 2]
    assert len(world.link.said["wait_for_room"]) == 3


def test_a_stop_reaches_a_feeder_without_room(narrow: RunConfig) -> None:
    world = World(narrow)
    world.link.answers("feed", size(unit_of(1)), size(unit_of(2)))
    world.link.answers("wait_for_room", NO_ROOM, RoomOrder((), stop=True))
    assert [report.unit and report.unit.step for report in world.run()] == [None, 1]


def test_a_source_that_cannot_be_read_ends_the_feeder(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Feed, unit: Unit, consumed: frozenset[int]) -> None:
        raise SourceReadError("the disk is gone")

    monkeypatch.setattr(Feed, "next_unit", fail)
    world = World(config)
    world.link.answers("feed", size(unit_of(1)))
    with pytest.raises(SourceReadError, match="the disk is gone"):
        world.run()
