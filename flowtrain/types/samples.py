"""Samples: where they come from, how large they are, and why one is rejected."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowtrain.types.wire import message

TEXT_PART = "text"
"""Name of the part that holds a sample's token ids and labels."""
TEXT_NBYTES = 8
"""Of a token in it: its id and its label, int32."""
IMAGES_PART = "images"
"""Name of the part that holds a sample's encoded images, one after another. Any other part has its encoder's name."""
FED_PARTS = (TEXT_PART, IMAGES_PART)
"""Parts that feeders produce."""


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
class LanesState:
    """Where the shuffled blocks of one source stand. Empty between two epochs."""

    next_block: int
    """Blocks of this epoch that were given to lanes."""
    blocks: tuple[int, ...]
    """Of each lane, the place of its block in the epoch's order; -1: none is left for it."""
    taken: tuple[int, ...]
    """Of each lane, rows drawn from its block."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """Where the order of samples stands. A feeder continues from it, and a checkpoint keeps it.

    ``seed``, ``sizes``, ``shuffle``, ``shuffle_blocks`` and ``tables`` name the order, so that a state never continues
    another one.
    """

    next_position: int
    """Position that is drawn next."""
    counts: tuple[int, ...] = ()
    """Samples drawn so far from each source."""
    seed: int = 0
    """Seed of the order."""
    sizes: tuple[int, ...] = ()
    """Rows of each source."""
    consumed: tuple[int, ...] = ()
    """Consumed positions from ``next_position`` on, ascending; always empty in ``deterministic`` order."""
    shuffle: str = ""
    """``data.shuffle``; empty in checkpoints from before there were blocks."""
    shuffle_blocks: int = 0
    """``data.shuffle_blocks``; 0 unless ``shuffle`` is ``blocks``, like the fields below."""
    tables: tuple[str, ...] = ()
    """Short hash of each source's blocks; empty at position 0, which is the same in any blocks."""
    lanes: tuple[LanesState, ...] = ()
    """Open blocks of each source; empty at position 0."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists, for a checkpoint."""
        plain: dict[str, Any] = {
            "next_position": self.next_position,
            "counts": list(self.counts),
            "seed": self.seed,
            "sizes": list(self.sizes),
            "consumed": list(self.consumed),
            "shuffle": self.shuffle,
        }
        if self.shuffle == "blocks":
            lanes = [[each.next_block, list(each.blocks), list(each.taken)] for each in self.lanes]
            plain |= {"shuffle_blocks": self.shuffle_blocks, "tables": list(self.tables), "lanes": lanes}
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SamplerState:
        """Read what ``to_dict`` wrote."""
        return cls(
            next_position=plain["next_position"],
            counts=tuple(plain["counts"]),
            seed=plain["seed"],
            sizes=tuple(plain["sizes"]),
            consumed=tuple(plain.get("consumed", ())),
            shuffle=plain.get("shuffle", ""),
            shuffle_blocks=plain.get("shuffle_blocks", 0),
            tables=tuple(plain.get("tables", ())),
            lanes=tuple(
                LanesState(next_block, tuple(blocks), tuple(taken))
                for next_block, blocks, taken in plain.get("lanes", ())
            ),
        )


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Sizes that follow from one image."""

    num_patches: int
    """Patches that the encoder computes."""
    num_rows: int
    """Feature rows that it emits."""
    num_tokens: int
    """Tokens that the backbone sees."""
    num_tiles: int = 1
    """Tiles into which it is cut; the encoder computes each like an image of its own. The sizes above are of all."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, for a model whose positions have three axes (time, row, column); None: the model
    counts tokens only."""


@message
class PartSize:
    """Size of one part, known before anything is decoded."""

    name: str
    """``TEXT_PART`` or an encoder's name."""
    num_items: int
    """Images, or the tiles into which they are cut; 1 for text."""
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
    """What the backbone reads: its text, and the features of each encoder that gets images."""
    image_nbytes: tuple[int, ...] = ()
    """Bytes of each encoded image, in order; together they are the part that encoders read."""

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
