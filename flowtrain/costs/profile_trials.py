"""Plans that a profile has run for a few steps, and what they say about predicted rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings, EncoderPlace, Mode

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """What tells one plan from another."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    mode: Mode
    backbone: Degrees
    encoders: dict[str, Degrees]
    """Empty where the backbone's ranks hold the encoder."""
    settings: BackboneSettings | None = None
    encoder_layers: EncoderPlace | None = None

    @property
    def shape(self) -> tuple[Mode, bool, bool]:
        """Plans of one shape wait for each other in the same places, so predictions err alike."""
        return self.mode, self.backbone.pp > 1, self.backbone.tp > 1


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan and its rates in samples/s."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    plan: TriedPlan
    predicted: _Rate
    """By the profile's times, without any trial."""
    rates: Annotated[tuple[_Measured, ...], Field(min_length=1)]
    """Of each round; 0 if the run failed."""

    @property
    def measured(self) -> float:
        """The median; 0 if a run failed."""
        return median(self.rates) if all(self.rates) else 0.0

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


def was_tried(trials: Sequence[Trial], plan: TriedPlan) -> bool:
    """Whether this very plan ran."""
    return any(each.plan == plan for each in trials)


def correction(trials: Sequence[Trial], plan: TriedPlan) -> float:
    """Return what a predicted rate is multiplied by: the plan's own trial, else the mean of those of its shape.

    Plans of a shape that was never tried get the highest factor of all trials. So an untried plan is not passed over
    because the model errs for all plans alike, and it has to win its own trial before it is chosen.
    """
    for each in trials:
        if each.plan == plan:
            return each.factor
    ran = [each for each in trials if each.measured > 0]
    alike = [each.factor for each in ran if each.plan.shape == plan.shape]
    if alike:
        return fmean(alike)
    return max((each.factor for each in ran), default=1.0)
