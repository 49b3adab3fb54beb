"""The modes side by side, for what was asked."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.mode_rating import ModeComparison, ModeRating
from flowtrain.allocator.program.solvers import Solver
from flowtrain.allocator.request import Request, SurrogateFactory
from flowtrain.config.allocator import AllocationMethod
from flowtrain.types.run_plan import Mode


def compare(
    request: Request, surrogate_for: SurrogateFactory, solver: Solver, modes: Sequence[Mode], method: AllocationMethod
) -> ModeComparison:
    """Rate modes."""
    started = time.perf_counter()
    found = allocate(request, surrogate_for, solver, method)
    ratings = tuple(
        ModeRating(
            mode,
            found.rate,
            "the fastest",
            found.modules,
            found.devices,
            found.modules[-1].settings,
            rate_formula=found.rate,
        )
        for mode in modes
    )
    return ModeComparison(ratings, found, time.perf_counter() - started)
