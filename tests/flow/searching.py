"""A search that is known by its order, and another process that makes plans when a test says so."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from flowtrain.flow.steps import MadePlan, Search
from flowtrain.scheduler.layout import Arrangement
from flowtrain.scheduler.packing.base import PackingRules
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.types.plan import CostModel, Unit
from tests.flow.simulation import planner_of


def backwards(sizes: SampleSizes, rules: PackingRules, default: Arrangement) -> Arrangement:
    """Run the default's slots in the opposite order."""
    return replace(default, slots=np.ascontiguousarray(default.slots[::-1]))


class ByHand:
    """Plans a unit when ``end`` says so; ``limit_s``: of every search."""

    def __init__(self, dp_size: int = 1, limit_s: float | None = None) -> None:
        self._planner, self._limit_s = planner_of(dp_size, arrange=backwards), limit_s
        self.begun: dict[int, tuple[Search, Unit, SampleSizes]] = {}
        """By unit, in the order of their questions."""

    def plan(self, unit: Unit, sizes: SampleSizes, cost: CostModel) -> Search:
        """See ``Elsewhere``."""
        assert unit.index not in self.begun, "asked twice"
        search = Search(unit.index, Future(), self._limit_s)
        self.begun[unit.index] = search, unit, sizes
        return search

    def end(self, unit_index: int) -> Search:
        """Answer a question."""
        search, unit, sizes = self.begun[unit_index]
        started_s = time.monotonic()
        search.future.set_result(MadePlan(self._planner.plan(unit, sizes), started_s, time.monotonic()))
        return search

    def fail(self, unit_index: int) -> Search:
        """Lose the process that was asked."""
        search, _, _ = self.begun[unit_index]
        search.future.set_exception(EOFError())
        return search
