"""MILP solvers of PuLP: finds the installed ones and runs one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pulp

from flowtrain.errors import ConfigError, FlowTrainError

SolverName = Literal["auto", "highs", "gurobi", "cbc"]

TIME_LIMIT_S = 60.0
GUROBI_SIZE_LIMITED = 10010
"""Gurobi's error code for a model above the licence's size; the pip wheel's licence allows 2,000 variables."""


def _highs() -> Any:
    # Finer than PIN_TOLERANCE: with both at 1e-6, presolve of HiGHS 1.15.1 reports feasible problems as infeasible.
    finer = {"mip_feasibility_tolerance": 1e-7}
    return pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, threads=1, timeLimit=TIME_LIMIT_S, **finer)


def _gurobi() -> Any:
    # Without its own environment it prints. FeasibilityTol keeps its default: at 1e-9, Gurobi 13.0.3 reports solutions
    # as optimal that are a fifth too low (a rate of 61.5 although 76.5 is feasible; 1e-7 is right).
    return pulp.GUROBI(msg=False, manageEnv=True, timeLimit=TIME_LIMIT_S, MIPGap=0.0, MIPGapAbs=0.0, Threads=1)


def _cbc() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 takes CBC from another wheel
        return pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, threads=1, timeLimit=TIME_LIMIT_S)


_FACTORIES: dict[str, Callable[[], Any]] = {"highs": _highs, "gurobi": _gurobi, "cbc": _cbc}
"""Solvers by name, in the order in which ``auto`` tries them."""


@functools.cache
def installed_solvers() -> tuple[str, ...]:
    """Return the names of the solvers that can run here, best first."""
    return tuple(name for name, create in _FACTORIES.items() if create().available())


class Solver:
    """The requested solver; with ``auto`` the first one that is installed and licensed for the size.

    Raises ConfigError if the named solver is not installed; ``run`` raises it if the licence does not cover the size.
    """

    def __init__(self, name: SolverName = "auto") -> None:
        installed = installed_solvers()
        if not installed:
            raise ConfigError("no MILP solver is installed; pip install highspy")
        if name != "auto" and name not in installed:
            raise ConfigError(f"--solver ({name}) is not installed; installed: {', '.join(installed)}, or take auto")
        self._names = list(installed) if name == "auto" else [name]

    @property
    def name(self) -> str:
        """The solver in use."""
        return self._names[0]

    def run(self, problem: pulp.LpProblem) -> bool:
        """Solve to the optimum; returns False if nothing is feasible. Raises FlowTrainError after the time limit."""
        while True:
            try:
                self._run(problem)
                break
            except Exception as error:
                if getattr(error, "errno", None) != GUROBI_SIZE_LIMITED:
                    raise
                if len(self._names) == 1:
                    raise ConfigError(
                        f"--solver (gurobi): its licence does not cover {problem.numVariables()} variables; "
                        "take highs, or a larger licence"
                    ) from error
                del self._names[0]
        if problem.status == pulp.LpStatusInfeasible:
            return False
        if problem.status != pulp.LpStatusOptimal or problem.sol_status != pulp.LpSolutionOptimal:
            raise FlowTrainError(
                f"{self.name} gave up after {TIME_LIMIT_S:g} s with status {pulp.LpStatus[problem.status]!r} on "
                f"{problem.numVariables()} variables; try another --solver"
            )
        return True

    def _run(self, problem: pulp.LpProblem) -> None:
        solver = _FACTORIES[self.name]()
        try:
            problem.solve(solver)
        finally:
            if self.name == "gurobi":
                solver.close()
