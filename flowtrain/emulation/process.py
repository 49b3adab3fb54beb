"""What the emulated actors of one process share: devices, meetings, times, the model's shapes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from flowtrain.actors.decoding import ImageReader
from flowtrain.config.emulated import EmulatedConfig
from flowtrain.config.run import RunConfig
from flowtrain.costs.action_times import DeviceTimes
from flowtrain.costs.cluster import DeviceType, data_sheet_device_type
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import Profile, read_profile
from flowtrain.data.images import image_size
from flowtrain.data.rejections import errors_of_image, rejected
from flowtrain.data.sources.base import BadSample
from flowtrain.emulation.device import EmulatedDevice, RankClock
from flowtrain.emulation.meetings import Meetings
from flowtrain.emulation.thread_replica import ThreadReplica
from flowtrain.mempool.pool import Pool
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import unchecked_family
from flowtrain.types.memory import Extent
from flowtrain.types.messages import PartLocation
from flowtrain.types.plan import Degrees
from flowtrain.types.samples import Rejection, SampleRef

BACKBONE = "backbone"


@dataclass(frozen=True)
class ReplicaRooms:
    """Where the ranks of a replica meet: training threads, prefetch threads, tensor parallel groups by stage."""

    training: ThreadReplica
    reading: ThreadReplica
    tensor: tuple[ThreadReplica, ...]

    @classmethod
    def of(cls, degrees: Degrees, limit_s: float) -> ReplicaRooms:
        """Return those of a replica."""
        training, reading = (ThreadReplica(degrees.replica_size, limit_s) for _ in range(2))
        return cls(training, reading, tuple(ThreadReplica(degrees.tp, limit_s) for _ in range(degrees.pp)))


@dataclass(frozen=True)
class EmulatedRun:
    """An emulated run, as its processes know it.

    memory: file through which ranks in several processes meet; None: they are all in one.
    """

    config: RunConfig
    settings: EmulatedConfig
    profile: Profile | None = None
    memory: Path | None = None

    @classmethod
    def of(cls, config: RunConfig, memory: Path | None = None) -> EmulatedRun:
        """Return that of a configuration; raises ConfigError for an unknown device or an unreadable profile."""
        settings = config.emulation
        assert settings is not None
        return cls(config, settings, read_profile(settings.profile) if settings.profile else None, memory)

    @property
    def degrees(self) -> Degrees:
        """The backbone's."""
        backbone = self.config.backbone
        return Degrees(backbone.data_parallel_size, backbone.pipeline_parallel_size, backbone.tensor_parallel_size)

    def device_type(self, module: str) -> DeviceType:
        """Return the devices of a module, which is an encoder or the backbone."""
        config, settings = self.config, self.settings
        chosen = config.backbone if module == BACKBONE or config.mode == "colocated" else config.encoders[module]
        count = self.degrees.world_size
        if self.profile is not None:
            return self.profile.devices(count, settings.devices_per_node)
        name = chosen.accelerator_type or settings.device
        return data_sheet_device_type(name, count, devices_per_node=settings.devices_per_node, dtype=config.model.dtype)


