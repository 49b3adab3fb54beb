"""Encoder replicas of several processes give the same features, and all their processes end when one ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flowtrain.actors.encoder import Encoder
from flowtrain.actors.encoder_rank import EncoderRank, rank_name
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import ReplicaLostError, StallError
from flowtrain.mempool.pool import Pool
from flowtrain.models.encoder import VisionEncoder
from flowtrain.training.mesh import open_listener
from flowtrain.training.tower_group import TowerGroup
from flowtrain.types.messages import EncoderReport, HandInReply, ImageBytes, Lease, LeaseOrder
from flowtrain.types.plan import EncodeBatch
from flowtrain.types.samples import SampleRef
from tests.actors.scripted import ScriptedLink, feeder_of, new_run_id, reader_of

pytestmark = pytest.mark.processes

NAME, VISION, DIM = "encoder-0", "vision", 32
STOP = LeaseOrder(None, (), stop=True)
NOTHING = LeaseOrder(None, (), stop=False)
STALL_S, LIMIT_S = 6.0, 90.0
TORN = 3
"""Row whose image is bad (conftest.py)."""

Features = dict[int, np.ndarray]


def with_images(config: RunConfig, pool: Pool, order: Any) -> Any:
    """Put the images of a lease into a pool, as a feeder does, and write into the lease where they lie."""
    if not isinstance(order, LeaseOrder) or order.lease is None:
        return order
    sources, images = SourceSet.from_config(config.data), []
    for ref in order.lease.refs:
        data = [bytes(image.read()) for image in sources.read(ref).images]
        images.append(ImageBytes(pool.put(b"".join(data)), tuple(map(len, data))))
    return replace(order, lease=replace(order.lease, images=tuple(images)))


def lease(number: int, positions: Sequence[int]) -> LeaseOrder:
    batch = EncodeBatch(0, number, VISION, tuple(positions), 4, 4096 * len(positions))
    refs = tuple(SampleRef(position, 0, position, 0) for position in positions)
    order = Lease(number, number, batch, refs, (), tuple(positions), batch.nbytes)
    return LeaseOrder(order, (), stop=False)


def idle(owner: int, encoder: str, free_nbytes: int) -> LeaseOrder:
    """Give no work for longer than ranks wait for each other."""
    time.sleep(1.2 * STALL_S)
    return NOTHING


def lead(end: Connection, config: RunConfig, orders: Sequence[Any]) -> Features:
    """Run an encoder by a script; send its port, then a number for each report. Returns what it put into the pool."""
    link, run_id, features = ScriptedLink(), new_run_id(), {}
    pool, feeder = reader_of(config, link, run_id), feeder_of(config, run_id, 1 << 20)
    link.others = feeder.exports()

    def keep(owner: int, report: EncoderReport) -> HandInReply:
        for part in report.ready:
            features[part.position] = pool.get(part.extents).view(np.float32).reshape(-1, DIM).copy()
        end.send(len(features))
        return HandInReply(())

    link.answers("lease", *[with_images(config, feeder, order) for order in orders])
    link.answers("hand_in", *[keep] * len(orders))
    encoder = Encoder(config, VISION, NAME, run_id)
    end.send(encoder.open_rendezvous())
    encoder.run(link)
    return features


def follow(end: Connection, config: RunConfig, rank: int, port: int, deed: Callable[[], Any] | None = None) -> None:
    """Run an encoder rank that calls ``deed`` before each forward."""

    class ScriptedRank(EncoderRank):
        def forward(self, module: VisionEncoder, *images: Any) -> None:
            if deed is not None:
                deed()
            super().forward(module, *images)

    ScriptedRank(config, VISION, NAME, rank).run(port)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(LIMIT_S)


def _main(end: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        end.send(function(end, *arguments))
    except Exception as error:  # the test looks at it
        end.send(error)


class Process:
    """A function in a process of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._end, other_end = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(other_end, function, arguments), daemon=True)
        self._process.start()
        other_end.close()

    def next_message(self) -> Any:
        """Return the next thing that it sends."""
        assert self._end.poll(LIMIT_S), f"nothing came in {LIMIT_S:g} s"
        return self._end.recv()

    def result(self) -> Any:
        """Return what it returned, or the error that it raised."""
        while isinstance(last := self.next_message(), int):
            pass
        return last

    def kill(self) -> None:
        self._process.kill()
        self._process.join(LIMIT_S)


@contextmanager
def replica(config: RunConfig, orders: Sequence[Any], deed: Callable[[], Any] | None = None) -> Iterator[list[Process]]:
    """The processes of a replica, the leader first."""
    processes = [Process(lead, config, orders)]
    try:
        port = processes[0].next_message()
        size = config.encoders[VISION].tensor_parallel_size
        processes += [Process(follow, config, rank, port, deed) for rank in range(1, size)]
        yield processes
    finally:
        for process in processes:
            process.kill()


