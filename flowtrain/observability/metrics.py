"""``metrics.jsonl``: one object a training step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowtrain.observability.files import JsonLines, read_json_lines
from flowtrain.types import METRICS_SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; the field names are its keys.

    Counts and totals are global. timestamp: seconds since the Unix epoch, when the step was done. epoch: passes over
    the data, a fraction. step_time_s: wall time since the step before. mfu: model FLOPs over the devices' peak, None
    where the peak is not known. starved_s, fetch_s: mean over ranks. blocked_s: encoders waited for pool memory, in
    sum. packing_fill: backbone tokens over the capacity of the step's microbatches. dp_imbalance: how much dearer the
    dearest rank is than the mean (0 if even). eval_loss: None unless an evaluation followed the step. rejected: samples
    so far. Values that are not finite are written as null.
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
    starved_s: float
    blocked_s: float
    fetch_s: float
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
        self._path = path
        self._lines = JsonLines(path)
        self._last_record: dict[str, Any] | None = None

    def write(self, metrics: StepMetrics) -> None:
        """Append a step."""
        self._last_record = metrics.as_record()
        self._lines.append(self._last_record)

    def amend_eval_loss(self, step: int, eval_loss: float) -> bool:
        """Give the last line, if it is of ``step``, the loss of the evaluation that followed; returns whether it was.

        So a step's line need not wait for its evaluation: a checkpoint may lie between them.
        """
        last = self._last_record
        if last is None or last["step"] != step:
            return False
        self._last_record = {**last, "eval_loss": None if _not_finite(eval_loss) else eval_loss}
        self._lines.replace_last(self._last_record)
        return True

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, before a run resumes from a checkpoint of ``step``."""
        self._lines.keep(lambda record: record["step"] <= step)
        self._last_record = deque(read_json_lines(self._path), maxlen=1)[0] if self._path.stat().st_size else None

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a ``metrics.jsonl`` in order; a torn last line is left out."""
    return read_json_lines(path)


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
