"""Which replicas of a step have to be timed: those that do the same are timed once (PipeWeaver 4.2, spatial reuse).

Replicas with the same list and microbatches do everything at the same times, also where replicas meet. So only the
different ones of a set of shards are timed, and of sets with the same replicas only one. Ranks of a tensor parallel
group are one rank anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.costs.microbatches import MicrobatchColumns


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Replicas that stand for all."""

    kept: IntArray
    """Their numbers."""
    stands_for: IntArray
    """How many replicas each stands for, itself included."""
    set_sizes: tuple[int, ...]
    """How many of them share each set of shards."""
    num_replicas: int
    """All of them."""

    @classmethod
    def of(cls, works: MicrobatchColumns, set_sizes: Sequence[int]) -> Fold:
        """Return the fold of replicas with one list. works: microbatches of all, one replica after another."""
        kinds = _kinds(works, sum(set_sizes))
        kept: list[int] = []
        counts: dict[tuple[frozenset[int], int], int] = {}
        sizes: dict[frozenset[int], int] = {}
        start = 0
        for size in set_sizes:
            mine = kinds[start : start + size]
            held = frozenset(mine)
            if held not in sizes:
                sizes[held] = len(held)
                first = {kind: start + at for at, kind in reversed(list(enumerate(mine)))}
                kept += sorted(first.values())
            for kind in mine:
                counts[held, kind] = counts.get((held, kind), 0) + 1
            start += size
        sets = [frozenset(kinds[at : at + size]) for at, size in _starts(set_sizes)]
        set_of = np.repeat(np.arange(len(sets)), set_sizes)
        stands_for = np.array([counts[sets[set_of[replica]], kinds[replica]] for replica in kept], dtype=np.int64)
        return cls(np.array(kept, dtype=np.int64), stands_for, tuple(sizes.values()), len(kinds))

    def works(self, works: MicrobatchColumns) -> MicrobatchColumns:
        """Return the microbatches of the replicas that are kept."""
        each = len(works) // self.num_replicas
        microbatches = (self.kept[:, None] * each + np.arange(each)).reshape(-1)
        ends = np.cumsum(works.num_images)
        images = [np.arange(ends[at] - works.num_images[at], ends[at]) for at in microbatches.tolist()]
        patches = works.patches[np.concatenate([np.zeros(0, dtype=np.int64), *images])]
        columns = {each.name: getattr(works, each.name) for each in fields(works) if each.name != "patches"}
        return MicrobatchColumns(**{name: column[microbatches] for name, column in columns.items()}, patches=patches)


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(np.cumsum([0, *sizes[:-1]]).tolist(), sizes, strict=True))


def _kinds(works: MicrobatchColumns, num_replicas: int) -> list[int]:
    """A number for each replica; those with equal microbatches have the same."""
    each = len(works) // num_replicas
    columns = [getattr(works, field.name) for field in fields(works) if field.name != "patches"]
    ends = np.concatenate([[0], np.cumsum(works.num_images)])
    numbers: dict[bytes, int] = {}
    found = []
    for replica in range(num_replicas):
        first, last = replica * each, (replica + 1) * each
        parts = [column[first:last].tobytes() for column in columns]
        parts.append(works.patches[ends[first] : ends[last]].tobytes())
        found.append(numbers.setdefault(b"".join(parts), len(numbers)))
    return found