def split(config: RunConfig, size: int, *overrides: str) -> RunConfig:
    return override_config(config, [f"encoders.vision.tensor_parallel_size={size}", *overrides])


def test_a_replica_of_two_produces_the_features_of_one(config: RunConfig) -> None:
    orders = [lease(1, [0, 2, TORN]), lease(2, [TORN]), idle, lease(3, [4, 5, 7]), STOP]
    with replica(split(config, 2, f"limits.stall_timeout_s={STALL_S}"), orders) as processes:
        found, ended = [process.result() for process in processes]
    assert ended is None, "the encoder rank ends with its leader"
    with replica(config, [order for order in orders if order is not idle]) as (lone,):
        expected = lone.result()
    assert list(found) == list(expected) == [0, 2, 4, 5, 7]
    for position, features in expected.items():
        difference = np.linalg.norm(found[position] - features) / np.linalg.norm(features)
        assert difference < 1e-5, (position, difference)


def test_a_replica_of_two_forwards_images_of_all_sizes_together(config: RunConfig) -> None:
    varying = override_config(config, ["model.family=variable_llava"])
    with replica(split(varying, 2), [lease(1, [0, 2, 4, 5, 7]), STOP]) as processes:
        found, ended = [process.result() for process in processes]
    with replica(varying, [lease(1, [0, 2, 4, 5, 7]), STOP]) as (lone,):
        expected = lone.result()
    assert ended is None and list(found) == list(expected) == [0, 2, 4, 5, 7]
    assert len({len(features) for features in expected.values()}) > 2
    for position, features in expected.items():
        difference = np.linalg.norm(found[position] - features) / np.linalg.norm(features)
        assert difference < 1e-5, (position, difference)


def test_batches_in_half_precision_travel_too(config: RunConfig) -> None:
    with replica(split(config, 2, "model.dtype=bfloat16"), [lease(1, [0, 2]), STOP]) as processes:
        found, ended = [process.result() for process in processes]
    assert list(found) == [0, 2] and ended is None


def test_a_leader_names_the_encoder_rank_that_died(config: RunConfig) -> None:
    with replica(split(config, 2), [lease(1, [0, 2]), STOP], die) as (leader, _):
        error = leader.result()
    assert isinstance(error, ReplicaLostError) and str(error) == f"{NAME} lost {rank_name(NAME, 1)} in a forward"


def test_an_idle_encoder_rank_ends_when_its_leader_died(config: RunConfig) -> None:
    with replica(split(config, 2), [lease(1, [0]), *[idle] * 100]) as (leader, other):
        assert leader.next_message() == 1
        leader.kill()
        error = other.result()
    assert isinstance(error, ReplicaLostError) and str(error) == f"encoder-0-tp1 lost {NAME}", repr(error)


def test_the_wait_for_an_encoder_rank_that_does_not_take_part_is_limited(config: RunConfig) -> None:
    with replica(split(config, 2, "limits.stall_timeout_s=5"), [lease(1, [0, 2]), STOP], hang) as (leader, _):
        error = leader.result()
    assert isinstance(error, StallError), repr(error)
    assert "in a forward for encoder-0-tp1" in str(error) and "limits.stall_timeout_s (5 s)" in str(error)


def test_the_wait_for_ranks_that_do_not_come_is_limited(config: RunConfig) -> None:
    waiting = split(config, 2, "limits.start_timeout_s=1")
    process = Process(lead, waiting, [STOP])
    process.next_message()
    error = process.result()
    process.kill()
    assert isinstance(error, StallError) and "encoder-0 waited 1 s (limits.start_timeout_s)" in str(error)


def run_ahead(end: Connection, names: Sequence[str], has_sent: Event, port: int = 0) -> list[list[int]]:
    """Run a rank whose collectives do not wait, like an accelerator's; the other rank receives once all is sent."""
    dist.broadcast = lambda *arguments, **options: None
    rank, cpu = (1 if port else 0), torch.device("cpu")
    if rank:
        group = TowerGroup(names, rank, cpu, port=port)
        assert has_sent.wait(LIMIT_S)
        shapes = []
        while (images := group.receive(torch.float32)) is not None:
            shapes += images[1]
        return shapes
    listener = open_listener()
    end.send(listener.getsockname()[1])
    group = TowerGroup(names, rank, cpu, listener=listener)
    for rows in (1, 2, 3):
        group.send(torch.zeros(4 * rows), [(rows, 4)])
    has_sent.set()
    group.dismiss()
    return []


def test_a_leader_may_run_ahead_of_the_other_ranks() -> None:
    has_sent = multiprocessing.get_context("forkserver").Event()
    processes = [Process(run_ahead, ("leader", "other"), has_sent)]
    try:
        processes.append(Process(run_ahead, ("leader", "other"), has_sent, processes[0].next_message()))
        assert processes[1].result() == [[1, 4], [2, 4], [3, 4]]
        assert processes[0].result() == []
    finally:
        for process in processes:
            process.kill()
