"""Positions on their way through the flow: the messages of feeder, encoders, rank and driver, without the work.

Samples are like InternVL's: an image of 448 x 448 pixels, 1024 patches, which become 256 vision tokens, and a text of
varying length. So each position has three parts: text, encoded image, features. Messages are those of the real actors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from flowtrain.actors.link import CoordinatorLink
from flowtrain.flow.api import CoordinatorApi
from flowtrain.types.memory import Extent, PoolStats, SegmentExport, Tier
from flowtrain.types.messages import EncoderReport, FeedReport, Lease, PartReady, RankReport
from flowtrain.types.plan import Unit
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, PartSize, SampleRef, SamplerState, SizedSample

VISION = "vision"
NUM_PATCHES, VISION_TOKENS = 1024, 256
FEATURE_NBYTES = VISION_TOKENS * 4096 * 2
TEXT_ROOM = 1 << 14
"""An image lies so many bytes after the text of its position."""
ALIGNMENT = 256
SEGMENT_NBYTES = 1 << 36
NETWORK_NBYTES = 431
"""What the export of a segment over NIXL takes, by _startup_nixl.py."""
STATS = PoolStats(SEGMENT_NBYTES, 0, SEGMENT_NBYTES, SEGMENT_NBYTES, 0)


def sample_of(position: int) -> SizedSample:
    """The sample at a position."""
    text_tokens = 24 + position * 7919 % 160
    tokens = VISION_TOKENS + text_tokens
    parts = (
        PartSize(TEXT_PART, 1, 0, tokens, 8 * tokens),
        PartSize(VISION, 1, NUM_PATCHES, VISION_TOKENS, FEATURE_NBYTES),
    )
    images = (60_000 + position * 104_729 % 80_000,)
    return SizedSample(SampleRef(position, 0, position, 0), tokens, VISION_TOKENS, text_tokens // 2, parts, images)


def extent_of(base: int, position: int, nbytes: int) -> tuple[Extent, ...]:
    """A place in a segment that starts at ``base``; nothing checks whether places overlap."""
    return (Extent(base + position % 30_000 * (2 << 20), nbytes),)


def feed_report(unit: Unit, samples: list[SizedSample], base: int) -> FeedReport:
    """The feeder's report of a unit."""
    texts = tuple(
        PartReady(sample.position, TEXT_PART, 0, extent_of(base, sample.position, sample.parts[0].nbytes))
        for sample in samples
    )
    images = tuple(
        PartReady(sample.position, IMAGES_PART, 0, extent_of(base + TEXT_ROOM, sample.position, sample.image_nbytes[0]))
        for sample in samples
    )
    state = SamplerState(unit.first_position + unit.num_positions)
    return FeedReport(unit, tuple(samples), texts, images, sampler_state=state, stats=STATS)


def ready_of(lease: Lease, base: int) -> tuple[PartReady, ...]:
    """An encoder's report of a lease."""
    return tuple(
        PartReady(position, VISION, lease.epoch, extent_of(base, position, FEATURE_NBYTES)) for position in lease.needed
    )


def publish(link: CoordinatorLink, index: int) -> None:
    """Publish a segment, as a process that offers it over the network."""
    network = bytes(NETWORK_NBYTES)
    export = SegmentExport(index, link.node_id, Tier.DRAM, 1, 0, SEGMENT_NBYTES, network)
    link.ask(CoordinatorApi.publish, export)


def feed(link: CoordinatorLink, name: str, base: int, samples: Iterator[list[SizedSample]], feeder: int = 0) -> None:
    """Act as a feeder. samples: its own of each unit in turn. base: address of the first process's segment."""
    joined = link.ask(CoordinatorApi.join, name, link.node_id, feeder)
    base += joined.process_index * SEGMENT_NBYTES
    publish(link, joined.process_index)
    report = FeedReport()
    while not (order := link.ask(CoordinatorApi.feed, joined.process_index, report)).stop:
        report = feed_report(order.unit, next(samples), base) if order.unit is not None else FeedReport()


def encode(link: CoordinatorLink, name: str, base: int, pause_s: float = 0.0) -> None:
    """Act as an encoder. pause_s: seconds that a batch takes."""
    joined = link.ask(CoordinatorApi.join, name, link.node_id)
    index = joined.process_index
    base += index * SEGMENT_NBYTES
    publish(link, index)
    while True:
        order = link.ask(CoordinatorApi.lease, index, VISION, SEGMENT_NBYTES)
        if order.stop:
            return
        if order.lease is not None:
            time.sleep(pause_s)
            link.ask(CoordinatorApi.hand_in, index, EncoderReport(ready_of(order.lease, base), stats=STATS))


def train(link: CoordinatorLink, prefetch_microbatches: int) -> None:
    """Act as the only replica; it asks for microbatches as fast as one whose training takes no time."""
    unit, goes_on = 0, link.ask(CoordinatorApi.begin, 0)
    while goes_on:
        plan = None
        while plan is None:
            plan = link.ask(CoordinatorApi.next_plan, unit, 0).plan
        slot, read = 0, ()
        while slot < plan.num_slots:
            locations = link.ask(CoordinatorApi.locate, unit, slot, 0, read, prefetch_microbatches).locations
            for location in locations:
                assert len(location.parts) == 2 * len(plan.microbatch_positions(location.slot, 0)), "parts are missing"
            read = tuple(location.slot for location in locations)
            slot += len(read)
        link.ask(CoordinatorApi.release, unit, read, 0)
        tokens, targets = plan.num_tokens, plan.num_target_tokens
        step, count = plan.unit.step, plan.num_samples
        report = RankReport(unit, plan.unit.kind, step, 0, 1.0, 1.0, 0.1, count, tokens, targets, 0.0, 1.0, 0.0, 0.0)
        goes_on = link.ask(CoordinatorApi.finish, (report,), ())
        unit += 1
