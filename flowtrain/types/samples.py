"""Samples: where they come from, how large they are, and why one is rejected."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowtrain.types.wire import message

TEXT_PART = "text"
"""Name of the part that holds a sample's token ids and labels. Any other part has the name of its encoder."""


EVAL_POSITION_BASE = 1 << 60
"""Evaluation samples have positions from here on, so that they never shift the training order."""


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
    """Where the order of samples stands. A feeder continues from it, and a checkpoint keeps it."""

    next_position: int
    """Position that is drawn next."""
    counts: tuple[int, ...] = ()
    """Samples drawn so far from each source."""
    seed: int = 0
    """Seed of the order. ``seed`` and ``sizes`` name the order, so that a state never continues another one."""
    sizes: tuple[int, ...] = ()
    """Rows of each source."""
    consumed: tuple[int, ...] = ()
    """Consumed positions from ``next_position`` on, ascending; always empty in ``deterministic`` order."""

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
        counts, sizes = tuple(plain["counts"]), tuple(plain["sizes"])
        return cls(plain["next_position"], counts, plain["seed"], sizes, tuple(plain.get("consumed", ())))


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Sizes that follow from one image."""

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
    """Tokens of the sequence that images fill."""
    num_target_tokens: int
    """Tokens of the sequence that carry loss, after the shift by one."""
    parts: tuple[PartSize, ...]
    """Its text, and its images for each encoder that gets some."""

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
    """What was found; if two values disagree, both."""
    id: str | None = None
    """The row's own id, if the data has one."""
    path: str | None = None
    """The image's file, if one image is at fault and is a file of its own."""
    image: int | None = None
    """The number of the image at fault, from 1; None if it is no single one."""
