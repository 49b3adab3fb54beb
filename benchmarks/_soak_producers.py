"""The soak's producer processes: feeders and encoders that produce known bytes instead of features, and keep books.

Every byte is a function of its position: a part that is produced again is the same, and a reader knows the right bytes.
After each order a process compares its pool's figures with its own books.
"""

from __future__ import annotations

import random
import time
import traceback
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from flowtrain.errors import OutOfPoolMemory, OwnerLostError
from flowtrain.mempool.arena import Hold
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, PoolStats
from flowtrain.types.messages import EncoderReport, FeedOrder, FeedReport, Lease, LeaseOrder, PartReady, RoomOrder
from flowtrain.types.plan import Unit
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, PartSize, SampleRef, SamplerState, SizedSample

VISION = "vision"
NODE = "node"
ALIGNMENT = 256
PATCH_NBYTES = 4096
MAX_PATCHES = 16
"""Patches of one sample, so that no features are larger than 64 KiB."""
MAX_ENCODED_NBYTES = 4096
NUM_FEEDERS = 2
RETRY_S = 0.01
_BLOCK_NBYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """A producer's place in the pool."""

    run_id: str
    space: AddressSpace
    index: int
    segment_nbytes: int
    feeder: int | None
    """Its number among the feeders; None for an encoder."""


def sample_of(position: int) -> SizedSample:
    """The sample at a position: features of 256 B to 64 KiB, log-uniform, one in eight without; text up to 4 KiB."""
    draw = random.Random(position)
    feature_nbytes = int(2 ** draw.uniform(8, 16)) if draw.random() > 1 / 8 else 0
    patches = -(-feature_nbytes // PATCH_NBYTES)
    text_tokens = draw.randint(16, 512)
    parts = [PartSize(TEXT_PART, 1, 0, text_tokens, 8 * text_tokens)]
    encoded: tuple[int, ...] = ()
    if feature_nbytes:
        parts.append(PartSize(VISION, 1, patches, patches, feature_nbytes))
        encoded = (draw.randint(64, MAX_ENCODED_NBYTES),)
    ref = SampleRef(position, 0, position, 0)
    return SizedSample(ref, text_tokens + patches, patches, text_tokens, tuple(parts), encoded)


def fed_parts(sample: SizedSample) -> tuple[PartSize, ...]:
    """What a feeder puts of a sample: its text, and its encoded images if it has some."""
    nbytes = sum(sample.image_nbytes)
    images = (PartSize(IMAGES_PART, 1, MAX_PATCHES + 1, 0, nbytes),) if nbytes else ()
    return sample.parts[0], *images


def payload(position: int, part: PartSize) -> np.ndarray:
    """The bytes of a part: a slice of random bytes, chosen by its position, with the position written over it."""
    start = (position * 7919 + part.num_patches) % (_BLOCK_NBYTES - part.nbytes)
    data = _random_block()[start : start + part.nbytes].copy()
    data[:8] = np.frombuffer(position.to_bytes(8, "little"), np.uint8)
    return data


@cache
def _random_block() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, _BLOCK_NBYTES, np.uint8)


class BooksDiffer(Exception):
    """A pool's figures differ from what the process did with its memory."""


class Books:
    """The extents that a process has put and not freed, counted independently of the pool's arena."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._live: dict[int, int] = {}
        self._nbytes = 0

    def put(self, extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
        """Record new extents."""
        for extent in extents:
            nbytes = -(-extent.nbytes // ALIGNMENT) * ALIGNMENT
            if extent.gva in self._live:
                raise BooksDiffer(f"{extent} was allocated while it was in use")
            self._live[extent.gva] = nbytes
            self._nbytes += nbytes
        return extents

    def release(self, extents: tuple[Extent, ...]) -> None:
        """Free extents in the pool, too."""
        self._pool.release(extents)
        self._nbytes -= sum(self._live.pop(extent.gva) for extent in extents)

    def balance(self) -> PoolStats:
        """Return the pool's figures; they must equal these books while no lease is open."""
        stats = self._pool.stats()
        right = (
            stats.used_nbytes == self._nbytes
            and stats.free_nbytes + self._nbytes == stats.bound_nbytes
            and stats.num_extents == len(self._live)
            and (stats.largest_free_nbytes > 0) == (stats.free_nbytes > 0)
            and stats.largest_free_nbytes <= stats.free_nbytes
        )
        if not right:
            raise BooksDiffer(f"{self._nbytes} bytes in {len(self._live)} extents are in use, the pool has {stats}")
        return stats


