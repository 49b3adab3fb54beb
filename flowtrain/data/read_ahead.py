"""Reads blocks before their turn, in threads, so that reading overlaps with sizing and putting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from flowtrain.data.sampler import Draw, Sampler
from flowtrain.data.sources.base import Record
from flowtrain.data.sources.source_set import SourceSet

MOST_AHEAD = 1 << 16
"""Positions that are searched for a feeder's next block: a feeder may have no draw for long, or none at all."""


class BlockKey(NamedTuple):
    """A block in one epoch of its source."""

    source: int
    epoch: int
    block: int


class ReadAhead:
    """Reads the blocks that a feeder will need next, each once. Not thread-safe.

    sources: has the blocks.
    scout: a sampler of its own, which draws ahead of the feeder's to find these blocks.
    owns: whether the feeder handles a draw.
    num_blocks: blocks that are read at the same time, or wait here. Whoever takes one calls ``read_more`` once it has
    dropped the rows, so that no more of them are in memory.
    end: position at which the run ends; nothing is read for later ones.
    """

    def __init__(
        self, sources: SourceSet, scout: Sampler, owns: Callable[[Draw], bool], num_blocks: int, end: int
    ) -> None:
        self._sources = sources
        self._scout = scout
        self._owns = owns
        self._num_blocks = num_blocks
        self._end = end
        self._position = scout.state().next_position
        self._seen: set[BlockKey] = set()
        self._reads: dict[BlockKey, Future[Sequence[Record]]] = {}
        self._threads = ThreadPoolExecutor(num_blocks, thread_name_prefix="read")
        self.read_more(self._position)

    def take(self, key: BlockKey) -> Sequence[Record]:
        """Return the rows of a block, in file order. Raises as ``Source.read_block``."""
        self._seen.add(key)
        read = self._reads.pop(key, None)
        return read.result() if read is not None else self._sources.read_block(key.source, key.block)

    def forget(self, key: BlockKey) -> None:
        """Forget a block whose rows were all drawn."""
        self._seen.discard(key)

    def read_more(self, position: int) -> None:
        """Begin to read the next blocks, as far as there is room for them.

        position: where the feeder stands; blocks of earlier draws are open, or over.
        """
        end = min(self._end, position + MOST_AHEAD)
        while len(self._reads) < self._num_blocks and self._position < end:
            (draw,) = self._scout.take(1)
            self._position += 1
            if draw.ref.position < position or not self._owns(draw):
                continue
            ref = draw.ref
            key = BlockKey(ref.source, ref.epoch, self._sources.block_of(ref.source, ref.row))
            if key not in self._seen:
                self._seen.add(key)
                self._reads[key] = self._threads.submit(self._sources.read_block, key.source, key.block)

    def close(self) -> None:
        """Stop reading; reads that run are waited for."""
        self._threads.shutdown(wait=True, cancel_futures=True)
