"""What a profile has of single layers: attention apart from the rest, each kind of layer in each memory strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from flowtrain.costs.flops import FloatArray
from flowtrain.costs.training_setup import TrainingSetup

LayerStrategy = Literal["none", "selective", "full", "offload"]

FEW_TARGETS = 0.25
"""Share of a microbatch's tokens with loss up to which each takes the same time."""

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
    """Of the tokens with loss in the head, forward and backward."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    target_s: _Amount
    """Seconds for each of them while they are at most ``FEW_TARGETS`` of a microbatch."""
    targets: tuple[_Amount, ...]
    """Their number in the microbatches that the head's table has times of."""
    further_s: _Amount | None = None
    """Seconds for each of those beyond; None: as long as for each of the few."""
    forward_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the forward in ``target_s``; None: as of the head."""

    def beyond_s(self, lengths: tuple[int, ...], num_tokens: FloatArray, targets: FloatArray) -> FloatArray:
        """As ``AttentionCosts.beyond_s``. targets: tokens with loss of each microbatch."""
        few = FEW_TARGETS * num_tokens
        further_s = self.target_s if self.further_s is None else self.further_s

        def seconds(count: FloatArray) -> FloatArray:
            return self.target_s * np.minimum(count, few) + further_s * np.maximum(count - few, 0.0)

        return seconds(targets) - seconds(measured_amounts(lengths, num_tokens, self.targets))


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
