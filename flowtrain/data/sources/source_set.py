"""All sources of a run under one index: the training mixture first, the held-out sets last."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.config.data import DataConfig, EvalConfig, SourceConfig
from flowtrain.costs.flops import IntArray
from flowtrain.data.sources.base import RawSample, Record, Source
from flowtrain.data.sources.block_cache import BlockCache
from flowtrain.data.sources.registry import index_source, open_source
from flowtrain.types.samples import SampleRef
from flowtrain.types.sources import SourceIndex


class SourceSet:
    """The training sources by index, then the held-out sets in the order of the configuration.

    eval_names: names of the held-out sets in the quarantine file.
    """

    def __init__(
        self,
        train: Sequence[Source],
        evaluations: Sequence[Source] = (),
        cache: BlockCache | None = None,
        eval_names: Sequence[str] = (),
    ) -> None:
        self.train = tuple(train)
        self.all = (*self.train, *evaluations)
        """The training sources, then the held-out sets."""
        self.eval_names = tuple(eval_names)
        self._cache = BlockCache() if cache is None else cache

    @staticmethod
    def index(config: DataConfig) -> tuple[SourceIndex, ...]:
        """Find the blocks of the training sources, then of the held-out sets; raises as ``index_source``."""
        return tuple(index_source(source) for source in _configs(config))

    @classmethod
    def from_config(cls, config: DataConfig, indexes: Sequence[SourceIndex] | None = None) -> SourceSet:
        """Open the sources of the configuration; raises DataError if a source cannot be used.

        indexes: what ``index`` returned, maybe in another process; None: they are found now.
        """
        indexes = cls.index(config) if indexes is None else indexes
        sources = [open_source(*pair) for pair in zip(_configs(config), indexes, strict=True)]
        num_train = len(config.sources)
        return cls(sources[:num_train], sources[num_train:], eval_names=config.eval_names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each training source."""
        return tuple(len(source) for source in self.train)

    @property
    def tables(self) -> tuple[IntArray, ...]:
        """The first rows of the blocks of each training source, ``[num_blocks + 1]``, as a ``Sampler`` takes them."""
        return tuple(source.index.first_rows for source in self.train)

    def eval_index(self, eval_set: int) -> int:
        """Return the value of ``SampleRef.source`` for rows of a held-out set, by its number."""
        return len(self.train) + eval_set

    @property
    def names(self) -> list[str]:
        """Names of all sources, as the quarantine file has them."""
        return [*(source.name for source in self.train), *self.eval_names]

    def source(self, index: int) -> Source:
        """Return the source for a value of ``SampleRef.source``."""
        return self.all[index]

    def block_of(self, source: int, row: int) -> int:
        """Return the block of a source that holds a row."""
        return self.source(source).index.block_of(row)

    def rows_of(self, source: int, block: int) -> tuple[int, int]:
        """Return the first row of a block, and the row after its last."""
        first_rows = self.source(source).index.first_rows
        return int(first_rows[block]), int(first_rows[block + 1])

    def held_nbytes(self, source: int, block: int, alignment: int) -> int:
        """Return the room in a segment that a block's images get; every row's is aligned."""
        return int(self.source(source).index.held_nbytes(alignment)[block])

    def read_block(self, source: int, block: int) -> Sequence[Record]:
        """Return all rows of a block in file order; raises as ``Source.read_block``."""
        return self.source(source).read_block(block)

    def read(self, ref: SampleRef) -> RawSample:
        """Return a sample, wherever it is; raises BadSample if it must be rejected, and as ``record``."""
        return self.record(ref).sample()

    def record(self, ref: SampleRef) -> Record:
        """Return a row, wherever it is; the blocks that were read last are kept.

        Raises SourceReadError if it cannot be read, DataError for a damaged file.
        """
        source = self.source(ref.source)
        index = source.index
        if not 0 <= ref.row < index.num_rows:
            raise IndexError(f"row {ref.row} is outside {source.name} ({index.num_rows} rows)")
        block = index.block_of(ref.row)
        nbytes = int(max(index.block_nbytes[block], index.image_nbytes[block]))
        records = self._cache.get((ref.source, block), nbytes, lambda: source.read_block(block))
        return records[ref.row - int(index.first_rows[block])]


def _configs(config: DataConfig) -> list[SourceConfig | EvalConfig]:
    return [*config.sources, *config.eval_sets.values()]
