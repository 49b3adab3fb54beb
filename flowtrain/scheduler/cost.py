"""What a microbatch costs the backbone, as the scheduler sees it: unitless, only ratios matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flowtrain.errors import ConfigError


class CostModel(Protocol):
    """A pure function of the lengths in a microbatch, frozen for the run."""

    def __call__(self, lengths: Sequence[int]) -> float:
        """Return the cost of one microbatch; lengths: tokens of its sub-sequences. No sub-sequences cost 0."""
        ...


def eq3(capacity: int) -> CostModel:
    """Return the cost of FlowTrain 3.4, Eq. 3: tokens / L + (longest / L) ** 2 with ``L = capacity`` in tokens.

    The first term stands for the linear layers, the second for attention over the longest sub-sequence.
    """

    def cost(lengths: Sequence[int]) -> float:
        return sum(lengths) / capacity + (max(lengths, default=0) / capacity) ** 2

    return cost


def tokens(capacity: int) -> CostModel:
    """Return the share of the capacity that is filled: the linear term of Eq. 3 alone."""

    def cost(lengths: Sequence[int]) -> float:
        return sum(lengths) / capacity

    return cost


COST_MODELS: dict[str, Callable[[int], CostModel]] = {"eq3": eq3, "tokens": tokens}


def make_cost_model(name: str, capacity: int) -> CostModel:
    """Return the cost model called ``name`` for microbatches of ``capacity`` tokens; ConfigError if unknown."""
    if name not in COST_MODELS:
        raise ConfigError(f"scheduler.cost ({name!r}) is unknown; choose one of {', '.join(sorted(COST_MODELS))}")
    return COST_MODELS[name](capacity)
