"""Replicas whose ranks read images: who decodes, what all leave out, and what happens when an owner dies."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain.actors import leading, prefetch
from flowtrain.actors.decoding import ImageReader
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.actors.reading import MicrobatchReader
from flowtrain.actors.spans import SpanLog
from flowtrain.config.flow import LimitsConfig
from flowtrain.emulation.thread_replica import ThreadChannel, ThreadReplica
from flowtrain.errors import DataError
from flowtrain.training.batch import ImageBatch, PackedBatch, pack_texts
from flowtrain.types.memory import Extent
from flowtrain.types.messages import MicrobatchLocation, PartLocation
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, Rejection, RejectReason
from tests.actors.local import Background
from tests.actors.test_prefetch import LIMIT_S, REPLICA, FakeCoordinator, all_take, wait_for
from tests.flow.building import plan, ref, sized

IMAGE_TOKEN, DIM, PATCH = 99, 4, 4
MAX_PIXELS = 10_000


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "POLL_S", 0.01)
    monkeypatch.setattr(leading, "RETRY_S", 0.001)


def png(position: int, number: int) -> bytes:
    """An image whose size and colour follow from its place."""
    file = io.BytesIO()
    width, height = (1 + number) * PATCH, (1 + position % 3) * PATCH
    Image.new("RGB", (width, height), (position, number, 0)).save(file, "PNG")
    return file.getvalue()


def sizes_of(position: int) -> list[tuple[int, int]]:
    return [((1 + position % 3) * PATCH, (1 + number) * PATCH) for number in range(1 + position % 2)]


def rows_of(size: tuple[int, int]) -> int:
    height, width = size
    return height * width // PATCH**2


def preprocess(image: Image.Image) -> np.ndarray:
    return np.asarray(image, np.float32).transpose(2, 0, 1).copy()


class World(FakeCoordinator):
    """One unit of four microbatches; of each three samples the third has no image. bad: positions with a torn one."""

    def __init__(self, num_slots: int = 4, bad: frozenset[int] = frozenset()) -> None:
        self.bad = bad
        self.pieces: dict[int, tuple[int, ...]] = {}
        super().__init__(num_units=0)
        samples = [
            replace(sized(position), num_tokens=3 + self.num_rows(position)) for position in range(3 * num_slots)
        ]
        self.plans = [plan(samples, per_microbatch=3)]
        self.ready = {(0, slot) for slot in range(num_slots)}
        self.ends_at = 1
        self.reported: list[Rejection] = []
        for sample in samples:
            self.make(sample.position)

    def has_images(self, position: int) -> bool:
        return position % 3 != 2

    def num_rows(self, position: int) -> int:
        return sum(rows_of(size) for size in sizes_of(position)) * self.has_images(position)

    def make(self, position: int) -> None:
        images = [png(position, number) for number in range(len(sizes_of(position)))] * self.has_images(position)
        if position in self.bad:
            images[-1] = images[-1][:40]
        ids = [1, *[IMAGE_TOKEN] * self.num_rows(position), position, 2]
        self.parts[position] = {TEXT_PART: self.pool.put(np.array([ids, ids], np.int32))}
        self.pieces[position] = tuple(map(len, images))
        if images:
            self.parts[position][IMAGES_PART] = self.pool.put(np.frombuffer(b"".join(images), np.uint8))

    def location(self, unit: int, slot: int) -> MicrobatchLocation:
        found = super().location(unit, slot)
        parts = [
            replace(part, pieces=self.pieces[part.position], ref=ref(part.position))
            if part.part == IMAGES_PART
            else part
            for part in found.parts
        ]
        return replace(found, parts=tuple(cast("list[PartLocation]", parts)))

    def reject(self, dp_rank: int, rejections: tuple[Rejection, ...]) -> None:
        assert dp_rank == REPLICA
        for rejection in rejections:
            assert (0, rejection.ref.position // 3) not in self.released, "it could have been trained on"
        self.reported += rejections
        self.rejected |= {rejection.ref.position for rejection in rejections}


def pack(samples: Any, with_features: bool) -> PackedBatch:
    return pack_texts(
        samples,
        image_token_id=IMAGE_TOKEN,
        feature_dim=DIM,
        dtype=torch.float32,
        loss_normalization="token",
        device=torch.device("cpu"),
        with_features=with_features,
    )


@contextmanager
def replica(
    world: World,
    tp: int = 1,
    pp: int = 1,
    token_rank: int = 0,
    rows: Any = rows_of,
    num_threads: int = 2,
    staging: Any = None,
) -> Iterator[list[Prefetcher]]:
    meeting = ThreadReplica(tp * pp, LIMIT_S)
    ranks = []
    for rank in range(tp * pp):
        pp_rank = rank // tp
        pool = cast(Any, world.pool)
        reader = MicrobatchReader(
            dp_rank=REPLICA,
            pool=pool if pp_rank == 0 else None,
            pack=lambda samples, has_tokens=pp_rank == token_rank: pack(samples, has_tokens),
            feature_dim=DIM,
            feature_dtype=torch.float32,
            spans=SpanLog("rank"),
            tp_rank=rank % tp,
            tp_size=tp,
            staging=staging,
            rows_of=rows,
            images=ImageReader(pool, preprocess, MAX_PIXELS, num_threads) if pp_rank == 0 else None,
        )
        ranks.append(
            Prefetcher(
                name="rank",
                link=world,
                channel=ThreadChannel(rank, meeting),
                dp_rank=REPLICA,
                reader=reader,
                limits=LimitsConfig(),
                depth=2,
                arrival=False,
                first_unit=0,
            )
        )
    try:
        yield ranks
    finally:
        for each in [Background(rank.close) for rank in ranks]:
            each.join()


def check(batch: PackedBatch, positions: list[int], has_pixels: bool, has_tokens: bool) -> None:
    with_images = [position for position in positions if position % 3 != 2]
    sizes = [size for position in with_images for size in sizes_of(position)]
    assert isinstance(batch.images, ImageBatch) and batch.images.sizes == tuple(sizes)
    assert batch.num_samples == len(positions)
    assert len(batch.feature_index) == (sum(rows_of(size) for size in sizes) if has_tokens else 0)
    assert len(batch.features) == 0
    if not has_pixels:
        assert batch.images.pixels == ()
        return
    colours = [(position, number) for position in with_images for number in range(len(sizes_of(position)))]
    for size, colour, pixels in zip(sizes, colours, batch.images.pixels, strict=True):
        assert pixels.shape == (3, *size) and pixels.dtype == torch.float32
        assert pixels[:2, 0, 0].tolist() == list(colour)


@pytest.mark.parametrize(("tp", "pp", "token_rank"), [(1, 1, 0), (2, 1, 0), (1, 2, 0), (2, 2, 1)])
def test_ranks_of_the_entry_stage_have_pixels_and_all_know_the_sizes(tp: int, pp: int, token_rank: int) -> None:
    world = World()
    with replica(world, tp, pp, token_rank) as ranks:
        for rank in ranks:
            rank.next_plan()
        for slot in range(4):
            for rank, fetched in enumerate(all_take(ranks)):
                positions = [3 * slot, 3 * slot + 1, 3 * slot + 2]
                check(fetched.batch, positions, rank < tp, rank // tp == token_rank)
    assert sorted(world.released) == [(0, slot) for slot in range(4)]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_all_ranks_leave_out_a_sample_with_a_torn_image(tp: int, pp: int) -> None:
    world = World(bad=frozenset({1, 3, 4}))
    with replica(world, tp, pp) as ranks:
        for rank in ranks:
            rank.next_plan()
        for kept in ([0, 2], [5], [6, 7, 8], [9, 10, 11]):
            for rank, fetched in enumerate(all_take(ranks)):
                check(fetched.batch, kept, rank < tp, rank < tp)
    assert [rejection.ref for rejection in world.reported] == [ref(1), ref(3), ref(4)]
    assert all(rejection.reason is RejectReason.CORRUPT_IMAGE for rejection in world.reported)
    assert [rejection.image for rejection in world.reported] == [2, 2, 1], "the torn image is named"


class Staging:
    """Notes what goes to the device, and which thread gets it."""

    def __init__(self) -> None:
        self.put_there: list[torch.Tensor] = []
        self.handed_over: list[torch.Tensor] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def put(self, data: torch.Tensor) -> torch.Tensor:
        self.put_there.append(data.clone())
        return self.put_there[-1]

    def mark(self) -> str:
        return "ready"

    def hand_over(self, tensors: list[torch.Tensor], ready: str) -> None:
        self.handed_over += tensors


def test_pixels_are_staged_and_handed_to_the_training_thread() -> None:
    staging = Staging()
    with replica(World(num_slots=1), staging=staging) as (rank,):
        rank.next_plan()
        batch = rank.next_microbatch().batch
    check(batch, [0, 1, 2], has_pixels=True, has_tokens=True)
    assert batch.images is not None
    kept = {id(each) for each in staging.handed_over}
    assert all(id(each) in kept for each in staging.put_there)
    assert [id(each) for each in staging.put_there] == [id(each) for each in batch.images.pixels]


def test_a_microbatch_of_bad_samples_is_weightless_and_has_no_images() -> None:
    world = World(num_slots=1, bad=frozenset({0, 1}))
    world.rejected = {2}
    with replica(world) as (rank,):
        rank.next_plan()
        batch = rank.next_microbatch().batch
    assert (batch.num_samples, batch.images) == (0, ImageBatch(()))


@pytest.mark.parametrize("part", [TEXT_PART, IMAGES_PART])
def test_what_was_lost_is_decoded_again_and_rejected_once(part: str) -> None:
    world = World(num_slots=2, bad=frozenset({1}))
    world.pool.lost.add(world.parts[0][part][0].gva)
    with replica(world, tp=2) as ranks:
        for rank in ranks:
            rank.next_plan()
        wait_for(lambda: world.num_located() > 3)
        world.make(0)
        for kept in ([0, 2], [3, 4, 5]):
            for fetched in all_take(ranks):
                check(fetched.batch, kept, has_pixels=True, has_tokens=True)
    assert [rejection.ref.position for rejection in world.reported] == [1]


def test_images_lost_after_the_leader_read_them_are_read_again_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader has rejected a sample by then: the second time, its place is not asked for."""
    world = World(num_slots=1, bad=frozenset({1}))
    lost, get_batch = world.parts[0][IMAGES_PART][0], world.pool.get_batch
    reads: list[Extent] = []

    def get_once(parts: Any) -> list[np.ndarray]:
        reads.extend(extent for part in parts for extent in part if extent == lost)
        if len(reads) == 2:
            world.pool.lost.add(lost.gva)
        return get_batch(parts)

    monkeypatch.setattr(world.pool, "get_batch", get_once)
    with replica(world, tp=2) as ranks:
        for rank in ranks:
            rank.next_plan()
        wait_for(lambda: world.num_located() > 2)
        world.make(0)
        for fetched in all_take(ranks):
            check(fetched.batch, [0, 2], has_pixels=True, has_tokens=True)
    assert [rejection.ref.position for rejection in world.reported] == [1]


def test_rows_that_the_text_does_not_expect_are_refused() -> None:
    with replica(World(), rows=lambda size: 1 + rows_of(size)) as (rank,):
        rank.next_plan()
        with pytest.raises(DataError, match=r"position 0: 1 image tokens in its text but 2 feature rows"):
            rank.next_microbatch()


def test_a_rank_that_decodes_other_images_than_the_leader_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_slots=1)
    readers = iter([preprocess] * 2)

    def torn(self: ImageReader, part: PartLocation, data: np.ndarray) -> Any:
        if next(readers, None) is not None:
            return [preprocess(Image.new("RGB", size[::-1])) for size in sizes_of(part.position)]
        return Rejection(ref(part.position), RejectReason.CORRUPT_IMAGE, "another Pillow")

    monkeypatch.setattr(ImageReader, "_decode", torn)
    with replica(world, tp=2, num_threads=1) as ranks:
        for rank in ranks:
            rank.next_plan()
        for each in [Background(rank.next_microbatch) for rank in ranks]:
            with pytest.raises(DataError, match=r"position 0: the first rank .* \(another Pillow\)"):
                each.join()
