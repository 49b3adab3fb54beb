"""Positions of three axes (time, row, column), as Qwen3-VL counts them (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def grid_positions(is_image: npt.NDArray[np.bool_], grids: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """Return the position of each token of a sample, int32 ``[3, T]``: time, row, column.

    is_image: which tokens are images', bool ``[T]``. grids: rows and columns of the tokens of each image, in order; all
    images are whole.

    Text counts on, alike on all axes. An image has one time; its rows and columns count from that. What follows it goes
    on after the larger of its sides.
    """
    positions = np.empty((3, len(is_image)), dtype=np.int32)
    places, counts = np.flatnonzero(is_image), [rows * columns for rows, columns in grids]
    assert len(places) == sum(counts), f"{len(places)} image tokens, and grids for {sum(counts)}"
    done = taken = position = 0
    for (rows, columns), count in zip(grids, counts, strict=True):
        first = int(places[taken])
        assert places[taken + count - 1] == first + count - 1, (first, rows, columns)
        positions[:, done:first] = np.arange(position, position + first - done)
        position += first - done
        image = positions[:, first : first + count]
        image[0] = position
        image[1] = position + np.repeat(np.arange(rows), columns)
        image[2] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        done, taken = first + count, taken + count
    positions[:, done:] = np.arange(position, position + len(is_image) - done)
    return positions
