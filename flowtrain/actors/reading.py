"""A backbone rank reads its share of a microbatch's bytes from the pool, and assembles the microbatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from flowtrain.actors.decoding import Decoded, ImageReader, ImageSizes
from flowtrain.actors.spans import SpanLog
from flowtrain.errors import DataError
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.staging import DeviceStaging
from flowtrain.training.batch import ImageBatch, PackedBatch, SampleText
from flowtrain.types.memory import Extent
from flowtrain.types.messages import LocatedTexts, MicrobatchLocation, PartLocation
from flowtrain.types.plan import StepPlan
from flowtrain.types.samples import FED_PARTS, IMAGES_PART, TEXT_PART

PackTexts = Callable[[list[SampleText]], PackedBatch]
Exchange = Callable[[torch.Tensor, int], None]
"""Completes a tensor on all ranks of the tensor parallel group: rank i has filled the i-th piece of that length."""

SHARE_ALIGNMENT = 64
"""Shares begin at multiples of so many bytes."""


@dataclass(frozen=True)
class Fetched:
    """A microbatch that the rank has read and assembled."""

    slot: int
    batch: PackedBatch
    fetch_s: float
    """Time to read and assemble it."""
    shared: torch.Tensor | None = None
    """Bytes of its features, of which this rank has read its share; None if ``batch`` has what the rank needs."""
    ready: torch.Event | None = None
    """On an accelerator, an event after the copies that brought it there."""
    read_nbytes: int = 0
    """Bytes of features or encoded images that this rank read for it."""

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of it."""
        return [*self.batch.tensors(), *([] if self.shared is None else [self.shared])]


