"""Groups a unit's image parts into the batches that encoders lease."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowtrain.errors import ConfigError
from flowtrain.types import TEXT_PART, EncodeBatch, PartSize, SizedSample


@dataclass(slots=True)
class _Group:
    """A batch being filled; ``first_place`` is where its first sample stands in the order of need."""

    encoder: str
    first_place: int
    positions: list[int] = field(default_factory=list)
    num_patches: int = 0
    nbytes: int = 0

    def add(self, position: int, part: PartSize, alignment: int) -> None:
        self.positions.append(position)
        self.num_patches += part.num_patches
        self.nbytes += -(-part.nbytes // alignment) * alignment


def make_encode_batches(
    unit_index: int, samples: Iterable[SizedSample], max_batch_patches: Mapping[str, int], alignment: int
) -> tuple[EncodeBatch, ...]:
    """Return the encode batches of a unit, each encoder's in the order in which the backbone needs them.

    samples: in that order. Samples that follow each other share a batch while it has at most ``max_batch_patches``
    (by encoder) patches; a larger part has a batch of its own. A batch is thus a function of the plan alone, so its
    bits never depend on which encoder was free. With several encoders, the batch whose first sample is needed earlier
    comes first. alignment: of every part in the pool, in bytes. Raises ConfigError for a part of an unknown encoder.
    """
    rank_of_encoder = {encoder: rank for rank, encoder in enumerate(max_batch_patches)}
    groups: list[_Group] = []
    filling: dict[str, _Group] = {}
    for place, sample in enumerate(samples):
        for part in sample.parts:
            if part.name == TEXT_PART:
                continue
            if part.name not in max_batch_patches:
                raise ConfigError(
                    f"position {sample.position} has a part for encoder {part.name!r}, which is not one of "
                    f"encoders ({', '.join(max_batch_patches)}); name it there"
                )
            group = filling.get(part.name)
            if group is None or group.num_patches + part.num_patches > max_batch_patches[part.name]:
                group = filling[part.name] = _Group(part.name, place)
                groups.append(group)
            group.add(sample.position, part, alignment)
    groups.sort(key=lambda group: (group.first_place, rank_of_encoder[group.encoder]))
    return tuple(
        EncodeBatch(unit_index, index, group.encoder, tuple(group.positions), group.num_patches, group.nbytes)
        for index, group in enumerate(groups)
    )
