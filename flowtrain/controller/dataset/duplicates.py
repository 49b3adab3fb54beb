"""Rows with the same turns and the same encoded images, within a source and across sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

MAX_LISTED = 100_000
"""The most groups, and rejected rows, that a report lists; it counts all of them."""

Place = tuple[int, int]
"""(source, row)"""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Which rows are the same."""

    within: Mapping[int, int]
    """By source: rows that repeat an earlier row of it."""
    across: Mapping[tuple[int, int], int]
    """(source, earlier source): rows of the first that are also in the second. Each counts for the first source that
    has it."""
    num_groups: int
    groups: tuple[tuple[Place, ...], ...]
    """Rows that are the same, in order; the first ``MAX_LISTED`` groups."""


def find_duplicates(sources: Sequence[npt.NDArray[np.void]]) -> Duplicates:
    """Compare the rows of all sources; arrays of the type ``ROW``, each in the order of its rows."""
    place = np.concatenate([np.full(len(rows), source, np.int32) for source, rows in enumerate(sources)])
    row = np.concatenate([rows["row"] for rows in sources])
    content = np.concatenate([rows["content"] for rows in sources])
    # A stable sort: rows of the same content stay in the order of sources and rows.
    order = np.lexsort((content[:, 1], content[:, 0]))
    place, row, content = place[order], row[order], content[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (content[1:] != content[:-1]).any(axis=1)
    group = np.cumsum(is_first) - 1
    starts = np.flatnonzero(is_first)
    opens_source = is_first.copy()  # the first row of its source in its group
    opens_source[1:] |= place[1:] != place[:-1]
    within = np.bincount(place[~opens_source], minlength=len(sources))
    owner = place[starts][group]
    strangers = place != owner
    pairs, counts = np.unique(np.stack([place[strangers], owner[strangers]]), axis=1, return_counts=True)
    lengths = np.diff(np.append(starts, len(order)))
    repeated = starts[lengths > 1]
    # In the order of their first rows.
    repeated = repeated[np.lexsort((row[repeated], place[repeated]))]
    ends = repeated + lengths[group[repeated]]
    return Duplicates(
        within={source: int(count) for source, count in enumerate(within) if count},
        across={(int(one), int(other)): int(count) for (one, other), count in zip(pairs.T, counts, strict=True)},
        num_groups=len(repeated),
        groups=tuple(
            tuple(zip(place[start:end].tolist(), row[start:end].tolist(), strict=True))
            for start, end in islice(zip(repeated, ends, strict=True), MAX_LISTED)
        ),
    )
