"""What a finished run says of predicted times: robust means of measured over predicted ones, and the host's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchSeconds
from flowtrain.costs.module_times import ModuleTimes

FEWEST = 8
"""Spans of a kind that tell its factor; with fewer it stays 1."""
LEAST = 0.05
"""The least factor of a part whose time is the rest of what was measured."""
_APART = 0.2
"""Share by which factors of a device's parts of work usually differ."""
_NOISE, _STEP_NOISE = 0.03, 0.1
"""Shares by which a run's totals are off, and, in addition, each of its steps."""
_DEVIATIONS = 3.0
_MAD_TO_STANDARD_DEVIATION = 1.4826

_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors of predicted times, measured over predicted; 1 where a run said nothing."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    run: str
    """Name of the run, or of several."""
    backbone: _Factor
    """Of forwards and backwards of backbone stages, without the head, collectives and the fetching of microbatches."""
    head: _Factor
    """Of the head and the loss."""
    encoders: dict[str, _Factor] | None = None
    """Of encode batches, by encoder; None: of all 1."""
    collectives: _Factor = 1.0
    """Of what computing does not hide of gathers and reductions over replicas."""
    ends: _Factor = 1.0
    """Of what a step's first forward and last backward take more, of one replica."""
    optimizer: _Factor = 1.0
    step_host_s: _Amount | None = None
    """Seconds of a step beyond its action lists and waits for data; None if they are not known."""
    num_spans: Annotated[int, Field(ge=0)] = 0
    """Spans that the factors come from."""

    def encoder(self, name: str) -> float:
        """Return the factor of an encoder."""
        return (self.encoders or {}).get(name, 1.0)

    def times(self, base: ModuleTimes) -> ModuleTimes:
        """Return module times with these factors."""
        return CalibratedTimes(base, self)


