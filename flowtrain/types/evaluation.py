"""Evaluation: how often held-out sets are evaluated, and what the model answers to their samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvalRounds:
    """The rounds of one held-out set."""

    every: int
    """Steps between two rounds."""
    num_samples: int
    """Samples of a round; 0: the set has none, and is not evaluated."""


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """What the model answered to a held-out sample."""

    position: int
    """Of the sample."""
    text: str
    num_tokens: int
    """Tokens of the answer, with the one that ends it."""
