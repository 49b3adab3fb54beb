"""The work of single microbatches, one or many at once: their tokens, sequences and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray

ALIGNED_TOKENS = 16
"""Attention takes longer for sequences whose lengths are no multiple of it: the last tile of a kernel is a part."""


def ragged_squares(lengths: FloatArray | IntArray) -> FloatArray:
    """Return the squared lengths of sequences, ``[S]``; 0 where they are aligned."""
    squares: FloatArray = np.square(lengths, dtype=np.float64) * (lengths % ALIGNED_TOKENS > 0)
    return squares


@dataclass(frozen=True, slots=True)
class MicrobatchWork:
    """What a stage's time depends on: tokens of each sequence, and over all of them; patches of each image."""

    lengths: tuple[int, ...]
    vision_tokens: int
    target_tokens: int
    patches: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchColumns:
    """Many microbatches; columns ``[M]`` except ``patches``."""

    num_tokens: FloatArray
    squares: FloatArray
    """Sums over sequences of their squared lengths."""
    ragged: FloatArray
    """The same of ``ragged_squares``."""
    vision_tokens: FloatArray
    target_tokens: FloatArray
    patches: IntArray
    """Of each image, ``[I]``, those of a microbatch after those of the one before."""
    num_images: IntArray

    @classmethod
    def of(cls, works: Sequence[MicrobatchWork]) -> MicrobatchColumns:
        """Return the columns of single ones."""
        return cls(
            np.array([each.num_tokens for each in works], dtype=np.float64),
            np.array([sum(length * length for length in each.lengths) for each in works], dtype=np.float64),
            np.array([ragged_squares(np.array(each.lengths)).sum() for each in works]),
            np.array([each.vision_tokens for each in works], dtype=np.float64),
            np.array([each.target_tokens for each in works], dtype=np.float64),
            np.array([patches for each in works for patches in each.patches], dtype=np.int64),
            np.array([len(each.patches) for each in works], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.num_tokens)

    def of_images(self, values: FloatArray) -> FloatArray:
        """Return the sum over each microbatch's images, ``[M]``, of values ``[I]``."""
        return np.bincount(np.repeat(np.arange(len(self)), self.num_images), values, len(self)).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchSeconds:
    """Seconds of forward and backward with recomputation, ``[M]``."""

    layer: FloatArray
    """Of one decoder layer."""
    head: FloatArray
    head_forward: FloatArray
    """The forward's part of it; the loss may compute gradients there already."""
    connector: FloatArray
    embedding: FloatArray
    """Of its gradient, where that is not in the head's time."""
