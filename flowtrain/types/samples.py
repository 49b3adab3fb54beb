"""Samples: where they come from, how large they are, why one is rejected."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowtrain.types.wire import message

TEXT_PART = "text"
"""Name of the part that holds a sample's token ids and labels; every other part is named after its encoder."""


EVAL_POSITION_BASE = 1 << 60
"""Evaluation samples live at positions from here on, so that they never shift the training order."""


@message
class SampleRef:
    """Where a sample comes from."""

    position: int
    """Its place in the global order."""
    source: int
    """Index of its source in the configuration."""
    row: int
    """Its row in the source."""
    epoch: int
    """The source's epoch, from 0."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """Where the order of samples stands: what a feeder continues from, and what a checkpoint keeps."""

    next_position: int
    """Position that is drawn next."""
    counts: tuple[int, ...] = ()
    """Samples drawn so far, by source."""
    seed: int = 0
    """What the order was made from, with ``sizes``, so that a state cannot continue another order unnoticed."""
    sizes: tuple[int, ...] = ()
    """Rows, by source."""
    consumed: tuple[int, ...] = ()
    """Positions from ``next_position`` on that are consumed already, ascending; none unless samples run by arrival."""

    def to_dict(self) -> dict[str, int | list[int]]:
        """Return plain numbers and lists, for a checkpoint."""
        return {
            "next_position": self.next_position,
            "counts": list(self.counts),
            "seed": self.seed,
            "sizes": list(self.sizes),
            "consumed": list(self.consumed),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SamplerState:
        """Read what ``to_dict`` wrote."""
        columns = {name: tuple(plain.get(name, ())) for name in ("counts", "sizes", "consumed")}
        return cls(next_position=plain["next_position"], seed=plain["seed"], **columns)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What one image becomes."""

    num_patches: int
    """Patches that the encoder computes."""
    num_rows: int
    """Feature rows that it emits."""
    num_tokens: int
    """Tokens that the backbone sees."""


@message
class PartSize:
    """Size of one part, known before anything is decoded."""

    name: str
    """``TEXT_PART`` or an encoder's name."""
    num_items: int
    """Images; 1 for text."""
    num_patches: int
    """Patches over all images; 0 for text."""
    num_rows: int
    """Rows of the array that goes into the pool: feature rows, or tokens for text."""
    nbytes: int
    """Exact size of that array."""


@message
class SizedSample:
    """A sample whose lengths are known."""

    ref: SampleRef
    num_tokens: int
    """Length of its backbone sequence, vision tokens included."""
    num_vision_tokens: int
    """Tokens among them that images fill."""
    num_target_tokens: int
    """Tokens among them that carry loss (after the shift by one)."""
    parts: tuple[PartSize, ...]
    """Its text, and its images for each encoder that has any."""

    @property
    def position(self) -> int:
        """The sample's place in the global order."""
        return self.ref.position


class RejectReason(enum.StrEnum):
    """Why a sample is quarantined."""

    CORRUPT_IMAGE = "corrupt_image"
    MISSING_IMAGE = "missing_image"
    DECOMPRESSION_BOMB = "decompression_bomb"
    OVERSIZED_SAMPLE = "oversized_sample"
    PLACEHOLDER_MISMATCH = "placeholder_mismatch"
    EMPTY_ANSWER = "empty_answer"
    MALFORMED_SAMPLE = "malformed_sample"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A quarantined sample."""

    ref: SampleRef
    reason: RejectReason
    detail: str
    """What was seen, with both values where two disagree."""
