"""Stable sorts in linear time, for the few hundred samples of a step and for the million samples of a data set.

Here and in the methods, a compiled loop calls only compiled functions of its own file: numba's cache on disk does not
notice a change in another file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowtrain.scheduler.compiled import compiled


@compiled
def descending_order(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the indices that sort lengths in descending order, ties by index; int64 ``[num_samples]``.

    tokens: int64 ``[num_samples]``, not negative. A radix sort, one byte at a time.
    """
    num_samples = len(tokens)
    longest = 0
    for index in range(num_samples):
        assert tokens[index] >= 0
        longest = max(longest, tokens[index])
    order, other = np.arange(num_samples), np.empty(num_samples, dtype=np.int64)
    shift = 0
    while longest >> shift:
        starts = np.zeros(257, dtype=np.int64)
        for index in range(num_samples):
            starts[256 - ((tokens[index] >> shift) & 255)] += 1
        for digit in range(256):
            starts[digit + 1] += starts[digit]
        for place in range(num_samples):
            index = order[place]
            digit = 255 - ((tokens[index] >> shift) & 255)
            other[starts[digit]] = index
            starts[digit] += 1
        order, other = other, order
        shift += 8
    return order


@compiled
def group(number: npt.NDArray[np.int64], num_bins: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return members and offsets of bins from each sample's bin; indices inside a bin ascend.

    number: int64 ``[num_samples]``, 0 to ``num_bins - 1``.
    """
    offsets = np.zeros(num_bins + 2, dtype=np.int64)
    for index in range(len(number)):
        assert 0 <= number[index] < num_bins
        offsets[number[index] + 2] += 1
    for bin_number in range(2, num_bins + 2):
        offsets[bin_number] += offsets[bin_number - 1]
    members = np.empty(len(number), dtype=np.int64)
    for index in range(len(number)):
        place = number[index] + 1
        members[offsets[place]] = index
        offsets[place] += 1
    return members, offsets[: num_bins + 1]
