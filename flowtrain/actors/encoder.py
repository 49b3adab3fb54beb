"""An encoder: leases batches of images, reads them by address, decodes and forwards them, and puts the features."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from flowtrain.actors.cores import giving_way
from flowtrain.actors.encoder_rank import join_replica, load_split
from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.pooling import PoolMember, join_pool
from flowtrain.actors.spans import SpanLog
from flowtrain.actors.whereabouts import Diary, longest
from flowtrain.actors.windows import Windows
from flowtrain.config.run import RunConfig
from flowtrain.data.images import pixels_of_sample
from flowtrain.errors import OwnerLostError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.mempool.arena import Hold
from flowtrain.mempool.pool import Pool
from flowtrain.models.device import opened_device
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.families.registry import unchecked_family
from flowtrain.training.mesh import open_listener
from flowtrain.training.tower_group import TowerGroup
from flowtrain.training.work_spans import WorkSpans
from flowtrain.types.memory import Extent
from flowtrain.types.messages import EncoderReport, ImageBytes, Lease, LeaseOrder, PartReady
from flowtrain.types.samples import Rejection, SampleRef
from flowtrain.types.tracing import TraceOrder
from flowtrain.types.whereabouts import LOAD, WAIT_FOR_MODEL, Whereabouts

logger = logging.getLogger(__name__)

PixelValues = list[np.ndarray]
RETRY_S = 0.2
"""Pause after a lease that could not be read."""


@dataclass(frozen=True)
class Work:
    """A leased batch, decoded."""

    lease: Lease
    hold: Hold
    """Promise of the DRAM that the needed parts take."""
    pixels: dict[int, PixelValues]
    """Pixel values of each position's images, in the batch's order."""
    rejections: tuple[Rejection, ...]
    """Samples of the batch that cannot be used."""


class Encoder:
    """One replica of a frozen vision encoder. Where tensor parallel ranks share its tower, this is their leader.

    It has two threads: one leases and decodes the next batch while the other forwards the last. A batch is always
    forwarded whole, as planned, even when only some of it is needed again: so the features never depend on timing.
    """

    def __init__(self, config: RunConfig, encoder: str, name: str, run_id: str) -> None:
        self._config = config
        self._settings = config.encoders[encoder]
        self._encoder = encoder
        self._name = name
        self._run_id = run_id
        self._spans = SpanLog(name)
        self._windows = Windows(name)
        self._forwarding, self._leasing = Diary(), Diary()  # of its threads
        self._stopping = threading.Event()
        # One batch is decoded while one is forwarded. More would wait here while another encoder could take them.
        self._ahead = threading.Semaphore(1)
        # What a report gives back is freed before the next lease is asked for, which must count it as room.
        self._handing_in = threading.Lock()
        self._listener: socket.socket | None = None
        self._meeting = threading.Lock()
        self._group: TowerGroup | None = None

    def open_rendezvous(self) -> int:
        """Listen for the replica's other ranks, which share this node; returns the port. May be called repeatedly."""
        with self._meeting:  # Ray may start ``run`` first
            if self._listener is None:
                self._listener = open_listener()
                self._port = int(self._listener.getsockname()[1])
            return self._port

    def trace(self, order: TraceOrder) -> tuple[str, ...]:
        """Profile as the order says until ``end_trace``; returns what failed, and why. Spans are always recorded."""
        return self._windows.ask(order).result()

    def end_trace(self) -> None:
        """End what ``trace`` began, with the next batch."""
        self._windows.end_now()

    def whereabouts(self) -> Whereabouts:
        """Return what this encoder does now: of its two threads, the one that has worked longest at one thing."""
        return longest(self._forwarding.read(), self._leasing.read())

    def run(self, link: CoordinatorLink) -> None:
        """Encode until the coordinator sends stop. Waits without limit: the consumer may be slower."""
        self._link = link
        self._forwarding.begin(LOAD, may_last=True)
        self._leasing.begin(WAIT_FOR_MODEL, may_last=True)
        self._spans.follow(link)
        torch.set_num_threads(self._settings.num_threads)
        self._family = unchecked_family(self._config)
        device = opened_device(self._config.model.device)
        with giving_way(self._config, device):
            self._run(device)

    def _run(self, device: torch.device) -> None:
        self._work = WorkSpans(device, self._spans.add)
        self._module = self._load_tower().to(device)
        member = join_pool(
            self._link,
            self._config.pool,
            self._run_id,
            self._name,
            self._settings.segment_nbytes,
            f"encoders.{self._encoder}.segment_nbytes",
            device,
            gives_hbm=True,
        )
        ready: queue.Queue[Work | BaseException | None] = queue.Queue()
        leaser = threading.Thread(target=self._lease_and_decode, args=(member, ready), name="lease", daemon=True)
        leaser.start()
        try:
            for work in self._decoded(ready):
                self._windows.begin(device)
                self._finish(member, work)
            if self._group is not None:
                self._group.dismiss()
                self._group.close()
        finally:
            self._windows.close()
            self._stopping.set()
            self._ahead.release()
            member.pool.close()

    def _load_tower(self) -> VisionEncoder:
        if self._settings.tensor_parallel_size == 1:
            return self._family.load_encoder(self._encoder)
        port = self.open_rendezvous()
        self._group = join_replica(self._config, self._encoder, self._name, 0, port, self._listener)
        module = load_split(self._family, self._encoder, self._group)
        module.announce = self._group.send
        return module

    def _decoded(self, ready: queue.Queue[Work | BaseException | None]) -> Iterator[Work]:
        while True:
            self._forwarding.begin("a wait for a batch", may_last=True)
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            self._ahead.release()
            yield item

    # --- leasing and decoding, in their own thread --------------------------------------------------------------

    def _lease_and_decode(self, member: PoolMember, ready: queue.Queue[Work | BaseException | None]) -> None:
        try:
            with ThreadPoolExecutor(self._settings.decode_threads, thread_name_prefix="decode") as decoders:
                for lease in self._leases(member):
                    images = self._read(member.pool, lease)
                    if images is None:
                        self._return(member, lease)
                        continue
                    ready.put(self._decode(lease, member.pool.hold(lease.nbytes), images, decoders))
            ready.put(None)
        except BaseException as error:  # the thread that runs the actor raises it
            ready.put(error)

    def _leases(self, member: PoolMember) -> Iterator[Lease]:
        while True:
            self._leasing.begin("a wait for a lease", may_last=True)
            self._ahead.acquire()
            order = self._next_order(member)
            while order.lease is None and not order.stop and not self._stopping.is_set():
                order = self._next_order(member)
            if order.lease is None:
                return
            yield order.lease

    def _next_order(self, member: PoolMember) -> LeaseOrder:
        with self._handing_in:
            free_nbytes = member.pool.stats().free_nbytes
        order = self._link.ask(CoordinatorApi.lease, member.index, self._encoder, free_nbytes)
        member.pool.release(order.released)
        return order

    def _read(self, pool: Pool, lease: Lease) -> list[np.ndarray] | None:
        """Return the encoded images of each sample of a lease, uint8; None if their feeder died since the answer."""
        started = time.monotonic()
        self._leasing.begin(f"the read of {_text_of(lease)}")
        try:
            found = pool.get_batch([images.extents for images in lease.images])
        except OwnerLostError as error:
            logger.info("%s gives lease %d back: %s", self._name, lease.lease_id, error)
            return None
        self._spans.add("fetch", started, time.monotonic(), nbytes=sum(map(len, found)))
        return found

    def _return(self, member: PoolMember, lease: Lease) -> None:
        """Give a lease back, and wait a moment: the controller tells the flow that the feeder died."""
        self._leasing.begin("a question to the coordinator", may_last=True)
        self._link.ask(CoordinatorApi.hand_in, member.index, EncoderReport(returned=lease.lease_id))
        self._ahead.release()
        self._stopping.wait(RETRY_S)

    def _decode(self, lease: Lease, hold: Hold, data: Sequence[np.ndarray], decoders: ThreadPoolExecutor) -> Work:
        started = time.monotonic()
        self._leasing.begin(f"the decoding of {_text_of(lease)}")
        pixels: dict[int, PixelValues] = {}
        rejections = []
        outcomes = decoders.map(self._load, lease.refs, lease.images, data)
        for ref, outcome in zip(lease.refs, outcomes, strict=True):
            if isinstance(outcome, Rejection):
                rejections.append(outcome)
            else:
                pixels[ref.position] = outcome
        self._spans.add("decode", started, time.monotonic(), samples=len(lease.refs))
        return Work(lease, hold, pixels, tuple(rejections))

    def _load(self, ref: SampleRef, images: ImageBytes, data: np.ndarray) -> PixelValues | Rejection:
        encoded = [image.data for image in np.split(data, np.cumsum(images.nbytes)[:-1])]
        preprocess = partial(self._family.preprocess, self._encoder)
        return pixels_of_sample(ref, encoded, self._config.data.max_image_pixels, preprocess)

    # --- forwarding ---------------------------------------------------------------------------------------------

    def _finish(self, member: PoolMember, work: Work) -> None:
        self._forwarding.begin(f"the forward of {_text_of(work.lease)}")
        features = self.encode(work)
        started = time.monotonic()
        ready = []
        for position in work.lease.needed:
            if position in features:
                extents = self._write(member.pool, features[position], work.hold)
                ready.append(PartReady(position, self._encoder, work.lease.epoch, extents))
        member.pool.unhold(work.hold)
        self._spans.add("put", started, time.monotonic(), samples=len(ready))
        self._work.caught_up()  # the bytes are in the pool, so the host has waited for the device
        self._work.collect()
        self._forwarding.begin("a question to the coordinator", may_last=True)
        self._hand_in(member, ready, work)

    def encode(self, work: Work) -> dict[int, list[torch.Tensor]]:
        """Forward a batch. Returns the features of each position's images in order, ``[rows, feature_dim]`` each."""
        flat = [array for arrays in work.pixels.values() for array in arrays]
        produced = [position for position in work.lease.needed if work.pixels.get(position)]
        span = self._work.span("encode", produces=produced, images=len(flat), unit=work.lease.batch.unit)
        with span, self._group.forwarding() if self._group is not None else nullcontext():
            rows = iter(self._module.encode(flat) if flat else [])
        return {position: [next(rows) for _ in arrays] for position, arrays in work.pixels.items() if arrays}

    def _write(self, pool: Pool, images: Sequence[torch.Tensor], hold: Hold) -> tuple[Extent, ...]:
        """Write a part into its place in the pool, with one copy from the device that also converts its type."""
        dtype: torch.dtype = getattr(torch, self._config.model.dtype)
        shape = (sum(len(image) for image in images), images[0].shape[1])
        nbytes = shape[0] * shape[1] * dtype.itemsize
        extents = pool.write_on_device(nbytes, lambda memory: _join(images, memory.view(dtype).view(shape)))
        if extents is not None:
            return extents  # its share of the lease's promise of DRAM is given back with the rest
        with pool.reserve(nbytes, hold) as room:
            if len(room.views) == 1:
                _join(images, torch.from_numpy(room.views[0]).view(dtype).view(shape))
            else:  # no run of the segment was long enough
                data = torch.empty(shape, dtype=dtype)
                _join(images, data)
                pieces = np.split(_as_bytes(data), np.cumsum([len(view) for view in room.views])[:-1])
                for view, piece in zip(room.views, pieces, strict=True):
                    view[:] = piece
            return room.commit()

    def _hand_in(self, member: PoolMember, ready: Sequence[PartReady], work: Work) -> None:
        report = EncoderReport(
            tuple(ready),
            work.rejections,
            member.pool.stats(),
            self._spans.take(),
            read_by_transport=member.pool.take_read_nbytes(),
            lease_id=work.lease.lease_id,
        )
        with self._handing_in:
            member.pool.release(self._link.ask(CoordinatorApi.hand_in, member.index, report).refused)


def _text_of(lease: Lease) -> str:
    return f"batch {lease.batch.index} of unit {lease.batch.unit}"


def _join(images: Sequence[torch.Tensor], destination: torch.Tensor) -> None:
    """Copy images' features one after another, from any device and type."""
    for image, rows in zip(images, destination.split([len(image) for image in images]), strict=True):
        rows.copy_(image)


def _as_bytes(features: torch.Tensor) -> np.ndarray:
    return features.view(torch.uint8).numpy().reshape(-1)
