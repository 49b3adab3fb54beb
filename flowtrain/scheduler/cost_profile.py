"""The measured cost of a microbatch: a fit to measured times, and the file that keeps the fit for later runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowtrain.costs.flops import FloatArray
from flowtrain.errors import ConfigError
from flowtrain.types.plan import CostModel

logger = logging.getLogger(__name__)

Form = Literal["longest", "squares"]

COST_PROFILE_SCHEMA = 1

MIN_ROWS = 64
"""The fewest measured microbatches that are fitted."""

MIN_SPREAD = 0.05
"""Smallest range of tokens, as a share of the maximum, that is fitted: below it, a slope is only noise."""

OUTLIER_DEVIATIONS = 3.0
"""Rows that are more (robust) standard deviations than this away from a first fit are left out as stalls."""

_MAD_TO_STANDARD_DEVIATION = 1.4826
_AGAIN = (
    "measure again (a run with scheduler.cost=eq3 writes a cost_profile.json of its own) and give that file, or choose "
    "another scheduler.cost"
)


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


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A fitted cost, and how well it explains the measured times."""

    model: CostModel
    """The cost, in seconds."""
    form: Form
    """The quadratic term of the fit: ``longest`` sub-sequence squared (FlowTrain 3.4, Eq. 3) or sum of ``squares``."""
    r2: float
    """Share of the variance that the fit explains."""
    other_r2: float
    """The same share for the other form, on the same rows."""
    num_rows: int
    """Number of fitted microbatches, without outliers."""


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


# --- the file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CostProfile:
    """A fitted cost and the conditions of its measurement: ``cost_profile.json`` of a run."""

    fitted: FittedCost
    model: Mapping[str, Any]
    """The settings of model and arithmetic that a microbatch's time depends on, as nested plain values."""
    capacity: int
    """Capacity of a microbatch in the measured run, in tokens."""
    device: str
    """Device name as torch gives it; ``cpu`` for all CPUs."""
    versions: Mapping[str, str]
    """Versions of the libraries that computed, by library."""
    source: str = field(default="", compare=False)
    """Path of the file that it was read from, for messages; empty if it was not read from a file."""

    def to_json(self) -> str:
        """Return the file's text."""
        values = asdict(self)
        del values["source"]
        return json.dumps({"schema": COST_PROFILE_SCHEMA, **values}, indent=1)

    def check_model(self, model: Mapping[str, Any], capacity: int) -> None:
        """Raise ConfigError if this run's ``model`` differs, or if its ``capacity`` exceeds the measured one."""
        then, now = dict(_leaves(self.model, "model")), dict(_leaves(model, "model"))
        for key in dict.fromkeys([*then, *now]):
            if then.get(key) != now.get(key):
                raise ConfigError(
                    f"{self.source}: {key} is {then.get(key)!r} there and {now.get(key)!r} in this run, so its "
                    f"microbatches have another cost; {_AGAIN}"
                )
        if capacity > self.capacity:
            raise ConfigError(
                f"{self.source}: capacity is {self.capacity} there and scheduler.microbatch_tokens is {capacity} in "
                f"this run, beyond what was measured; {_AGAIN}"
            )

    def check_device(self, device: str, versions: Mapping[str, str]) -> None:
        """Raise ConfigError if this run computes on another device; only warn about other library versions."""
        if device != self.device:
            raise ConfigError(
                f"{self.source}: device is {self.device!r} there and {device!r} in this run, so its microbatches "
                f"have another cost; {_AGAIN}"
            )
        for name, version in versions.items():
            if version != self.versions.get(name):
                logger.warning(
                    "%s was measured with %s %s, now %s: costs may differ a little",
                    *(self.source, name, self.versions.get(name), version),
                )


def read_cost_profile(path: str | PathLike[str]) -> CostProfile:
    """Read a ``cost_profile.json``; raises ConfigError if it is unreadable, incomplete or of another schema."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        schema = values.pop("schema")
        if schema != COST_PROFILE_SCHEMA:
            raise ConfigError(f"{path}: schema is {schema!r}, this version reads {COST_PROFILE_SCHEMA}; {_AGAIN}")
        fitted = values.pop("fitted")
        model = CostModel(**fitted.pop("model"))
        coefficients = {each.name: getattr(model, each.name) for each in fields(model) if each.name != "name"}
        valid = all(isinstance(value, int | float) and 0.0 <= value < float("inf") for value in coefficients.values())
        if not valid or not any(value for name, value in coefficients.items() if name != "constant"):
            raise ConfigError(
                f"{path}: fitted.model has coefficients ({coefficients}) that are not a valid cost; {_AGAIN}"
            )
        if not isinstance(values["capacity"], int) or not isinstance(values["model"], dict):
            raise TypeError("capacity must be a number of tokens and model a mapping")
        return CostProfile(FittedCost(model, **fitted), **values, source=str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: scheduler.cost_profile cannot be read ({error!r}); {_AGAIN}") from error


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, list(value) if isinstance(value, tuple) else value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{prefix}.{key}")
