"""Blocks of files, and the source that reads them in the way of its format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from flowtrain.data.sources.base import Record
from flowtrain.types.sources import SourceIndex

INDEX_THREADS = 16
"""Files that are opened at a time to find their blocks: most of it is waiting for the storage."""


class Block(NamedTuple):
    """What is read at once; the fields are those of ``SourceIndex``."""

    place: int
    nbytes: int
    image_nbytes: int
    num_rows: int


class Format(Protocol):
    """How the files of a format are cut into blocks, and read."""

    def find_blocks(self, path: str) -> Sequence[Block]:
        """Return the blocks of a file in their order; raises DataError if it cannot be used, SourceReadError."""

    def read_block(self, path: str, block: Block) -> Sequence[Record]:
        """Return all rows of a block in file order; raises as ``Source.read_block``."""


class StoredSource:
    """The rows of files of one format."""

    def __init__(self, name: str, index: SourceIndex, format: Format) -> None:
        self.name = name
        self.index = index
        self._format = format

    def __len__(self) -> int:
        return self.index.num_rows

    def read_block(self, block: int) -> Sequence[Record]:
        """Return all rows of a block in file order; raises SourceReadError, or DataError for a damaged file."""
        index = self.index
        first_row, next_row = index.first_rows[block : block + 2]
        numbers = index.block_places[block], index.block_nbytes[block], index.image_nbytes[block], next_row - first_row
        return self._format.read_block(index.files[index.block_files[block]], Block(*map(int, numbers)))


def index_files(files: Sequence[str], find_blocks: Callable[[str], Sequence[Block]]) -> SourceIndex:
    """Find the blocks of all files, several at a time; raises as ``find_blocks`` for the first file at fault."""
    with ThreadPoolExecutor(min(INDEX_THREADS, len(files)), thread_name_prefix="index") as pool:
        try:
            found = list(pool.map(find_blocks, files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    blocks = np.array([block for of_file in found for block in of_file if block.num_rows], np.int64).reshape(-1, 4)
    counts = [sum(block.num_rows > 0 for block in of_file) for of_file in found]
    return SourceIndex(
        files=tuple(files),
        block_files=np.repeat(np.arange(len(files), dtype=np.int32), counts),
        block_places=blocks[:, 0].copy(),
        block_nbytes=blocks[:, 1].copy(),
        image_nbytes=blocks[:, 2].copy(),
        first_rows=np.concatenate(([0], np.cumsum(blocks[:, 3]))).astype(np.int64),
    )


def spans_of(rows: Iterator[tuple[int, int, int]], max_rows: int, max_nbytes: int) -> Iterator[Block]:
    """Cut a file into spans of whole rows; a row larger than ``max_nbytes`` is alone in its span.

    rows: (start, end, bytes of its images) of each row; the rows follow each other without a gap.
    """
    place = end = image_nbytes = num_rows = 0
    for start, row_end, row_image_nbytes in rows:
        if num_rows and (num_rows == max_rows or row_end - place > max_nbytes):
            yield Block(place, end - place, image_nbytes, num_rows)
            image_nbytes = num_rows = 0
        if not num_rows:
            place = start
        end, image_nbytes, num_rows = row_end, image_nbytes + row_image_nbytes, num_rows + 1
    if num_rows:
        yield Block(place, end - place, image_nbytes, num_rows)
