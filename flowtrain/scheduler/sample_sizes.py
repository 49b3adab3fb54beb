"""The sizes of a unit's samples as columns, which the planner computes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, gt

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.errors import ConfigError
from flowtrain.types.samples import TEXT_PART, PartSize, SizedSample

_position = attrgetter("ref.position")
_sizes = attrgetter("num_tokens", "num_vision_tokens", "num_target_tokens")
_part_sizes = attrgetter("num_items", "num_patches", "nbytes")


@dataclass(frozen=True, slots=True, eq=False)
class PartColumns:
    """One encoder's parts, in the order of the samples; numbers are int64 ``[num_samples]``, 0 without such a part."""

    images: IntArray
    patches: IntArray
    nbytes: IntArray
    """Bytes in the pool, rounded up to its alignment."""
    present: np.ndarray
    """Whether the sample has such a part; bool ``[num_samples]``."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleSizes:
    """Columns over samples, int64 ``[num_samples]``.

    ``of`` sorts the samples by position, because the plan must not depend on the order of sizing.
    """

    positions: IntArray
    tokens: IntArray
    vision_tokens: IntArray
    target_tokens: IntArray
    parts: dict[str, PartColumns]
    """By encoder, in the configuration's order."""

    @classmethod
    def of(cls, samples: Sequence[SizedSample], encoders: Iterable[str], alignment: int) -> SampleSizes:
        """Build from sized samples in any order; ConfigError for a part of an unknown encoder."""
        positions = [sample.ref.position for sample in samples]
        if any(map(gt, positions, positions[1:])):
            samples = sorted(samples, key=_position)
            positions.sort()
        return cls.in_order(samples, positions, encoders, alignment)

    @classmethod
    def in_order(
        cls, samples: Sequence[SizedSample], positions: Sequence[int], encoders: Iterable[str], alignment: int
    ) -> SampleSizes:
        """Build from sized samples in the given order."""
        count = len(samples)
        sizes = np.fromiter(chain.from_iterable(map(_sizes, samples)), np.int64, 3 * count).reshape(-1, 3)
        tokens, vision_tokens, target_tokens = np.ascontiguousarray(sizes.T)
        parts = _part_columns(samples, tuple(encoders), alignment)
        return cls(np.array(positions, dtype=np.int64), tokens, vision_tokens, target_tokens, parts)

    def __len__(self) -> int:
        return len(self.positions)


def _part_columns(samples: Sequence[SizedSample], encoders: Sequence[str], alignment: int) -> dict[str, PartColumns]:
    found: dict[str, tuple[list[int], list[PartSize]]] = {encoder: ([], []) for encoder in encoders}
    for place, sample in enumerate(samples):
        for part in sample.parts:
            if (name := part.name) == TEXT_PART:
                continue
            if name not in found:
                raise ConfigError(
                    f"position {sample.position} has a part for encoder {name!r}, which is not one of "
                    f"encoders ({', '.join(encoders)}); name it there"
                )
            places, parts = found[name]
            places.append(place)
            parts.append(part)
    return {encoder: _columns(len(samples), *found[encoder], alignment) for encoder in encoders}


def _columns(count: int, places: list[int], parts: list[PartSize], alignment: int) -> PartColumns:
    sizes = np.zeros((3, count), dtype=np.int64)
    present = np.zeros(count, dtype=np.bool_)
    if places:
        given = np.fromiter(chain.from_iterable(map(_part_sizes, parts)), np.int64, 3 * len(parts)).reshape(-1, 3)
        sizes[:, places] = given.T
        present[places] = True
    return PartColumns(sizes[0], sizes[1], -(-sizes[2] // alignment) * alignment, present)
