"""``metrics.jsonl``: one object a training step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowtrain.observability.files import JsonLines, read_json_lines
from flowtrain.types.events import METRICS_SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; the field names are its keys.

    Counts and totals are global. timestamp: seconds since the Unix epoch, when the step was done. epoch: passes
    over the data, a fraction. step_time_s: wall time since the step before. mfu: FLOPs of all modules over the peak
    of all devices; backbone_mfu: those of backbone and connector over the peak of the backbone's devices;
    peak_flops: that of one device, FLOP/s; all None where it is not known. starved_s, fetch_s: mean over ranks.
    blocked_s: encoders waited for pool memory, in sum. plan_digest: of the step's plan, as ``flowtrain pack``
    predicts it. packing_fill: backbone tokens over the capacity of the step's microbatches. dp_imbalance: how much
    dearer the dearest rank is than the mean (0 if even). eval_loss: None unless an evaluation followed the step.
    rejected: samples so far. Values that are not finite are written as null.
    """

    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float | None
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float | None
    backbone_mfu: float | None
    peak_flops: float | None
    starved_s: float
    blocked_s: float
    fetch_s: float
    plan_digest: str
    plan_time_s: float
    produced_samples_per_s: float
    consumed_samples_per_s: float
    num_microbatches: int
    packing_fill: float
    dp_imbalance: float
    pool_dram_nbytes: int
    pool_hbm_nbytes: int
    eval_loss: float | None
    rejected: int
    timestamp: float = field(default_factory=time.time)
    schema: int = METRICS_SCHEMA

    def as_record(self) -> dict[str, Any]:
        """The JSON object, ``schema`` and ``timestamp`` first."""
        record = dataclasses.asdict(self)
        ordered = {"schema": record.pop("schema"), "timestamp": record.pop("timestamp"), **record}
        return {key: None if _not_finite(value) else value for key, value in ordered.items()}


class MetricsWriter:
    """Writes one line a step; a line is whole or absent for whoever reads after a kill."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, metrics: StepMetrics) -> None:
        """Append a step."""
        self._lines.append(metrics.as_record())

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        self._lines.sync()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, before a run resumes from a checkpoint of ``step``."""
        self._lines.keep(lambda record: record["step"] <= step)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a ``metrics.jsonl`` in order; a torn last line is left out."""
    return read_json_lines(path)


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