def robust_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are within three (robust) standard deviations of their median."""
    found = np.asarray(values, dtype=np.float64)
    return float(found[_no_outliers(found)].mean())


def _no_outliers(values: FloatArray) -> NDArray[np.bool_]:
    middle = float(np.median(values))
    distances = np.abs(values - middle)
    limit = _DEVIATIONS * _MAD_TO_STANDARD_DEVIATION * float(np.median(distances))
    return distances <= max(limit, 1e-9 * abs(middle))


def factor(measured: Sequence[float], predicted: Sequence[float], num_spans: int | None = None) -> float:
    """Return measured over predicted; 1 for fewer than ``FEWEST`` spans.

    A ratio of sums counts long spans more, as a step does; only values whose own ratio is no outlier are in it.
    num_spans: that the values are of; None: one each.
    """
    if (len(measured) if num_spans is None else num_spans) < FEWEST:
        return 1.0
    times, guesses = np.asarray(measured), np.asarray(predicted)
    kept = _no_outliers(times / guesses)
    return float(times[kept].sum() / guesses[kept].sum())


def robust_remainder(measured: Sequence[float], known: Sequence[float], predicted: Sequence[float]) -> float:
    """Return the factor of one part of what was measured; the other part is known. Never below ``LEAST``.

    Only values whose ratio to both parts is no outlier are in it, as in ``factor``; 1 for fewer than ``FEWEST``.
    """
    if len(measured) < FEWEST:
        return 1.0
    times, rest, guesses = np.asarray(measured), np.asarray(known), np.asarray(predicted)
    kept = _no_outliers(times / (rest + guesses))
    return max(LEAST, float((times - rest)[kept].sum() / guesses[kept].sum()))


@dataclass(frozen=True, slots=True)
class DeviceTotal:
    """What a device, or a stage, did in the steps of a run, in seconds: all of it, and predictions of its parts."""

    measured_s: float
    parts_s: tuple[float, ...]
    """Of each kind of work."""
    num_steps: int
    """With those that are left out."""
    num_spans: int
    """Likewise."""

    @classmethod
    def of(cls, steps: Sequence[tuple[float, Sequence[float], int]]) -> DeviceTotal | None:
        """Sum steps whose ratio of measured to predicted is no outlier; None if nothing was predicted.

        steps: of each what was measured, its parts, and its number of spans.
        """
        known = [each for each in steps if sum(each[1]) > 0.0]
        if not known:
            return None
        measured, parts = (np.array([each[at] for each in known]) for at in (0, 1))
        kept = _no_outliers(measured / parts.sum(axis=1))
        num_spans = sum(each[2] for each in known)
        return cls(float(measured[kept].sum()), tuple(parts[kept].sum(axis=0).tolist()), len(known), num_spans)


def part_factors(totals: Sequence[DeviceTotal], num_parts: int) -> list[float]:
    """Return a factor of each part of what devices do; never below ``LEAST``.

    They are the likeliest if two of them differ by ``_APART``, totals are off by ``_NOISE`` and steps by
    ``_STEP_NOISE`` (one standard deviation each). So devices whose work is alike get about one factor for all of it,
    since they say nothing of its parts, and a part that none has gets the others' mean. 1 for fewer spans than
    ``FEWEST``.
    """
    if sum(total.num_spans for total in totals) < FEWEST:
        return [1.0] * num_parts
    measured = np.array([total.measured_s for total in totals])
    parts = np.array([total.parts_s for total in totals])
    common = float(measured.sum() / parts.sum())
    num_steps = np.array([total.num_steps for total in totals])
    weights = 1.0 / (measured * np.sqrt(_NOISE**2 + _STEP_NOISE**2 / num_steps))
    prior = (np.eye(num_parts) - 1.0 / num_parts) * np.sqrt(2.0) / (_APART * common)
    values = np.concatenate([measured * weights, np.zeros(num_parts)])
    found = np.linalg.lstsq(np.vstack([parts * weights[:, None], prior]), values)[0]
    return [float(each) for each in np.maximum(found, LEAST)]


class CalibratedTimes:
    """``ModuleTimes`` of a profile or of data sheets, with a run's factors."""

    def __init__(self, base: ModuleTimes, calibration: Calibration) -> None:
        self._base, self._by = base, calibration

    def layer_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._by.backbone * self._base.layer_s(num_tokens, tp)

    def head_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._by.head * self._base.head_s(num_tokens, tp)

    def connector_s(self, num_tokens: FloatArray, tp: int) -> FloatArray:
        """As ``ModuleTimes``."""
        return self._by.backbone * self._base.connector_s(num_tokens, tp)

    def microbatches_s(self, works: MicrobatchColumns, tp: int) -> MicrobatchSeconds:
        """As ``ModuleTimes``."""
        found, by = self._base.microbatches_s(works, tp), self._by.backbone
        return MicrobatchSeconds(
            by * found.layer,
            self._by.head * found.head,
            self._by.head * found.head_forward,
            by * found.connector,
            by * found.embedding,
        )

    def images_s(self, encoder: str, tp: int, *, together: FloatArray | float | None = None) -> FloatArray:
        """As ``ModuleTimes``."""
        if together is not None:
            return self._by.encoder(encoder) * self._base.images_s(encoder, tp, together=together)
        return np.maximum(*self.encode_stages_s(encoder, tp))

    def encode_stages_s(self, encoder: str, tp: int) -> tuple[FloatArray, FloatArray]:
        """As ``ModuleTimes``; the factor is of the device's work."""
        decoding, forward = self._base.encode_stages_s(encoder, tp)
        return decoding, self._by.encoder(encoder) * forward

    def sample_s(self, encoder: str, tp: int) -> float:
        """As ``ModuleTimes``."""
        seconds = self.images_s(encoder, tp)
        return float(seconds[seconds > 0.0].mean()) if seconds.any() else self._base.sample_s(encoder, tp)

    def microbatch_s(self, replica_size: IntArray) -> FloatArray:
        """As ``ModuleTimes``; factors are of what spans take beside it."""
        return self._base.microbatch_s(replica_size)

    @property
    def launch_s(self) -> float:
        """As ``ModuleTimes``; no span tells it."""
        return self._base.launch_s

    @property
    def forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return self._base.forward_share

    @property
    def pass_s(self) -> float:
        """As ``ModuleTimes``."""
        return self._by.backbone * self._base.pass_s

    @property
    def pass_forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return self._base.pass_forward_share

    def step_s(self, num_parameters: FloatArray) -> FloatArray:
        """As ``ModuleTimes``; once a step, where it happens, the host's work."""
        return self._by.optimizer * self._base.step_s(num_parameters) + (self._by.step_host_s or 0.0)

    def ends_s(self, trained: FloatArray) -> FloatArray | None:
        """As ``ModuleTimes``."""
        found = self._base.ends_s(trained)
        return None if found is None else self._by.ends * found

    @property
    def ends_forward_share(self) -> float:
        """As ``ModuleTimes``."""
        return self._base.ends_forward_share

    def first_backward_s(self, trained: FloatArray) -> FloatArray:
        """As ``ModuleTimes``; it is a part of a backward."""
        return self._by.backbone * self._base.first_backward_s(trained)

    def slowdown(self, encoder: str) -> float | None:
        """As ``ModuleTimes``."""
        return self._base.slowdown(encoder)

    @property
    def collectives(self) -> float:
        """As ``ModuleTimes``."""
        return self._by.collectives

    def replicas_s(
        self, sharding: str, parameters: FloatArray, shards: FloatArray
    ) -> tuple[FloatArray, FloatArray] | None:
        """As ``ModuleTimes``."""
        found, by = self._base.replicas_s(sharding, parameters, shards), self._by.collectives
        return None if found is None else (by * found[0], by * found[1])

    def host_s(self, num_microbatches: FloatArray, replicas: FloatArray, *, has_encoders: bool) -> FloatArray:
        """As ``ModuleTimes``; 0 where the host's work of a whole step is known."""
        if self._by.step_host_s is not None:
            return np.zeros_like(num_microbatches)
        return self._base.host_s(num_microbatches, replicas, has_encoders=has_encoders)


def factors_text(calibration: Calibration) -> Mapping[str, str]:
    """Return the factors in words, by what they are of."""
    encoders = {f"encoders.{name}": f"{value:.3f}" for name, value in (calibration.encoders or {}).items()}
    return {
        "backbone": f"{calibration.backbone:.3f}",
        "head": f"{calibration.head:.3f}",
        **encoders,
        "collectives": f"{calibration.collectives:.3f}",
        "ends of a step": f"{calibration.ends:.3f}",
        "optimizer": f"{calibration.optimizer:.3f}",
        "host": "not known" if (host_s := calibration.step_host_s) is None else f"{1e3 * host_s:.3g} ms a step",
    }