class Producer:
    """A process that owns a segment and talks to the soak over a pipe."""

    def __init__(self, place: Place, connection: Connection) -> None:
        self._connection = connection
        self._place = place
        self._draw = random.Random(place.index)
        self._pool = Pool(
            process_index=place.index,
            node_id=NODE,
            run_id=place.run_id,
            address_space=place.space,
            segment_nbytes=place.segment_nbytes,
            alignment=ALIGNMENT,
            knob="the soak's segment",
            fetch_exports=lambda: self._call("exports"),
        )
        self._books = Books(self._pool)
        self._call("publish", self._pool.export())

    def _call(self, method: str, *args: Any) -> Any:
        self._connection.send((method, args))
        return self._connection.recv()

    def _put(self, position: int, part: PartSize, hold: Hold | None = None) -> tuple[Extent, ...]:
        """Put a part by copy or in place; now and then abort a first reservation."""
        data = payload(position, part)
        if self._draw.random() < 0.5:
            return self._books.put(self._pool.put(data, hold))
        if self._draw.random() < 0.2:
            self._pool.reserve(len(data), hold).abort()
        with self._pool.reserve(len(data), hold) as room:
            start = 0
            for view in room.views:
                view[:] = data[start : start + len(view)]
                start += len(view)
            return self._books.put(room.commit())

    def _end(self) -> None:
        self._call("ended", self._books.balance())
        self._pool.close()


class Encoder(Producer):
    """Produces the image parts of its leases."""

    def run(self) -> None:
        """Work until told to stop."""
        while True:
            order: LeaseOrder = self._call("lease", self._books.balance().free_nbytes)
            self._books.release(order.released)
            if order.stop:
                return self._end()
            if order.lease is not None:
                self._encode(order.lease)

    def _encode(self, lease: Lease) -> None:
        if not self._has_right_images(lease):
            time.sleep(RETRY_S)  # until the flow knows of the feeder's death
            self._books.release(self._call("hand_in", EncoderReport(returned=lease.lease_id)))
            return
        hold = self._pool.hold(lease.nbytes)
        ready = []
        for position in lease.needed:
            _, part = sample_of(position).parts
            ready.append(PartReady(position, VISION, lease.epoch, self._put(position, part, hold)))
        self._pool.unhold(hold)
        self._books.release(self._call("hand_in", EncoderReport(tuple(ready), (), self._books.balance())))

    def _has_right_images(self, lease: Lease) -> bool:
        """Read the images of a lease and compare their bytes; False if their feeder is gone."""
        try:
            read = self._pool.get_batch([images.extents for images in lease.images])
        except OwnerLostError:
            return False
        for ref, data in zip(lease.refs, read, strict=True):
            _, images = fed_parts(sample_of(ref.position))
            if not np.array_equal(data, payload(ref.position, images)):
                raise BooksDiffer(f"the images of position {ref.position} have other bytes than were put")
        return True


class Feeder(Producer):
    """Sizes its share of the units, and puts their texts and encoded images."""

    def run(self) -> None:
        """Work until told to stop."""
        report = FeedReport()
        while True:
            order: FeedOrder = self._call("feed", report)
            self._books.release(order.released)
            if order.stop:
                return self._end()
            if order.unit is not None:
                report = self._size(order.unit)
                continue
            remade = [
                self._ready(lost.ref.position, part)
                for lost in order.remake
                for part in fed_parts(sample_of(lost.ref.position))
                if part.name in lost.parts
            ]
            report = FeedReport(remade=tuple(remade), stats=self._books.balance())

    def _size(self, unit: Unit) -> FeedReport:
        mine = [position for position in unit.positions if position % NUM_FEEDERS == self._place.feeder]
        sized = tuple(sample_of(position) for position in mine)
        ready = [self._ready(sample.position, part) for sample in sized for part in fed_parts(sample)]
        return FeedReport(
            unit,
            sized,
            texts=tuple(part for part in ready if part.part == TEXT_PART),
            images=tuple(part for part in ready if part.part == IMAGES_PART),
            sampler_state=SamplerState(unit.first_position + unit.num_positions),
            stats=self._books.balance(),
        )

    def _ready(self, position: int, part: PartSize) -> PartReady:
        while True:
            try:
                extents = self._put(position, part)
            except OutOfPoolMemory:
                order: RoomOrder = self._call("released")
                self._books.release(order.released)
            else:
                return PartReady(position, part.name, 0, extents)


def produce(kind: type[Encoder] | type[Feeder], place: Place, connection: Connection) -> None:
    """Run a producer process; sends an error as text."""
    try:
        kind(place, connection).run()
    except BaseException:
        connection.send(("failed", (traceback.format_exc(),)))
        raise