@dataclass
class EmulatedProcess:
    """The shared part of one process."""

    run: EmulatedRun
    meetings: Meetings = field(init=False)
    replicas: defaultdict[int, ReplicaRooms] = field(init=False)
    """By data parallel rank."""

    def __post_init__(self) -> None:
        limits, degrees = self.run.config.limits, self.run.degrees
        limit_s = max(limits.stall_timeout_s, limits.start_limit_s) + 60.0
        self.meetings = Meetings(degrees, limit_s, self.run.memory)
        self._lock = threading.RLock()
        self.replicas = defaultdict(lambda: ReplicaRooms.of(degrees, limit_s))
        self._devices: dict[tuple[str, int], EmulatedDevice] = {}
        self._family: Family | None = None
        self._times: dict[str, DeviceTimes] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def family(self) -> Family:
        """The model's family, for all actors of the process."""
        with self._lock:
            if self._family is None:
                self._family = unchecked_family(self.run.config)
                self._family.image_token_id  # noqa: B018  # reads the tokenizer before threads ask for it
            return self._family

    def rooms(self, dp_rank: int) -> ReplicaRooms:
        """Return where the ranks of a replica meet."""
        with self._lock:
            return self.replicas[dp_rank]

    def clock(self, module: str, first: int, count: int = 1) -> RankClock:
        """Return the clock of an actor on ``count`` devices of a module from the ``first`` on.

        In ``mode: colocated`` all modules have the backbone's devices.
        """
        config, settings = self.run.config, self.run.settings
        is_shared = config.mode == "colocated"
        with self._lock:
            devices = []
            for number in range(first, first + count):
                key = (BACKBONE if is_shared else module, number)
                if key not in self._devices:
                    self._devices[key] = EmulatedDevice(self._interference if is_shared else 1.0)
                devices.append(self._devices[key])
        return RankClock(devices, settings.time_scale)

    @cached_property
    def _interference(self) -> float:
        """Of an encoder and the backbone on one device."""
        given = self.run.settings.interference
        return given or max(self.times(each).slowdown(each) for each in self.run.config.encoders)

    def times(self, module: str) -> DeviceTimes:
        """Return the times of a module's devices."""
        with self._lock:
            if module not in self._times:
                config = self.run.config
                self._times[module] = DeviceTimes(
                    self.run.device_type(module),
                    self.family.model_spec,
                    configured_setup(config, on_cpu=False),
                    config.frozen_modules,
                    self.run.profile,
                    {name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
                    {name: encoder.decode_threads for name, encoder in config.encoders.items()},
                    OperatorRules.of(config.costs),
                )
            return self._times[module]

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Return memory for bytes that nobody uses; the same for all."""
        with self._lock:
            if len(self._scratch) < nbytes:
                self._scratch = torch.empty(nbytes, dtype=torch.uint8)
            return self._scratch[:nbytes]

    def fail(self) -> None:
        """End all waits for each other: an actor has failed."""
        self.meetings.fail()
        with self._lock:
            for rooms in self.replicas.values():
                for room in (rooms.training, rooms.reading, *rooms.tensor):
                    room.abort()


class ScratchStaging:
    """Stands in for ``DeviceStaging``: bytes are read from the pool into memory that all ranks of a process share."""

    def __init__(self, process: EmulatedProcess, pool: Pool | None) -> None:
        self._process, self._pool = process, pool

    def aside(self) -> AbstractContextManager[None]:
        """See ``DeviceStaging``."""
        return nullcontext()

    def empty(self, nbytes: int) -> torch.Tensor:
        """See ``DeviceStaging``."""
        return self._process.scratch(nbytes)

    def read_into(self, extents: Sequence[Extent], memory: torch.Tensor) -> None:
        """See ``DeviceStaging``."""
        assert self._pool is not None
        self._pool.read_into(extents, memory.numpy())

    def put(self, data: torch.Tensor) -> torch.Tensor:
        """See ``DeviceStaging``; pixels take no memory."""
        return data

    def mark(self) -> None:
        """There is nothing to wait for."""


class HeaderReader(ImageReader):
    """Reads encoded images from the pool, and of each its header alone: its pixels are zeros that take no memory."""

    def __init__(self, pool: Pool, family: Family, encoder: str, max_pixels: int) -> None:
        super().__init__(pool, lambda image: np.zeros(0), max_pixels, 1)
        self._family, self._encoder = family, encoder

    def _decode(self, part: PartLocation, data: np.ndarray) -> list[np.ndarray] | Rejection:
        assert part.ref is not None, "the flow names the sample of encoded images"
        encoded = [image.data for image in np.split(data, np.cumsum(part.pieces)[:-1])]
        return empty_pixels(self._family, self._encoder, part.ref, encoded, self._max_pixels)


def empty_pixels(
    family: Family, encoder: str, ref: SampleRef, images: Sequence[memoryview], max_pixels: int
) -> list[np.ndarray] | Rejection:
    """Return pixel values of the right shapes, [C, H, W] a tile, that take no memory; a rejection for a bad header."""
    found = []
    try:
        for number, data in enumerate(images, start=1):
            with errors_of_image(number, len(images)):
                size = image_size(data, max_pixels)
                shape = 3, *family.entering_size(encoder, *size)
                zeros = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (0, 0, 0))
                found += [zeros] * family.image_layout(encoder, *size).num_tiles
    except BadSample as error:
        return rejected(ref, error)
    return found
