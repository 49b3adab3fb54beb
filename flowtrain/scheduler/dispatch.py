"""Dispatch: which DP rank runs which microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flowtrain.errors import ConfigError

Slots = tuple[tuple[int, ...], ...]
"""``slots[k][rank]`` is the index of a microbatch; every slot has one for every rank."""


class Dispatcher(Protocol):
    """A pure, deterministic way to hand microbatches to DP ranks, the same number to each."""

    def __call__(self, costs: Sequence[float], buckets: Sequence[int], dp_size: int) -> Slots:
        """Return the slots; costs, buckets: of each microbatch, their number a multiple of ``dp_size``."""
        ...


def zigzag(costs: Sequence[float], buckets: Sequence[int], dp_size: int) -> Slots:
    """Deal microbatches to ranks 0..dp-1, then dp-1..0, and so on (FlowTrain Algorithm 1, lines 15-27).

    Buckets are dealt dearest first, each in descending order of cost (ties: lower index first). A pass that a bucket
    leaves unfinished is finished by the next one, with its direction: restarting there would give ranks different
    counts, which collectives inside forward and backward do not survive. One pass is one slot, so the microbatches that
    run side by side are neighbours in cost.
    """
    assert len(costs) == len(buckets) and len(costs) % dp_size == 0, (len(costs), len(buckets), dp_size)
    dealt = sorted(range(len(costs)), key=lambda index: (buckets[index], -costs[index], index))
    slots = []
    for number, first in enumerate(range(0, len(dealt), dp_size)):
        one_pass = dealt[first : first + dp_size]
        slots.append(tuple(one_pass if number % 2 == 0 else reversed(one_pass)))
    return tuple(slots)


DISPATCHERS: dict[str, Dispatcher] = {"zigzag": zigzag}


def get_dispatcher(name: str) -> Dispatcher:
    """Return the dispatch method called ``name``; ConfigError names the known ones."""
    if name not in DISPATCHERS:
        raise ConfigError(f"scheduler.dispatch ({name!r}) is unknown; choose one of {', '.join(sorted(DISPATCHERS))}")
    return DISPATCHERS[name]
