"""The measured cost of a microbatch: a fit to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flowtrain.costs.flops import FloatArray
from flowtrain.costs.microbatch_costs import FittedCost, Form
from flowtrain.types.plan import CostModel

MIN_ROWS = 64
"""The fewest measured microbatches that are fitted."""

MIN_SPREAD = 0.05
"""Smallest range of tokens, as a share of the maximum, that is fitted: below it, a slope is only noise."""

OUTLIER_DEVIATIONS = 3.0
"""Rows that are more (robust) standard deviations than this away from a first fit are left out as stalls."""

_MAD_TO_STANDARD_DEVIATION = 1.4826


@dataclass(frozen=True, slots=True)
class Measured:
    """One microbatch and its measured time."""

    tokens: int
    """Tokens of the microbatch."""
    longest: int
    """Tokens of its longest sub-sequence."""
    squares: int
    """Sum of its sub-sequences' squared lengths."""
    seconds: float
    """Time of forward and backward."""


def fit_cost(rows: Sequence[Measured]) -> FittedCost | None:
    """Fit constant, linear and quadratic terms, none below zero, by least squares; return the better of both forms.

    Outliers are dropped once, by their distance from a first fit, so both forms are fitted to the same rows. Returns
    None for fewer than ``MIN_ROWS`` rows, for a range of tokens below ``MIN_SPREAD``, and if the fitted cost does not
    depend on length.
    """
    if len(rows) < MIN_ROWS:
        return None
    tokens, longest, squares, seconds = _without_outliers(rows).T
    if np.ptp(tokens) < MIN_SPREAD * tokens.max():
        return None
    fits = {"longest": _fit(tokens, longest**2, seconds), "squares": _fit(tokens, squares, seconds)}
    form: Form = "longest" if fits["longest"][1] > fits["squares"][1] else "squares"
    other: Form = "squares" if form == "longest" else "longest"
    (constant, per_token, quadratic), r2 = fits[form]
    if per_token == quadratic == 0.0:
        return None
    model = CostModel("profile", per_token=per_token, constant=constant, **{_COEFFICIENT[form]: quadratic})
    return FittedCost(model, form, r2, fits[other][1], len(tokens))


_COEFFICIENT: dict[Form, str] = {"longest": "per_longest", "squares": "per_square"}


def _without_outliers(rows: Sequence[Measured]) -> FloatArray:
    """Rows as float64 ``[num_rows, 4]``, without those that are far from a fit of all terms at once."""
    table = np.array([(row.tokens, row.longest, row.squares, row.seconds) for row in rows], dtype=np.float64)
    tokens, longest, squares, seconds = table.T
    terms = _scaled(np.stack([np.ones_like(tokens), tokens, longest**2, squares], axis=1))[0]
    residuals = seconds - terms @ np.linalg.lstsq(terms, seconds, rcond=None)[0]
    distances = np.abs(residuals - np.median(residuals))
    limit = OUTLIER_DEVIATIONS * _MAD_TO_STANDARD_DEVIATION * np.median(distances)
    return table[distances <= max(limit, 1e-9 * np.median(seconds))]  # rows without noise differ by rounding alone


def _fit(tokens: FloatArray, quadratic: FloatArray, seconds: FloatArray) -> tuple[tuple[float, float, float], float]:
    """Non-negative coefficients of (1, tokens, quadratic) with the least squared error, and the fit's R2.

    The best non-negative solution equals the plain least-squares solution over its non-zero terms. So all seven
    subsets of the terms are tried.
    """
    terms, scales = _scaled(np.stack([np.ones_like(tokens), tokens, quadratic], axis=1))
    best, best_error = np.zeros(3), float(seconds @ seconds)
    for count in (1, 2, 3):
        for chosen in map(list, combinations(range(3), count)):
            solution = np.linalg.lstsq(terms[:, chosen], seconds, rcond=None)[0]
            residuals = seconds - terms[:, chosen] @ solution
            error = float(residuals @ residuals)
            if (solution >= 0.0).all() and error < best_error:
                best, best_error = np.zeros(3), error
                best[chosen] = solution
    deviations = seconds - seconds.mean()
    variance = float(deviations @ deviations)
    constant, per_token, per_square = (best / scales).tolist()
    return (constant, per_token, per_square), 1.0 - best_error / variance if variance else 0.0


def _scaled(terms: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Columns divided by their largest values, and these values: tokens and squares have very different magnitudes."""
    scales = terms.max(axis=0)
    return terms / scales, scales