class MicrobatchReader:
    """Reads microbatches for one rank, from one thread.

    A tensor parallel group reads features once: each rank reads an equal share of a microbatch's bytes, and the
    training threads exchange the shares when they take the microbatch. The leader reads the texts for all ranks.

    In ``mode: monolithic`` there are no features in the pool. The leader decodes images too, before it shares the
    microbatch, so that all ranks leave out the same bad samples and know the size of each image.

    pool: None for a rank that reads nothing: it is on a later pipeline stage, which needs no features.
    pack: assembles a microbatch without its features.
    feature_dim, feature_dtype: width and type of a feature row in the pool.
    tp_rank, tp_size: which share of the features it reads, of how many.
    staging: brings features onto an accelerator; None where the rank computes on the CPU.
    exchange: for the training thread; not called if there is one share.
    rows_of: feature rows of an image of this height and width (pixels) in the tower; None: ranks have no tower.
    images: reads images for the encoder's first stage; None on ranks without it.
    """

    def __init__(
        self,
        *,
        dp_rank: int,
        pool: Pool | None,
        pack: PackTexts,
        feature_dim: int,
        feature_dtype: torch.dtype,
        spans: SpanLog,
        tp_rank: int = 0,
        tp_size: int = 1,
        staging: DeviceStaging | None = None,
        exchange: Exchange | None = None,
        rows_of: Callable[[tuple[int, int]], int] | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self._dp_rank = dp_rank
        self._pool = pool
        self._pack = pack
        self._feature_dim = feature_dim
        self._feature_dtype = feature_dtype
        self._spans = spans
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._staging = staging
        self._exchange = exchange
        self._rows_of = rows_of
        self._images = images
        self._decoded: Decoded | None = None  # of the microbatch that ``lead`` returned last
        self._started_s: float | None = None

    def lead(self, location: MicrobatchLocation) -> LocatedTexts:
        """Return what all ranks need of a microbatch, for the leader; ``read`` comes next. Raises as ``Pool.get``."""
        assert self._pool is not None, "the leader is on the first stage"
        self._started_s = time.monotonic()
        self._decoded = None
        texts = self._pool.get_batch([part.extents for part in _texts(location)])
        order = LocatedTexts(location, tuple([data.tobytes() for data in texts]))
        if self._images is None:
            return order
        self._decoded = self._decode(self._images, location)
        return replace(order, image_sizes=self._decoded.sizes, rejections=self._decoded.rejections)

    def read(self, plan: StepPlan, order: LocatedTexts) -> Fetched:
        """Read this rank's share and assemble the microbatch. Raises as ``Pool.get``."""
        started, self._started_s = self._started_s or time.monotonic(), None
        location, texts = order.location, order.texts
        assert texts is not None
        rejected = {*location.rejected, *(rejection.ref.position for rejection in order.rejections)}
        samples = plan.microbatch(location.slot, self._dp_rank).samples
        num_tokens = {sample.position: sample.num_tokens for sample in samples if sample.position not in rejected}
        positions = list(num_tokens)
        text_of = {part.position: text for part, text in zip(_texts(location), texts, strict=True)}
        features_of: dict[int, list[Extent]] = {}
        for part in location.parts:
            if part.part not in FED_PARTS:
                features_of.setdefault(part.position, []).extend(part.extents)
        sizes_of = _sizes_of(order, rejected)
        decoded = self._decoded_again(order, rejected)
        with self._staging.aside() if self._staging is not None else nullcontext():
            batch = self._pack(
                [
                    SampleText(
                        position,
                        np.frombuffer(text_of[position], np.int32).reshape(-1, num_tokens[position]),
                        self._num_rows(position, features_of.get(position, []), sizes_of.get(position, ())),
                    )
                    for position in positions
                ]
            )
            extents = [extent for position in positions for extent in features_of.get(position, [])]
            features = self._read_features(extents) if self._pool is not None and extents else None
            if features is not None and self._tp_size == 1:
                batch, features = self._with_features(batch, features), None
            if self._rows_of is not None:
                batch = replace(batch, images=self._image_batch(positions, sizes_of, decoded))
        ready = self._staging.mark() if self._staging is not None else None
        finished = time.monotonic()
        read_nbytes = self._read_nbytes(location, rejected)
        unit = plan.unit.index
        self._spans.add("fetch", started, finished, unit=unit, microbatch=location.slot, nbytes=read_nbytes)
        return Fetched(location.slot, batch, finished - started, features, ready, read_nbytes)

    def complete(self, fetched: Fetched) -> Fetched:
        """Return a microbatch with its features; for the training thread, in the same order on all ranks."""
        if self._staging is not None and fetched.ready is not None:
            self._staging.hand_over(fetched.tensors(), fetched.ready)
        features = fetched.shared
        if features is None:
            return fetched
        assert self._exchange is not None
        self._exchange(features, share_nbytes(len(features), self._tp_size))
        return replace(fetched, batch=self._with_features(fetched.batch, features), shared=None)

    @property
    def _row_nbytes(self) -> int:
        return self._feature_dim * self._feature_dtype.itemsize

    def _read_nbytes(self, location: MicrobatchLocation, rejected: Collection[int]) -> int:
        """Return the bytes of features or images that this rank has read of a microbatch."""
        if self._pool is None:
            return 0
        parts = [part for part in location.parts if part.part != TEXT_PART and part.position not in rejected]
        extents = [extent for part in parts for extent in part.extents]
        if self._images is None:
            extents, _ = share_of(extents, self._tp_rank, self._tp_size)
        return sum(extent.nbytes for extent in extents)

    def _decode(self, images: ImageReader, location: MicrobatchLocation, leave_out: Collection[int] = ()) -> Decoded:
        started = time.monotonic()
        decoded = images.read(location, leave_out)
        self._spans.add("decode", started, time.monotonic(), samples=len(decoded.pixels) + len(decoded.rejections))
        return decoded

    def _decoded_again(self, order: LocatedTexts, rejected: Collection[int]) -> Decoded | None:
        """Return the images that this rank needs; the leader has decoded them already."""
        if self._images is None:
            return None
        decoded, self._decoded = self._decoded, None
        if decoded is not None:
            return decoded
        decoded = self._decode(self._images, order.location, rejected)
        if decoded.rejections:
            first = decoded.rejections[0]
            raise DataError(
                f"position {first.ref.position}: the first rank of the replica decoded its images, and this one cannot "
                f"({first.detail}); all ranks must have the same version of Pillow"
            )
        return decoded

    def _image_batch(
        self, positions: Sequence[int], sizes_of: Mapping[int, ImageSizes], decoded: Decoded | None
    ) -> ImageBatch:
        sizes = tuple([size for position in positions for size in sizes_of.get(position, ())])
        if decoded is None:
            return ImageBatch(sizes)
        arrays = [array for position in positions for array in decoded.pixels.get(position, ())]
        pixels = tuple([torch.from_numpy(array) for array in arrays])
        if self._staging is not None:
            pixels = tuple([self._staging.put(each) for each in pixels])
        return ImageBatch(sizes, pixels)

    def _num_rows(self, position: int, extents: Sequence[Extent], sizes: ImageSizes) -> int:
        if self._rows_of is not None:
            return sum(map(self._rows_of, sizes))
        nbytes = sum(extent.nbytes for extent in extents)
        num_rows, rest = divmod(nbytes, self._row_nbytes)
        if rest:
            raise DataError(
                f"position {position}: {nbytes} bytes of features are no rows of width {self._feature_dim} "
                f"({self._feature_dtype}); the encoder and the connector belong to different models"
            )
        return num_rows

    def _read_features(self, extents: Sequence[Extent]) -> torch.Tensor:
        """Return the bytes of these features, of which this rank's share is read."""
        nbytes = sum(extent.nbytes for extent in extents)
        mine, place = share_of(extents, self._tp_rank, self._tp_size)
        if self._staging is not None:
            memory = self._staging.empty(nbytes)
            self._staging.read_into(mine, memory[place])
            return memory
        assert self._pool is not None
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._pool.read_into(mine, memory.numpy()[place])
        return memory

    def _with_features(self, batch: PackedBatch, data: torch.Tensor) -> PackedBatch:
        return batch.with_features(data.view(self._feature_dtype).view(-1, self._feature_dim))


def share_nbytes(nbytes: int, count: int) -> int:
    """Return the length of each of ``count`` shares of so many bytes; the last ones may be shorter, or empty."""
    return nbytes if count == 1 else -(-nbytes // (count * SHARE_ALIGNMENT)) * SHARE_ALIGNMENT


def share_of(extents: Sequence[Extent], index: int, count: int) -> tuple[list[Extent], slice]:
    """Return the extents of one of ``count`` shares of the bytes of ``extents``, and which of these bytes they are."""
    total = sum(extent.nbytes for extent in extents)
    each = share_nbytes(total, count)
    first, end = min(index * each, total), min((index + 1) * each, total)
    mine, offset = [], 0
    for extent in extents:
        start, stop = max(first - offset, 0), min(end - offset, extent.nbytes)
        if start < stop:
            mine.append(Extent(extent.gva + start, stop - start))
        offset += extent.nbytes
    return mine, slice(first, end)


def _sizes_of(order: LocatedTexts, rejected: Collection[int]) -> dict[int, ImageSizes]:
    """Return the sizes of the images of each sample that runs and has some."""
    images = [part.position for part in order.location.parts if part.part == IMAGES_PART]
    return dict(zip((p for p in images if p not in rejected), order.image_sizes, strict=True))


def _texts(location: MicrobatchLocation) -> list[PartLocation]:
    return [part for part in location.parts if part.part == TEXT_PART]
