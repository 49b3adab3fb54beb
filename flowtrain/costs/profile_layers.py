"""What a profile has of single layers: attention apart from the rest, each kind of layer in each memory strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from flowtrain.costs.flops import FloatArray
from flowtrain.costs.training_setup import TrainingSetup

LayerStrategy = Literal["none", "selective", "full", "offload"]

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """Of attention over sub-sequences in one decoder layer, forward and backward with recomputation."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    square_s: _Amount
    """Seconds for each squared token of a sub-sequence: one of n tokens takes n * n times as much."""
    squares: tuple[_Amount, ...]
    """Sums over sub-sequences of their squared tokens in the microbatches that the layer's table has times of."""
    ragged_s: _Amount = 0.0
    """Seconds in addition for each squared token where the length is ragged (``ragged_squares``)."""
    ragged: tuple[_Amount, ...] = ()
    """As ``squares``, of these sub-sequences alone."""

    def __post_init__(self) -> None:
        if self.ragged_s and len(self.ragged) != len(self.squares):
            raise ValueError(f"ragged has {len(self.ragged)} values, and squares {len(self.squares)}")

    def beyond_s(
        self, lengths: tuple[int, ...], num_tokens: FloatArray, squares: FloatArray, ragged: FloatArray
    ) -> FloatArray:
        """Return seconds that microbatches take more than measured ones of as many tokens, ``[N]``; may be negative.

        lengths: packed lengths of the table. squares, ragged: sums over each one's sub-sequences.
        """
        beyond = self.square_s * (squares - measured_amounts(lengths, num_tokens, self.squares))
        if not self.ragged_s:
            return beyond
        return beyond + self.ragged_s * (ragged - measured_amounts(lengths, num_tokens, self.ragged))


@dataclass(frozen=True, slots=True)
class LossCosts:
    """Of the tokens with loss in the head, forward and backward; their time is no line where they are few."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    counts: tuple[_Size, ...]
    """Measured numbers of them in a microbatch, ascending."""
    seconds: tuple[_Amount, ...]
    """What the head takes with each of these more than with the first."""
    targets: tuple[_Amount, ...]
    """Their mean number in the microbatches that the head's table has times of."""
    forward_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the forward in ``seconds``; None: as of the head."""

    def __post_init__(self) -> None:
        check_axis("counts", self.counts)
        if len(self.seconds) != len(self.counts):
            raise ValueError(f"seconds has {len(self.seconds)} values for {len(self.counts)} counts")

    def __call__(self, targets: FloatArray) -> FloatArray:
        """Return what microbatches with so many tokens with loss take more than with the first count, ``[N]``."""
        return losses_s(self.counts, self.seconds, targets)

    def beyond_s(self, lengths: tuple[int, ...], num_tokens: FloatArray, targets: FloatArray) -> FloatArray:
        """As ``AttentionCosts.beyond_s``. targets: tokens with loss of each microbatch."""
        return self(targets) - self(measured_amounts(lengths, num_tokens, self.targets))


def losses_s(counts: Sequence[int], seconds: Sequence[float], targets: FloatArray) -> FloatArray:
    """Return seconds at any numbers of tokens with loss, ``[N]``, by those measured at ``counts``.

    Linear between; constant below the first; above the last as from half of it to the last, since the last two may be
    close to each other.
    """
    most, half = float(counts[-1]), float(np.interp(counts[-1] / 2, counts, seconds))
    slope = max(seconds[-1] - half, 0.0) / (most / 2)
    inside: FloatArray = np.interp(targets, counts, seconds)
    return inside + slope * np.maximum(targets - most, 0.0)


def check_axis(name: str, values: tuple[int, ...]) -> None:
    """Raise ValueError if sizes are not ascending, or if there are none."""
    if not values or any(later <= earlier for earlier, later in pairwise(values)):
        raise ValueError(f"{name} {values} is empty or not ascending")


def measured_amounts(lengths: tuple[int, ...], num_tokens: FloatArray, amounts: tuple[float, ...]) -> FloatArray:
    """Return the amounts of measured microbatches, of which ``lengths`` are known, at any numbers of tokens."""
    found: FloatArray = np.interp(num_tokens, lengths, amounts)
    # Below the shortest and above the longest, microbatches have more or fewer sequences like the measured ones.
    found *= np.where(num_tokens > lengths[-1], num_tokens / lengths[-1], 1.0)
    found *= np.where(num_tokens < lengths[0], num_tokens / lengths[0], 1.0)
    return found


@dataclass(frozen=True, slots=True)
class StrategyCosts:
    """One layer that follows a memory strategy."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_tokens: _Size
    """Of the measured microbatch."""
    seconds: _Seconds
    """Forward and backward with recomputation."""
    kept_nbytes: _Amount
    """Device bytes that it keeps from forward to backward."""


Strategies = dict[LayerStrategy, StrategyCosts]


def strategies_s(strategies: Mapping[LayerStrategy, StrategyCosts], setup: TrainingSetup) -> float | None:
    """Return the mean seconds of a layer under a setup's strategies; None if one that it has was not measured."""
    total = 0.0
    for word in ("none", "selective", "full", "offload"):
        share = setup.share_of_layers(word)
        if share and word not in strategies:
            return None
        total += share * strategies[word].seconds if share else 0.0
    return total
