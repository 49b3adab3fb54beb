"""The feeder against a scripted coordinator: what it reports, what it puts, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.actors.feeder import Feeder, feeder_name
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.data.feed import Feed, NoShelf, Share, sampler_from_config
from flowtrain.data.sources.base import Buffer
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import SourceReadError
from flowtrain.types.memory import Extent
from flowtrain.types.messages import FeedOrder, FeedReport, Joined, Remake, RoomOrder
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import IMAGES_PART, TEXT_PART
from tests.actors.conftest import BATCH, NUM_STEPS, OVERSIZED_ROW
from tests.actors.scripted import INDEX, ScriptedLink, new_run_id, reader_of
from tests.e2e.worlds import World as Rows

STOP = FeedOrder(None, (), (), stop=True)
NO_ROOM = RoomOrder((), stop=False)


def unit_of(step: int) -> Unit:
    return Unit(step - 1, UnitKind.TRAIN, step, (step - 1) * BATCH, BATCH)


def size(unit: Unit) -> FeedOrder:
    return FeedOrder(unit, (), (), stop=False)


def joined_at(config: RunConfig, position: int) -> Joined:
    sampler = sampler_from_config(config, SourceSet.from_config(config.data).tables)
    if position:
        sampler.take(position)
    return Joined(INDEX, sampler.state())


class Kept(NoShelf):
    """Keeps what is put, by a number that stands for its extent."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = []

    def put(self, pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
        data = b"".join(bytes(np.frombuffer(piece, np.uint8)) for piece in pieces)
        self.bytes.append(data)
        return (Extent(len(self.bytes) - 1, len(data)),)


class Expected:
    """What a feed makes of the first three units."""

    def __init__(self, config: RunConfig) -> None:
        kept = Kept()
        feed = Feed.from_config(config, shelf=kept)
        self.shares: list[Share] = [feed.next_unit(unit_of(step)) for step in (1, 2, 3)]
        feed.close()
        self.parts = {
            (part.position, part.part): kept.bytes[part.extents[0].gva]
            for share in self.shares
            for part in (*share.texts, *share.images)
        }


@pytest.fixture(scope="module")
def expected(config: RunConfig) -> Expected:
    return Expected(config)


def extents_of(report: FeedReport) -> tuple[Extent, ...]:
    """Return the extents of a unit's parts, which were read."""
    return tuple(extent for part in (*report.texts, *report.images) for extent in part.extents)


ALIGNMENT = 1 << 20
"""Every part takes this much."""


class World:
    """One feeder's run; it also reads the feeder's segment during the run."""

    def __init__(self, config: RunConfig, position: int = 0, segment_nbytes: int = 1 << 24) -> None:
        self.link = ScriptedLink(joined_at(config, position))
        run_id = new_run_id()
        self.feeder = Feeder(config, run_id, SourceSet.index(config.data), segment_nbytes=segment_nbytes)
        self.pool = reader_of(config, self.link, run_id)
        self.parts: dict[tuple[int, str], bytes] = {}

    def reading(self, order: FeedOrder) -> Any:
        """Read the parts that a report names, then answer it with ``order``."""

        def answer(owner: int, report: FeedReport) -> FeedOrder:
            assert owner == INDEX
            for part in (*report.texts, *report.images, *report.remade):
                self.parts[part.position, part.part] = self.pool.get(part.extents).tobytes()
            return order

        return answer

    def run(self) -> list[FeedReport]:
        self.feeder.run(self.link)
        return [args[1] for args in self.link.said["feed"]]


def test_units_are_sized_and_their_parts_lie_in_the_pool(config: RunConfig, expected: Expected) -> None:
    world = World(config)
    world.link.answers("feed", size(unit_of(1)), world.reading(size(unit_of(2))), world.reading(STOP))
    asked, first, second = world.run()
    assert world.link.said["join"] == [(feeder_name(0), "node-0", 0)]
    assert asked.unit is None and first.unit == unit_of(1) and second.unit == unit_of(2)
    assert [*first.sized, *second.sized] == [*expected.shares[0].sized, *expected.shares[1].sized]
    assert [rejection.ref.row for rejection in second.rejections] == [OVERSIZED_ROW] and not first.rejections
    wanted = {key: data for key, data in expected.parts.items() if key[0] < 2 * BATCH}
    assert world.parts == wanted and {part for _, part in wanted} == {TEXT_PART, IMAGES_PART}
    for sample in first.sized:
        images = world.parts.get((sample.position, IMAGES_PART), b"")
        assert len(images) == sum(sample.image_nbytes)
    assert second.sampler_state == joined_at(config, 2 * BATCH).sampler_state
    assert first.stats is not None and second.stats is not None
    assert second.stats.used_nbytes > first.stats.used_nbytes > 0
    assert [span.name for span in first.spans] == ["size"]


def test_a_successor_goes_on_where_the_last_report_ended(config: RunConfig, expected: Expected) -> None:
    world = World(config, position=BATCH)
    world.link.answers("feed", size(unit_of(2)), STOP)
    _, report = world.run()
    assert list(report.sized) == expected.shares[1].sized


def test_lost_parts_are_produced_again_as_they_were(config: RunConfig, expected: Expected) -> None:
    lost = [sample for sample in expected.shares[0].sized if sample.image_nbytes]
    both_parts = tuple(Remake(sample.ref, (IMAGES_PART, TEXT_PART)) for sample in lost)
    text = (Remake(lost[0].ref, (TEXT_PART,)),)
    world = World(config, position=2 * BATCH)
    first, second = FeedOrder(None, both_parts, (), stop=False), FeedOrder(None, text, (), stop=False)
    world.link.answers("feed", first, world.reading(second), STOP)
    _, both, again = world.run()
    assert [(part.position, part.part) for part in both.remade] == [
        (sample.position, name) for sample in lost for name in (IMAGES_PART, TEXT_PART)
    ]
    assert both.unit is None
    assert [(part.position, part.part) for part in again.remade] == [(lost[0].position, TEXT_PART)]
    assert again.unit is None
    for part in both.remade:
        assert world.parts[part.position, part.part] == expected.parts[part.position, part.part]


def test_released_memory_is_free_again(config: RunConfig) -> None:
    world = World(config)
    answers = [
        lambda owner, report, step=step: FeedOrder(
            unit_of(step) if step <= NUM_STEPS else None, (), extents_of(report), False
        )
        for step in range(1, NUM_STEPS + 2)
    ]
    world.link.answers("feed", *answers, STOP)
    *_, last = world.run()
    assert last.stats is not None and last.stats.used_nbytes == 0


def test_memory_that_rows_share_is_free_after_the_last(tmp_path: Path, config: RunConfig) -> None:
    world = Rows()
    image = world.image()
    for _ in range(BATCH):
        world.add(1, images=[image])
    source = world.write(tmp_path / "alike.parquet")
    alike = override_config(config, [f"data.sources=[{{path: '{source}'}}]"])
    run = World(alike)
    half: list[int] = []

    def release_text_and_most_images(owner: int, report: FeedReport) -> FeedOrder:
        assert len({part.extents for part in report.images}) == 1 < len(report.images) == BATCH
        parts = (*report.texts, *report.images[1:])
        return FeedOrder(None, (), tuple(extent for part in parts for extent in part.extents), stop=False)

    def release_the_last(owner: int, report: FeedReport) -> FeedOrder:
        assert report.stats is not None
        half.append(report.stats.used_nbytes)
        return FeedOrder(None, (), run.link.said["feed"][1][1].images[0].extents, stop=False)

    run.link.answers("feed", size(unit_of(1)), release_text_and_most_images, release_the_last, STOP)
    *_, last = run.run()
    assert last.stats is not None and half[0] >= len(image) and last.stats.used_nbytes == 0


def narrow(config: RunConfig, expected: Expected) -> tuple[RunConfig, int]:
    """A segment for the images of the one block, and the texts of a step."""
    sources = SourceSet.from_config(config.data)
    held = sum(bool(record.sample().images) for record in sources.read_block(0, 0))
    return override_config(config, [f"pool.alignment={ALIGNMENT}"]), (held + BATCH) * ALIGNMENT


def test_a_full_segment_waits_for_the_backbone(
    config: RunConfig, expected: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    config, segment_nbytes = narrow(config, expected)
    config = override_config(config, ["limits.stall_warning_s=0.000000001"])
    world = World(config, segment_nbytes=segment_nbytes)
    freed: list[Extent] = []

    def free_one(owner: int) -> RoomOrder:
        room = [extent for extent in extents_of(world.link.said["feed"][1][1]) if extent not in freed][:1]
        freed.extend(room)
        return RoomOrder(tuple(room), stop=False)

    world.link.answers("feed", size(unit_of(1)), size(unit_of(2)), STOP)
    world.link.answers("wait_for_room", NO_ROOM, *[free_one] * BATCH)
    reports = world.run()
    assert [report.unit and report.unit.step for report in reports] == [None, 1, 2]
    assert len(world.link.said["wait_for_room"]) > 1
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [], "the backbone is the bottleneck: the run is healthy"


def test_a_stop_reaches_a_feeder_without_room(config: RunConfig, expected: Expected) -> None:
    config, segment_nbytes = narrow(config, expected)
    world = World(config, segment_nbytes=segment_nbytes)
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
