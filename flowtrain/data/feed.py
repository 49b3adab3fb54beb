"""Draws, reads and sizes a feeder's share of units, and puts it on its shelf; the feeder actor wraps this."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from flowtrain.config.data import DataConfig
from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import IntArray
from flowtrain.data.grouped_rows import GroupedOrder, GroupedRows
from flowtrain.data.open_blocks import HeldRow, OpenBlocks, Shelf, open_blocks_of, sample_of
from flowtrain.data.read_ahead import ReadAhead
from flowtrain.data.sampler import Draw, Sampler
from flowtrain.data.sizing import LoadedSample, SizedResult, Sizer
from flowtrain.data.sources.base import Buffer, RawSample
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from flowtrain.flow.units import num_steps_of
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.memory import Extent
from flowtrain.types.messages import PartReady, Remake
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, Rejection, SampleRef, SamplerState, SizedSample
from flowtrain.types.sources import SourceIndex

_FILE_THREADS = 8
"""Images that are files of their own, read at the same time."""

Found = HeldRow | LoadedSample | Rejection


@dataclass(slots=True)
class Share:
    """A feeder's samples of a unit, in the order of their positions; parts as in ``FeedReport``."""

    sized: list[SizedSample] = field(default_factory=list)
    texts: list[PartReady] = field(default_factory=list)
    images: list[PartReady] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)


class NoShelf:
    """Keeps nothing, for those who only want to know sizes."""

    def put(self, pieces: Sequence[Buffer]) -> tuple[Extent, ...]:
        """See ``Shelf``."""
        return ()

    def share(self, extents: Sequence[Extent]) -> None:
        """See ``Shelf``."""

    def free(self, extents: Sequence[Extent]) -> None:
        """See ``Shelf``."""


@dataclass(frozen=True, slots=True)
class FeederPlace:
    """Which feeder this is, and of how many."""

    feeder: int = 0
    num_feeders: int = 1

    def owns(self, draw: Draw) -> bool:
        """Whether the feeder handles a draw. All rows of an open block go to one feeder."""
        return draw.lane % self.num_feeders == self.feeder


