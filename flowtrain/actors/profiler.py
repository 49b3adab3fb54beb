"""An actor that measures a model's modules on one device and trains nothing."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from flowtrain.actors.link import Answering, CoordinatorLink
from flowtrain.actors.replica_channel import channel_of
from flowtrain.config.run import RunConfig
from flowtrain.costs.profile_shapes import Mix, batch_sizes, image_sizes
from flowtrain.costs.profile_together import Sharded
from flowtrain.data.feed import Feed, NoShelf
from flowtrain.data.images import decode_image, tiles_of
from flowtrain.data.sources.base import BadSample, Buffer
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from flowtrain.models.device import device_name, opened_device
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import materialize
from flowtrain.training.mesh import init_backbone_group, open_listener
from flowtrain.training.peak import device_peak
from flowtrain.training.profile_backbone import STRATEGIES, BackboneProfiler, num_layers_of
from flowtrain.training.profile_device import launch_s, link_bandwidth, memory_bandwidth, memory_nbytes
from flowtrain.training.profile_encoder import measure_encoder, measure_encoder_layers
from flowtrain.training.profile_pieces import Pieces, pin_to
from flowtrain.types.memory import Extent
from flowtrain.types.plan import Degrees, Unit, UnitKind
from flowtrain.types.profile import BackboneTimes, CallTimes, DeviceReport, EncoderTimes, LayerTimes, ReplicaSteps
from flowtrain.types.samples import TEXT_NBYTES, SampleRef

_CALLS, _PAUSE_S = 50, 0.01
_FED = 256
"""About so many samples are fed."""
_ENDLESS = 10**6


class Echo(Answering):
    """Answers at once, so that a call can be timed."""

    async def ping(self) -> None:
        """Return at once."""

    async def processor_s(self) -> float:
        """Return the processor time of this process so far."""
        return time.process_time()


class _Memory(NoShelf):
    """Copies what it gets, as a segment does."""

    def put(self, pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
        """See ``Shelf``."""
        b"".join(pieces)
        return ()


class Profiler:
    """One rank of a tensor parallel group that measures. Call ``start`` first."""

    def __init__(self, config: RunConfig, rank: int, degrees: Degrees) -> None:
        self._config, self._rank, self._degrees = config, rank, degrees
        self._listener: socket.socket | None = None

    def open_rendezvous(self, host: str) -> int:
        """On rank 0: listen on ``host`` for the other ranks; returns the port."""
        self._listener = open_listener(host)
        return int(self._listener.getsockname()[1])

    def start(self, host: str, port: int) -> DeviceReport:
        """Join the group and measure the device; collective."""
        device, limits = opened_device(self._config.model.device), self._config.limits
        torch.set_num_threads(self._config.backbone.num_threads)
        self._family = family_from_config(self._config)
        self._group = init_backbone_group(
            self._rank,
            self._degrees,
            device,
            host=host,
            port=port,
            listener=self._listener,
            start_timeout_s=limits.start_limit_s,
            collective_timeout_s=limits.stall_timeout_s,
        )
        return DeviceReport(
            name=device_name(device),
            flops=device_peak(device, getattr(torch, self._config.model.dtype)).flops,
            memory_nbytes=memory_nbytes(device),
            bandwidth=memory_bandwidth(device),
            link=link_bandwidth(self._group) if self._group.world_size > 1 else None,
        )

    def calls(self, link: CoordinatorLink) -> CallTimes:
        """Measure calls to another actor; ``link`` leads to an ``Echo``."""
        seconds = []
        for _ in range(_CALLS):
            started_s = time.perf_counter()
            link.ask(Echo.ping)
            seconds.append(time.perf_counter() - started_s)
        answering_s, asking_s = -link.ask(Echo.processor_s), -time.process_time()
        for _ in range(_CALLS):  # a run's calls come one at a time: they wake both processes, with cold caches
            time.sleep(_PAUSE_S)
            link.ask(Echo.ping)
        asking_s += time.process_time()
        answering_s += link.ask(Echo.processor_s)
        return CallTimes(statistics.median(seconds), asking_s / _CALLS, answering_s / _CALLS)

    def feeding_s(self) -> float:
        """Return the processor seconds of a sample in a feeder: reading, sizing, tokenising and copying it."""
        training = self._config.training.model_copy(update={"max_steps": _ENDLESS, "num_epochs": None})
        feed = Feed.from_config(self._config.model_copy(update={"training": training}), shelf=_Memory())
        batch, found = training.global_batch_size, []
        try:
            # The first unit reads and compiles what is needed once, and does not count.
            for step in range(2 + _FED // batch):
                started_s = time.process_time()
                share = feed.next_unit(Unit(step, UnitKind.TRAIN, step + 1, step * batch, batch))
                found.append((time.process_time() - started_s, len(share.sized) + len(share.rejections)))
            return sum(seconds for seconds, _ in found[1:]) / max(sum(count for _, count in found[1:]), 1)
        finally:
            feed.close()

    def replica_steps(self, mixes: Sequence[Mix], sharding: Sharded) -> ReplicaSteps:
        """Measure steps of short microbatches, with parameters shared over the group's replicas; collective.

        In processor seconds of the process, whose other threads send and receive: waiting costs a core nothing.
        Gradients are reduced once a step, whatever is configured: the times of a reduction are then those of one.
        """
        shared = {"sharding": sharding, "hybrid_shard_size": None, "gradient_reduction": "step"}
        backbone = self._config.backbone.model_copy(update=shared)
        config = self._config.model_copy(update={"backbone": backbone})
        return self._backbone(config, time.process_time).replica_steps(mixes)

    def messages_s(self) -> float:
        """Return a rank's processor seconds for what a replica's ranks tell each other of a microbatch; collective.

        With pauses, as in a run: its threads sleep in between, and caches are cold.
        """
        channel = channel_of(self._group.process_group)
        order = bytes(TEXT_NBYTES * self._config.scheduler.microbatch_tokens)

        def tell() -> None:
            channel.share(order)
            channel.highest(0)

        tell()  # connects
        started_s = time.process_time()
        for _ in range(_CALLS):
            time.sleep(_PAUSE_S)
            tell()
        return (time.process_time() - started_s) / _CALLS

    def launch_s(self) -> float:
        """Measure a rank's end of a transfer between pipeline ranks; collective over two."""
        return launch_s(self._group)

    def hold_backbone(self, mix: Mix) -> float:
        """Make steps of the backbone this process's share of a device; returns the seconds of one."""
        return self._hold(self._backbone(self._config).piece(mix), self._config.backbone.num_threads)

    def hold_encoder(self, name: str, refs: Sequence[SampleRef]) -> float:
        """Make forwards of an encoder, of batches as large as a run's, this process's share; returns the seconds."""
        settings = self._config.encoders[name]
        torch.set_num_threads(settings.num_threads)
        pixels, _ = self._decoded(name, refs)
        size = sorted(pixels)[len(pixels) // 2]
        batch = [pixels[size]] * max(1, settings.max_batch_patches // size)
        module = self._family.load_encoder(name).to(self._group.device)
        return self._hold(lambda: module.encode(batch), settings.num_threads)

    def now_s(self) -> float:
        """Return the time by the node's monotonic clock."""
        return time.monotonic()

    def repeat(self, begin_s: float, end_s: float) -> float:
        """Do this process's share of the device for a time; see ``Pieces``."""
        return self._pieces.repeat(begin_s, end_s)

    def _hold(self, run: Callable[[], object], num_threads: int) -> float:
        device = self._group.device
        if device.type == "cpu":
            pin_to(num_threads)
        self._pieces = Pieces(run, device)
        return self._pieces.warm_up()

    def backbone(self, mixes: Sequence[Sequence[Mix]]) -> BackboneTimes:
        """Measure decoder layer, head, connector and optimizer over ``mixes[mix][length]``; collective."""
        return self._backbone(self._config).measure(mixes)

    def _backbone(self, config: RunConfig, now_s: Callable[[], float] | None = None) -> BackboneProfiler:
        torch.set_num_threads(config.backbone.num_threads)
        depth = self._family.text_config.num_hidden_layers
        return BackboneProfiler(config, self._family.shallow(num_layers_of(config, depth)), self._group, now_s)

    def encoder(self, name: str, refs: Sequence[SampleRef]) -> EncoderTimes:
        """Measure an encoder over the image sizes of these samples. Raises DataError if no image can be read."""
        settings = self._config.encoders[name]
        torch.set_num_threads(settings.num_threads)
        pixels, decode_s = self._decoded(name, refs)
        sizes = image_sizes(list(pixels))
        module = self._family.load_encoder(name).to(self._group.device)
        batches = batch_sizes(settings.max_batch_patches, sizes[0])
        chosen = {size: pixels[size] for size in sizes}
        seconds = measure_encoder(module, chosen, batches, settings.max_batch_patches)
        del module
        return EncoderTimes(sizes, batches, seconds, decode_s, self._encoder_layers(name, pixels[sizes[-1]]))

    def _encoder_layers(self, name: str, image: np.ndarray) -> dict[str, LayerTimes]:
        """Measure a trained layer of an encoder over one image in each memory strategy."""
        stage = self._family.encoder_skeleton(name)
        stage.to(getattr(torch, self._config.model.dtype))
        materialize(stage, self._group.device, self._family.encoder_weights(name), from_checkpoint=False)
        return measure_encoder_layers(stage, [image], STRATEGIES, self._group.device)

    def _decoded(self, name: str, refs: Sequence[SampleRef]) -> tuple[dict[int, np.ndarray], float]:
        """Return one preprocessed image or tile for each number of patches, and the mean seconds that one takes."""
        sources, limit = SourceSet.from_config(self._config.data), self._config.data.max_image_pixels
        pixels: dict[int, np.ndarray] = {}
        seconds, num_images = 0.0, 0
        for warm in (False, True):  # the first round reads and imports what is needed once, and does not count
            for ref in refs if warm else refs[:1]:
                started_s = time.thread_time()
                try:
                    images = [decode_image(image.read(), limit) for image in sources.read(ref).images]
                except BadSample:
                    continue
                arrays = [tiles_of(self._family.preprocess(name, image)) for image in images]
                if warm:
                    seconds, num_images = seconds + time.thread_time() - started_s, num_images + sum(map(len, arrays))
                for image, tiles in zip(images, arrays, strict=True):
                    layout = self._family.image_layout(name, *image.size)
                    assert layout.num_tiles == len(tiles), (layout, image.size)
                    pixels[layout.num_patches // layout.num_tiles] = tiles[0]
        if not num_images:
            raise DataError(f"encoders.{name}: none of {len(refs)} samples has an image that can be decoded")
        return pixels, seconds / num_images
