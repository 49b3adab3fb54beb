"""Plans that a profile has run for a few steps, and what they say about predicted rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from flowtrain.config.run import RunConfig
from flowtrain.costs.workload import Workload
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings, EncoderPlace, Mode

CLOSE = 0.9
"""Rates of plans that differ by no more may do so by luck."""
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

    def __str__(self) -> str:
        """The plan in a line; degrees of 1 are left out."""
        words = [
            " ".join([name, *(f"{axis}={degree}" for axis, degree in asdict(degrees).items() if degree > 1)])
            for name, degrees in {**self.encoders, "backbone": self.backbone}.items()
        ]
        if self.encoder_layers is not None and self.backbone.pp > 1:
            words.append(f"encoder layers {self.encoder_layers}")
        if self.settings is not None:
            words += [f"{key[-1]} {value}" for key, value in self.settings.settings().items()]
        return ", ".join((self.mode, *words))

    @property
    def shape(self) -> tuple[Mode, bool, bool]:
        """Plans of one shape wait for each other in the same places, so predictions err alike."""
        return self.mode, self.backbone.pp > 1, self.backbone.tp > 1

    def works_as(self, other: TriedPlan) -> bool:
        """Whether both do the same work: with encoders apart, a barrier only says when they may begin."""
        apart = ("decoupled", "disaggregated")
        return self == (replace(other, mode=self.mode) if self.mode in apart and other.mode in apart else other)


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
        """The median of the runs that did not fail; 0 if more than half did."""
        ran = [rate for rate in self.rates if rate]
        return median(ran) if 2 * len(ran) >= len(self.rates) else 0.0

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


def was_tried(trials: Sequence[Trial], plan: TriedPlan) -> bool:
    """Whether this very plan ran."""
    return any(each.plan == plan for each in trials)


def correction(trials: Sequence[Trial], plan: TriedPlan, *, may_be_tried: bool = False) -> float:
    """Return what a predicted rate is multiplied by: the mean of trials of its work, else of those of its shape.

    Plans of the same work (``TriedPlan.works_as``) whose rates are ``CLOSE`` share their trials: what the barrier of
    ``disaggregated`` costs is mostly less than rates vary, so each one's own trial would choose between it and
    ``decoupled`` by luck. A plan whose own trial failed gets 0.

    Plans of a shape that was never tried get a factor of those with the same pipeline and tensor parallelism in other
    modes, or of all trials. may_be_tried: the highest, so that an untried plan is not passed over because the model
    errs for all plans alike; its own trial decides then. Otherwise the lowest: it must not win by luck.
    """
    if any(each.plan == plan and not each.measured for each in trials):
        return 0.0
    ran = [each for each in trials if each.measured > 0]
    if own := _own(ran, plan):
        return fmean(each.factor for each in own)
    alike = [each.factor for each in ran if each.plan.shape == plan.shape]
    if alike:
        return fmean(alike)
    similar = [each.factor for each in ran if each.plan.shape[1:] == plan.shape[1:]]
    factors = similar or [each.factor for each in ran] or [1.0]
    return max(factors) if may_be_tried else min(factors)


def corrected_rate(predicted: float, trials: Sequence[Trial], plan: TriedPlan, *, may_be_tried: bool = False) -> float:
    """Return a predicted rate as trials correct it (``correction``), in samples/s.

    Predictions of plans that share their trials may be apart, so their mean factor is one that neither has: the rate of
    a plan that ran stays between the slowest and the fastest of these trials.
    """
    rate = predicted * correction(trials, plan, may_be_tried=may_be_tried)
    if not rate or not was_tried(trials, plan):
        return rate
    measured = [each.measured for each in _own([each for each in trials if each.measured > 0], plan)]
    return min(max(rate, min(measured)), max(measured))


def _own(ran: Sequence[Trial], plan: TriedPlan) -> list[Trial]:
    """The trials of a plan's work that count for it; all of it if their rates are close."""
    own = [each for each in ran if each.plan.works_as(plan)]
    if own and min(each.measured for each in own) < CLOSE * max(each.measured for each in own):  # no luck
        own = [each for each in own if each.plan == plan] or own
    return own


def trial_conditions(config: RunConfig, workload: Workload, num_devices: int) -> dict[str, Any]:
    """Return what else a run's rate depends on, as plain values: trials say nothing where it is different."""
    scheduler = config.scheduler.model_dump(mode="json", exclude={"microbatch_tokens"})  # a plan may choose it
    return {
        "devices": num_devices,
        "training.global_batch_size": workload.global_batch_size,
        "tokens of a sample": round(workload.tokens_per_sample, 3),
        "model.freeze": list(config.model.freeze),
        "data.order": config.data.order,
        "pool.exchange": config.pool.exchange,
        "encoders' max_batch_patches": [encoder.max_batch_patches for encoder in config.encoders.values()],
        **{f"scheduler.{key}": value for key, value in scheduler.items()},
    }


def why_not_used(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return how the conditions of trials differ from a plan's; None if they do not."""
    differs = [f"{key} was {then.get(key)!r} and is {now[key]!r}" for key in now if then.get(key) != now[key]]
    return "; ".join(differs) or None
