"""What a profile has of measured microbatches: the fitted cost by which ``scheduler.cost: profile`` packs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from flowtrain.errors import ConfigError
from flowtrain.types.plan import CostModel

Form = Literal["longest", "squares"]

FIT_AGAIN = (
    "measure again (a run with scheduler.cost=eq3 writes a profile.json of its own) and give that file, or choose "
    "another scheduler.cost"
)


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A fitted cost, and how well it explains the measured times."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

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

    def __post_init__(self) -> None:
        coefficients = {each.name: getattr(self.model, each.name) for each in fields(self.model) if each.name != "name"}
        valid = all(isfinite(value) and value >= 0.0 for value in coefficients.values())
        if not valid or not any(value for name, value in coefficients.items() if name != "constant"):
            raise ValueError(f"coefficients ({coefficients}) that are not a valid cost")


@dataclass(frozen=True, slots=True)
class MicrobatchCosts:
    """A fitted cost and the conditions of its measurement, besides device and libraries."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fitted: FittedCost
    model: dict[str, Any]
    """The settings of model and arithmetic that a microbatch's time depends on, as nested plain values."""
    capacity: Annotated[int, Field(ge=1)]
    """Capacity of a microbatch in the measured run, in tokens."""

    def check(self, source: str, model: Mapping[str, Any], capacity: int) -> None:
        """Raise ConfigError if this run's ``model`` differs, or if its ``capacity`` exceeds the measured one.

        source: path of the profile.
        """
        then, now = dict(leaves(self.model, "model")), dict(leaves(model, "model"))
        for key in dict.fromkeys([*then, *now]):
            if then.get(key) != now.get(key):
                raise ConfigError(
                    f"{source}: {key} is {then.get(key)!r} there and {now.get(key)!r} in this run, so its microbatches "
                    f"have another cost; {FIT_AGAIN}"
                )
        if capacity > self.capacity:
            raise ConfigError(
                f"{source}: capacity is {self.capacity} there and scheduler.microbatch_tokens is {capacity} in this "
                f"run, beyond what was measured; {FIT_AGAIN}"
            )


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values of nested ones with their dotted names."""
    if not isinstance(value, Mapping):
        yield prefix, list(value) if isinstance(value, tuple) else value
        return
    for key, item in value.items():
        yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
