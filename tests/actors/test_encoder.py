"""An encoder against a scripted coordinator: what it forwards, puts and reports, and how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowtrain.actors import encoder as encoder_module
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.pooling import address_space
from flowtrain.config.flow import PoolConfig
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.data import images as images_module
from flowtrain.data.sources.base import BadSample
from flowtrain.errors import OutOfPoolMemory, StaleLeaseError, WorkerLostError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import EncoderReport, HandInReply, ImageBytes, Lease, LeaseOrder
from flowtrain.types.plan import EncodeBatch
from flowtrain.types.samples import RejectReason, SampleRef
from tests.actors.scripted import FEEDER, INDEX, ScriptedLink, feeder_of, new_run_id, reader_of

NAME, VISION, DIM, ROWS = "encoder-0", "vision", 8, 2
PART_NBYTES = ROWS * DIM * 4
STOP = LeaseOrder(None, (), stop=True)
NOTHING = LeaseOrder(None, (), stop=False)
TORN = 1000
"""Positions from here on have a bad image."""
POOL, NUM_POSITIONS = PoolConfig(), 1024


class FakeModule:
    """Gives each image rows of its own value, and notes what was forwarded together."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.error: Exception | None = None

    def to(self, device: torch.device) -> FakeModule:
        return self

    def encode(self, images: Sequence[np.ndarray]) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        values = [float(image.flat[0]) for image in images]
        self.batches.append(values)
        return [torch.full((ROWS, DIM), value) for value in values]


def values_of(position: int) -> list[float]:
    """Position p has images of the values p and p + 0.5, if it is even, else of p alone."""
    return [position, position + 0.5] if position % 2 == 0 else [position]


def images_of(position: int) -> ImageBytes:
    """The images lie in the feeder's segment, at a place that follows from the position."""
    nbytes = tuple(4 for _ in values_of(position))
    address = address_space(POOL).gva(Tier.DRAM, FEEDER, POOL.alignment * position)
    return ImageBytes((Extent(address, sum(nbytes)),), nbytes)


def decode(data: memoryview, limit: int) -> float:
    """Stand in for the decoder: an image is a number."""
    value = float(np.frombuffer(data, np.float32)[0])
    if value >= TORN:
        raise BadSample(RejectReason.CORRUPT_IMAGE, "torn")
    return value


def ref_of(position: int) -> SampleRef:
    return SampleRef(position, 0, position, 0)


def lease(number: int, positions: Sequence[int], needed: Sequence[int] | None = None) -> LeaseOrder:
    """A leased batch; every part has room for two images."""
    needed = positions if needed is None else needed
    batch = EncodeBatch(0, number, VISION, tuple(positions), 4, 256 * len(positions))
    refs, images = tuple(ref_of(p) for p in positions), tuple(images_of(p) for p in positions)
    order = Lease(number, number, batch, refs, images, tuple(needed), 256 * len(needed))
    return LeaseOrder(order, (), stop=False)


