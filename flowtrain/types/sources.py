"""What one process finds out about a data source, so that no other has to list or open its files for it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class SourceIndex:
    """The files of a source and its blocks: row groups, spans of a tar shard, spans of a JSON.

    A block is what is read from storage at once. Blocks follow each other in the order of files and rows.
    """

    files: tuple[str, ...]
    """Paths or URLs, in the order of their names."""
    block_files: npt.NDArray[np.int32]
    """``[num_blocks]``: the file of each block, an index into ``files``."""
    block_places: npt.NDArray[np.int64]
    """``[num_blocks]``: where a block starts in its file: the number of a row group, or a byte offset."""
    block_nbytes: npt.NDArray[np.int64]
    """``[num_blocks]``: bytes of the file that a block takes."""
    image_nbytes: npt.NDArray[np.int64]
    """``[num_blocks]``: bytes of a block's encoded images as they are stored; 0 where images are files. Images that
    occur several times in a block may be stored once."""
    first_rows: npt.NDArray[np.int64]
    """``[num_blocks + 1]``: the first row of each block, and the number of rows."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SourceIndex):
            return NotImplemented
        return all(np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.first_rows[-1])

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_files)

    def held_nbytes(self, alignment: int) -> npt.NDArray[np.int64]:
        """Return the room in a segment that each block's images get, ``[num_blocks]``; every row's is aligned."""
        # No more rows have an image than there are bytes of images.
        rows: npt.NDArray[np.int64] = np.minimum(np.diff(self.first_rows), self.image_nbytes)
        return self.image_nbytes + rows * alignment

    def block_of(self, row: int) -> int:
        """Return the block that holds a row."""
        return int(np.searchsorted(self.first_rows, row, side="right")) - 1

    def place_of(self, row: int) -> tuple[str, int]:
        """Return the file that holds a row, and the row's number in it, from 0."""
        file = self.block_files[self.block_of(row)]
        first_block = int(np.searchsorted(self.block_files, file))
        return self.files[file], row - int(self.first_rows[first_block])
