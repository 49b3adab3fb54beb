"""A backbone rank reads its share of a microbatch's bytes from the pool, and assembles the microbatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from flowtrain.actors.spans import SpanLog
from flowtrain.errors import DataError
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.staging import DeviceStaging
from flowtrain.training.batch import PackedBatch, SampleText
from flowtrain.types.memory import Extent
from flowtrain.types.messages import LocatedTexts, MicrobatchLocation, PartLocation
from flowtrain.types.plan import StepPlan
from flowtrain.types.samples import TEXT_PART

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

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of it."""
        return [*self.batch.tensors(), *([] if self.shared is None else [self.shared])]


class MicrobatchReader:
    """Reads microbatches for one rank, from one thread.

    A tensor parallel group reads features once: each rank reads an equal share of a microbatch's bytes, and the
    training threads exchange the shares when they take the microbatch. The leader reads the texts for all ranks.

    pool: None for a rank that reads nothing: it is on a later pipeline stage, which needs no features.
    pack: assembles a microbatch without its features.
    feature_dim, feature_dtype: width and type of a feature row in the pool.
    tp_rank, tp_size: which share of the features it reads, of how many.
    staging: brings features onto an accelerator; None where the rank computes on the CPU.
    exchange: for the training thread; not called if there is one share.
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
        self._started_s: float | None = None

    def read_texts(self, location: MicrobatchLocation) -> tuple[bytes, ...]:
        """Return the bytes of a microbatch's texts. Raises as ``Pool.get``."""
        assert self._pool is not None, "the leader is on the first stage"
        self._started_s = time.time()
        return tuple([data.tobytes() for data in self._pool.get_batch([part.extents for part in _texts(location)])])

    def read(self, plan: StepPlan, order: LocatedTexts) -> Fetched:
        """Read this rank's share and assemble the microbatch. Raises as ``Pool.get``."""
        started, self._started_s = self._started_s or time.time(), None
        location, texts = order.location, order.texts
        assert texts is not None
        rejected = set(location.rejected)
        samples = plan.microbatch(location.slot, self._dp_rank).samples
        positions = [sample.position for sample in samples if sample.position not in rejected]
        text_of = {part.position: text for part, text in zip(_texts(location), texts, strict=True)}
        features_of: dict[int, list[Extent]] = {}
        for part in location.parts:
            if part.part != TEXT_PART:
                features_of.setdefault(part.position, []).extend(part.extents)
        with self._staging.aside() if self._staging is not None else nullcontext():
            batch = self._pack(
                [
                    SampleText(
                        position,
                        np.frombuffer(text_of[position], np.int32).reshape(2, -1),
                        self._num_rows(position, features_of.get(position, [])),
                    )
                    for position in positions
                ]
            )
            extents = [extent for position in positions for extent in features_of.get(position, [])]
            features = self._read_features(extents) if self._pool is not None and extents else None
            if features is not None and self._tp_size == 1:
                batch, features = self._with_features(batch, features), None
        ready = self._staging.mark() if self._staging is not None else None
        finished = time.time()
        self._spans.add("fetch", started, finished, unit=plan.unit.index, microbatch=location.slot)
        return Fetched(location.slot, batch, finished - started, features, ready)

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

    def _num_rows(self, position: int, extents: Sequence[Extent]) -> int:
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


def _texts(location: MicrobatchLocation) -> list[PartLocation]:
    return [part for part in location.parts if part.part == TEXT_PART]