class Feed:
    """Sizes a feeder's share of one unit after another. Not thread-safe.

    config: the run's ``data`` section.
    sampler: at the position where the feed starts.
    shelf: takes texts and encoded images.
    end: position at which the run ends.
    alignment: of what the shelf takes, in bytes.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: SourceSet,
        sampler: Sampler,
        sizer: Sizer,
        shelf: Shelf,
        place: FeederPlace = FeederPlace(),
        end: int = 1 << 62,
        alignment: int = 256,
    ) -> None:
        self._sources = sources
        self._sampler = sampler
        self._sizer = sizer
        self._shelf = shelf
        self._place = place
        self._files = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="files")
        self._reader: ReadAhead | None = None
        self._blocks: OpenBlocks | None = None
        if config.shuffle != "rows":
            self._reader = ReadAhead(sources, sampler.copy(), place.owns, config.read_ahead_blocks, end)
            self._blocks = OpenBlocks(sources, self._reader, shelf, sizer.load, alignment, open_blocks_of(sampler))

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        indexes: Sequence[SourceIndex] | None = None,
        state: SamplerState | None = None,
        shelf: Shelf | None = None,
        place: FeederPlace = FeederPlace(),
    ) -> Feed:
        """Open sources and tokenizer; raises ConfigError or DataError if one of them cannot be used.

        indexes: of the sources; None: they are made here. state: where to continue; None: at the first position. Raises
        CheckpointError for a state of other data or of another order. shelf: None: sizes only.
        """
        sources = SourceSet.from_config(config.data, indexes)
        family = family_from_config(config)
        sampler = sampler_from_config(config, sources.tables)
        if state is not None:
            sampler.restore(state)
        sizer = Sizer(family, family.tokenizer, config.data, keeps_images=config.mode != "llm_only")
        num_steps, total = num_steps_of(config.training, sources.sizes)
        end = total if total is not None else num_steps * config.training.global_batch_size
        shelf, alignment = shelf if shelf is not None else NoShelf(), config.pool.alignment
        return cls(config.data, sources, sampler, sizer, shelf, place, end, alignment)

    def next_unit(self, unit: Unit, consumed: Collection[int] = ()) -> Share:
        """Size and put the feeder's samples of a unit.

        Training units must come in the order of their positions; an evaluation reads the first rows of its set.
        consumed: positions to draw without sizing them. Raises SourceReadError if a source cannot be read.
        """
        share = Share()
        for ref, found in self._found(self._draws(unit), unit.kind, consumed):
            if isinstance(found, Rejection):
                share.rejections.append(found)
                continue
            result = self._sizer.size(ref, found.measured)
            if isinstance(result, SizedResult):
                self._put(share, result, found)
                continue
            share.rejections.append(result)
            if isinstance(found, HeldRow):
                self._shelf.free(found.extents)
        return share

    def remake(self, order: Remake) -> list[PartReady]:
        """Put parts of a sample again that were lost with their segment; they equal the first ones.

        Raises DataError if the sample is rejected now, SourceReadError if it cannot be read.
        """
        ref = order.ref
        raw = self._read(ref)
        loaded = raw if isinstance(raw, Rejection) else self._sizer.load(ref, raw)
        result = loaded if isinstance(loaded, Rejection) else self._sizer.size(ref, loaded.measured)
        if isinstance(result, Rejection):
            name = self._sources.source(ref.source).name
            raise DataError(
                f"position {ref.position} (row {ref.row} of {name}) was sized once and is rejected now "
                f"({result.reason.value}: {result.detail}); do not change the data during a run"
            )
        assert isinstance(loaded, LoadedSample)
        pieces: dict[str, Sequence[Buffer]] = {TEXT_PART: [result.text.data.cast("B")], IMAGES_PART: loaded.images}
        return [PartReady(ref.position, name, 0, self._shelf.put(pieces[name])) for name in order.parts]

    def state(self) -> SamplerState:
        """Return the sampler's state after the last drawn unit (the backbone trains it later)."""
        return self._sampler.state()

    def drop(self) -> None:
        """Free what lies on the shelf for later units; the feed sizes no more."""
        if self._blocks is not None:
            self._blocks.drop()

    def close(self) -> None:
        """End the reading threads."""
        self._files.shutdown(wait=True, cancel_futures=True)
        if self._reader is not None:
            self._reader.close()

    # --- drawing ------------------------------------------------------------------------------------------------

    def _draws(self, unit: Unit) -> list[Draw]:
        """Return the feeder's draws of a unit."""
        if unit.kind is UnitKind.EVAL:
            index = self._sources.eval_index(unit.eval_set)
            blocks = [self._sources.block_of(index, row) for row in range(unit.num_positions)]
            draws = [
                Draw(SampleRef(position, index, row, 0), blocks[row]) for row, position in enumerate(unit.positions)
            ]
        else:
            draws = self._sampler.take(unit.num_positions)
            if self._reader is not None:
                self._reader.read_more(unit.first_position)
            first = draws[0].ref.position
            assert first == unit.first_position, (
                f"unit {unit.index} starts at position {unit.first_position}, but the sampler was at {first}"
            )
        return [draw for draw in draws if self._place.owns(draw)]

    def _found(
        self, draws: Sequence[Draw], kind: UnitKind, consumed: Collection[int]
    ) -> Iterator[tuple[SampleRef, Found]]:
        """Yield the draws' samples in order, while image files of those after them are read."""
        blocks = self._blocks if kind is UnitKind.TRAIN else None
        begun: deque[tuple[SampleRef, Found | Future[LoadedSample | Rejection]]] = deque()
        for draw in draws:
            if draw.ref.position in consumed:
                if blocks is not None:
                    blocks.skip(draw)
                continue
            begun.append((draw.ref, self._begin(draw, blocks)))
            if len(begun) > 2 * _FILE_THREADS:
                yield _finished(begun.popleft())
        while begun:
            yield _finished(begun.popleft())

    def _begin(self, draw: Draw, blocks: OpenBlocks | None) -> Found | Future[LoadedSample | Rejection]:
        row = blocks.take(draw) if blocks is not None else self._read(draw.ref)
        if not isinstance(row, RawSample):
            return row
        if any(image.is_file for image in row.images):
            return self._files.submit(self._sizer.load, draw.ref, row)
        return self._sizer.load(draw.ref, row)

    def _read(self, ref: SampleRef) -> RawSample | Rejection:
        """Read a row wherever it lies."""
        return sample_of(ref, self._sources.record(ref))

    # --- putting ------------------------------------------------------------------------------------------------

    def _put(self, share: Share, result: SizedResult, found: HeldRow | LoadedSample) -> None:
        position = result.sample.position
        if result.sample.image_nbytes:
            extents = found.extents if isinstance(found, HeldRow) else self._shelf.put(found.images)
            share.images.append(PartReady(position, IMAGES_PART, 0, extents))
        share.texts.append(PartReady(position, TEXT_PART, 0, self._shelf.put([result.text.data.cast("B")])))
        share.sized.append(result.sample)


def _finished(begun: tuple[SampleRef, Found | Future[LoadedSample | Rejection]]) -> tuple[SampleRef, Found]:
    ref, found = begun
    return ref, found.result() if isinstance(found, Future) else found


def sampler_from_config(config: RunConfig, tables: Sequence[IntArray]) -> Sampler:
    """Build the run's sampler at its first position; tables: the first rows of the blocks of each training source."""
    weights = [source.weight for source in config.data.sources]
    order_of = None if config.data.grouping is None else _grouped(config, tables)
    return Sampler(tables, weights, config.seed, config.data.shuffle, config.data.shuffle_blocks, order_of)


def _grouped(config: RunConfig, tables: Sequence[IntArray]) -> GroupedOrder:
    """The orders of the only source, group after group."""
    grouping, capacity = config.data.grouping, config.scheduler.microbatch_tokens
    assert grouping is not None and len(tables) == 1
    rows = GroupedRows.read(grouping.sizes, int(tables[0][-1]), capacity)
    return GroupedOrder(rows, capacity, grouping.vision_tokens, config.seed)


def with_vision_quota(config: RunConfig, tables: Sequence[IntArray]) -> RunConfig:
    """Return the configuration with the quota of ``data.grouping`` that follows from the sizes, if it has none."""
    grouping, capacity = config.data.grouping, config.scheduler.microbatch_tokens
    if grouping is None or grouping.vision_tokens is not None:
        return config
    rows = GroupedRows.read(grouping.sizes, int(tables[0][-1]), capacity)
    known = grouping.model_copy(update={"vision_tokens": rows.vision_quota(capacity)})
    return config.model_copy(update={"data": config.data.model_copy(update={"grouping": known})})