class World:
    """One encoder's run with a fake model, on fake images."""

    def __init__(self, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = FakeModule()
        family = SimpleNamespace(
            load_encoder=lambda name: self.module, preprocess=lambda name, image: np.full((1, 1, 1), image, np.float32)
        )
        monkeypatch.setattr(encoder_module, "unchecked_family", lambda config: family)
        monkeypatch.setattr(images_module, "decode_image", decode)
        self.link = ScriptedLink()
        run_id = new_run_id()
        self.feeder = feeder_of(config, run_id, NUM_POSITIONS * POOL.alignment)
        for position in range(NUM_POSITIONS):
            assert self.feeder.put(np.array(values_of(position), np.float32)) == images_of(position).extents
        self.link.others = self.feeder.exports()
        self.pool = reader_of(config, self.link, run_id)
        self.encoder = Encoder(config, VISION, NAME, run_id)
        self.features: dict[int, np.ndarray] = {}

    def keep(self, owner: int, report: EncoderReport) -> HandInReply:
        """Take in a report, and read its parts at once."""
        assert owner == INDEX
        for part in report.ready:
            self.features[part.position] = self.pool.get(part.extents).view(np.float32).reshape(-1, DIM).copy()
        return HandInReply(())

    def run(self, *orders: Any, hand_in: Sequence[Any] | None = None) -> list[EncoderReport]:
        self.link.answers("lease", *orders)
        self.link.answers("hand_in", *(hand_in if hand_in is not None else [self.keep] * len(orders)))
        self.encoder.run(self.link)
        return [args[1] for args in self.link.said["hand_in"]]

    def free_nbytes(self) -> list[int]:
        """The free bytes that the encoder reported each time it asked for a lease."""
        return [args[2] for args in self.link.said["lease"]]


@pytest.fixture
def world(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(config, monkeypatch)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    """The thread that leases ends with the encoder in every case."""
    yield
    deadline = time.monotonic() + 20.0
    while any(thread.name == "lease" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the leasing thread did not end"
        time.sleep(0.01)


def test_batches_are_forwarded_as_they_were_planned(world: World) -> None:
    first, second = world.run(lease(1, [2, 3, 5]), NOTHING, lease(2, [8]), STOP)
    assert world.module.batches == [[2.0, 2.5, 3.0, 5.0], [8.0, 8.5]]
    for position in (2, 3, 5, 8):
        expected = np.concatenate([np.full((ROWS, DIM), value, np.float32) for value in values_of(position)])
        assert np.array_equal(world.features[position], expected)
    assert [part.position for part in first.ready] == [2, 3, 5] and {part.epoch for part in first.ready} == {1}
    assert [part.part for part in second.ready] == [VISION]
    assert world.link.said["join"] == [(NAME, "node-0", None)]
    names = {span.name for report in (first, second) for span in report.spans}
    assert names == {"fetch", "decode", "encode", "put"}


def test_a_batch_of_which_little_is_needed_is_forwarded_whole(world: World) -> None:
    (report,) = world.run(lease(1, [2, 3, 5], needed=[3]), STOP)
    assert world.module.batches == [[2.0, 2.5, 3.0, 5.0]], "the bits must not depend on what is needed"
    assert [part.position for part in report.ready] == [3]
    assert report.stats is not None and report.stats.used_nbytes == 256


def test_bad_images_are_rejected_and_the_others_go_on(world: World) -> None:
    first, second = world.run(lease(1, [3, TORN + 1]), lease(2, [TORN + 2, TORN + 3]), STOP)
    assert [part.position for part in first.ready] == [3] and not second.ready
    assert [rejection.ref.position for rejection in first.rejections] == [TORN + 1]
    assert [rejection.reason for rejection in second.rejections] == [RejectReason.CORRUPT_IMAGE] * 2
    assert second.stats is not None and second.stats.used_nbytes == 256, "what was held for bad samples is free again"


def test_memory_that_is_released_or_refused_is_free_again(world: World) -> None:
    reports: list[EncoderReport] = []

    def refuse(owner: int, report: EncoderReport) -> HandInReply:
        reports.append(report)
        return HandInReply(tuple(extent for part in report.ready for extent in part.extents))

    def release_second(owner: int, encoder: str, free_nbytes: int) -> LeaseOrder:
        while len(reports) < 2:
            time.sleep(0.005)
        extents = tuple(extent for part in reports[1].ready for extent in part.extents)
        return LeaseOrder(None, extents, stop=False)

    def note(owner: int, report: EncoderReport) -> HandInReply:
        reports.append(report)
        return HandInReply(())

    world.run(lease(1, [2, 3]), lease(2, [5]), release_second, NOTHING, STOP, hand_in=[refuse, note])
    assert world.free_nbytes()[-1] == world.free_nbytes()[0], "all is free again"


def test_room_is_reported_with_what_a_report_gives_back(world: World) -> None:
    """Otherwise the encoder would wait although it has more room than it reported."""
    asked: list[int] = []

    def nothing(owner: int, encoder: str, free_nbytes: int) -> LeaseOrder:
        time.sleep(0.001)
        return NOTHING

    def refuse(owner: int, report: EncoderReport) -> HandInReply:
        before = len(world.free_nbytes())
        time.sleep(0.05)
        asked.append(len(world.free_nbytes()) - before)
        return HandInReply(tuple(extent for part in report.ready for extent in part.extents))

    world.run(lease(1, [2, 3]), *[nothing] * 200, STOP, hand_in=[refuse])
    assert asked[0] <= 1, "but for the question that was on its way"


def test_the_room_of_a_lease_is_held_from_the_start(world: World) -> None:
    world.run(lease(1, [2]), STOP)
    first, second = world.free_nbytes()[:2]
    assert first - second == 256


def test_a_lease_whose_feeder_is_gone_is_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoder_module, "RETRY_S", 0.0)
    world.feeder.close()
    world.link.others = []
    returned, after = world.run(lease(1, [2, 3]), lease(2, [5]), STOP, hand_in=[HandInReply(()), HandInReply(())])
    assert [returned.returned, after.returned] == [1, 2] and not returned.ready
    assert world.module.batches == [] and len(set(world.free_nbytes())) == 1, "nothing is held for it"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == [], "it mends itself"


def test_waiting_for_the_backbone_is_no_warning(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A healthy run whose bottleneck is the backbone has nothing that its user should change."""
    world = World(override_config(config, ["limits.stall_warning_s=0.000000001"]), monkeypatch)
    (report,) = world.run(*[NOTHING] * 50, lease(1, [3]), *[NOTHING] * 50, STOP, hand_in=[world.keep])
    assert [part.position for part in report.ready] == [3] and len(world.link.said["lease"]) == 102
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_failing_model_ends_the_encoder_and_the_thread_that_leases(world: World) -> None:
    world.module.error = RuntimeError("out of device memory")
    with pytest.raises(RuntimeError, match="out of device memory"):
        world.run(lease(1, [3]), lease(2, [5]), lease(3, [7]), *[NOTHING] * 2000)


def test_a_coordinator_that_refuses_ends_the_encoder(world: World) -> None:
    with pytest.raises(StaleLeaseError):
        world.run(lease(1, [3]), lease(2, [5]), *[NOTHING] * 2000, hand_in=[StaleLeaseError("refused")])


def test_a_coordinator_that_is_gone_ends_the_encoder(world: World) -> None:
    with pytest.raises(WorkerLostError, match="the coordinator died"):
        world.run(WorkerLostError("the coordinator died"))


def test_a_lease_that_does_not_fit_names_the_key(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    small = override_config(config, [f"encoders.vision.segment_nbytes={1 << 16}"])
    world = World(small, monkeypatch)
    with pytest.raises(OutOfPoolMemory, match=r"encoders\.vision\.segment_nbytes"):
        world.run(lease(1, list(range(257))))


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_are_written_in_place_in_the_type_of_the_run(config: RunConfig, scattered: bool, dtype: str) -> None:
    run = override_config(config, [f"model.dtype={dtype}"])
    encoder = Encoder(run, VISION, NAME, "unused")
    images = [torch.randn(3, DIM), torch.randn(DIM, 2).t(), torch.randn(1, DIM, dtype=torch.float64)]
    nbytes = 6 * DIM * getattr(torch, dtype).itemsize
    with closing(lone_pool()) as pool:
        if scattered:
            everything = [pool.put(bytes(64)) for _ in range(pool.stats().free_nbytes // 64)]
            for extents in everything[::2]:
                pool.release(extents)
        hold = pool.hold(-(-nbytes // 64) * 64)
        extents = encoder._write(pool, images, hold)
        assert (len(extents) > 1) == scattered and sum(extent.nbytes for extent in extents) == nbytes
        data = torch.frombuffer(bytearray(pool.get(extents)), dtype=getattr(torch, dtype)).view(6, DIM)
        assert torch.equal(data, torch.cat([image.to(data.dtype) for image in images]))
        before = pool.stats().free_nbytes
        pool.unhold(hold)
        assert pool.stats().free_nbytes == before, "the part was taken from the lease's promise"


def test_features_that_cannot_be_written_leave_no_room_taken(config: RunConfig) -> None:
    encoder = Encoder(config, VISION, NAME, "unused")
    with closing(lone_pool()) as pool:
        hold = pool.hold(1024)
        with pytest.raises(RuntimeError):
            encoder._write(pool, [torch.zeros(2, DIM), torch.zeros(2, DIM + 1)], hold)
        pool.unhold(hold)
        assert pool.stats().used_nbytes == 0


def lone_pool() -> Pool:
    space = AddressSpace(num_processes=4, segment_nbytes=1 << 16)
    return Pool(0, "node", new_run_id(), space, 1 << 12, 64, "knob", lambda: [])
