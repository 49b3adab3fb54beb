"""How the images of a microbatch are cut into the parts that encoder stages run one after another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


def image_parts(patches: Sequence[int], num_parts: int) -> tuple[range, ...]:
    """Return the images of each part: contiguous runs with about as many patches each, some of them perhaps empty.

    patches: of each image, in order. An image belongs to the part in which its middle lies.
    """
    assert num_parts >= 1, num_parts
    ends = list(accumulate(patches, initial=0))
    middles = [start + end for start, end in pairwise(ends)]  # twice the middle, to stay with integers
    bounds = [bisect_left(middles, 2 * ends[-1] * part / num_parts) for part in range(num_parts)]
    return tuple(range(start, end) for start, end in pairwise([*bounds, len(patches)]))
