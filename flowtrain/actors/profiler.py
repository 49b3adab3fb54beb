"""An actor that measures a model's modules on one device and trains nothing."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from flowtrain.actors.link import Answering, CoordinatorLink
from flowtrain.config.run import RunConfig
from flowtrain.costs.profile_shapes import Mix, batch_sizes, image_sizes
from flowtrain.data.images import decode_image
from flowtrain.data.sources.base import BadSample
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from flowtrain.models.device import default_device, device_name
from flowtrain.models.families.registry import family_from_config
from flowtrain.training.mesh import init_backbone_group, open_listener
from flowtrain.training.peak import device_peak
from flowtrain.training.profile_backbone import BackboneProfiler, num_layers_of
from flowtrain.training.profile_device import link_bandwidth, memory_bandwidth, memory_nbytes
from flowtrain.training.profile_encoder import measure_encoder
from flowtrain.types.plan import Degrees
from flowtrain.types.profile import BackboneTimes, DeviceReport, EncoderTimes
from flowtrain.types.samples import SampleRef

_CALLS = 50


class Echo(Answering):
    """Answers at once, so that a call can be timed."""

    async def ping(self) -> None:
        """Return at once."""


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
        device, limits = default_device(self._config.model.device), self._config.limits
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

    def call_s(self, link: CoordinatorLink) -> float:
        """Return the median seconds of a call to another actor; ``link`` leads to an ``Echo``."""
        seconds = []
        for _ in range(_CALLS):
            started_s = time.perf_counter()
            link.ask(Echo.ping)
            seconds.append(time.perf_counter() - started_s)
        return statistics.median(seconds)

    def backbone(self, mixes: Sequence[Sequence[Mix]]) -> BackboneTimes:
        """Measure decoder layer, head, connector and optimizer over ``mixes[mix][length]``; collective."""
        torch.set_num_threads(self._config.backbone.num_threads)
        depth = self._family.text_config.num_hidden_layers
        source = self._family.shallow(num_layers_of(self._config, depth))
        return BackboneProfiler(self._config, source, self._group).measure(mixes)

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
        return EncoderTimes(sizes, batches, seconds, decode_s)

    def _decoded(self, name: str, refs: Sequence[SampleRef]) -> tuple[dict[int, np.ndarray], float]:
        """Return one preprocessed image for each number of patches, and the mean seconds that one takes."""
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
                arrays = [self._family.preprocess(name, image) for image in images]
                if warm:
                    seconds, num_images = seconds + time.thread_time() - started_s, num_images + len(arrays)
                for image, array in zip(images, arrays, strict=True):
                    pixels[self._family.image_layout(name, *image.size).num_patches] = array
        if not num_images:
            raise DataError(f"encoders.{name}: none of {len(refs)} samples has an image that can be decoded")
        return pixels, seconds / num_images
