"""``metrics.jsonl``: one object per training step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowtrain.observability.files import MAX_WAITING_NBYTES, JsonLines, read_json_lines
from flowtrain.types.events import METRICS_SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; the field names are its keys.

    Counts and totals are global. Values that are not finite are written as null.
    """

    step: int
    epoch: float
    """Passes over the data, a fraction."""
    loss: float
    lr: float
    grad_norm: float | None
    """Before clipping."""
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    """Tokens that carry loss."""
    step_time_s: float
    """Wall time since the step before."""
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float | None
    """FLOPs of all modules over the peak of all devices; None if the peak is not known."""
    backbone_mfu: float | None
    """FLOPs of backbone and connector over the peak of the backbone's devices; None if the peak is not known."""
    peak_flops: float | None
    """Peak of one device, in FLOP/s; None if it is not known."""
    starved_s: float
    """Time that the backbone waited for data: mean over replicas of each replica's slowest rank."""
    blocked_s: float
    """Time that encoders waited for pool memory, sum over encoders."""
    fetch_s: float
    """Time to read the step from the pool: mean over replicas of each replica's slowest rank."""
    read_nbytes: int
    """Bytes of features or encoded images that ranks read, over all ranks."""
    plan_digest: str
    """Digest of the step's plan; ``flowtrain pack`` predicts the same."""
    plan_time_s: float
    produced_samples_per_s: float
    """Samples that became ready."""
    consumed_samples_per_s: float
    """Samples that were trained."""
    num_microbatches: int
    packing_fill: float
    """Backbone tokens over the capacity of the step's microbatches."""
    dp_imbalance: float
    """Cost of the costliest rank over the mean, minus 1 (0 if even)."""
    pool_dram_nbytes: int
    pool_hbm_nbytes: int
    eval_loss: float | None
    """None unless an evaluation followed the step."""
    rejected: int
    """Samples rejected so far."""
    skipped: bool = False
    """The loss or the gradients were not finite, and the step made no update."""
    skipped_steps: int = 0
    """Steps of the run that were skipped so far."""
    emulated: str | None = None
    """The emulated device whose time all durations and rates are in (docs/emulated.md); None: devices are real."""
    host_s: float | None = None
    """On emulated devices, seconds of this machine in which a rank neither computed nor waited for data or another
    rank: mean over replicas of each replica's slowest rank."""
    rewound_to: int | None = None
    """Weights and optimizer went back, after the step, to the checkpoint of this step; None: they did not."""
    timestamp: float = field(default_factory=time.time)
    """End of the step, in seconds since the Unix epoch."""
    schema: int = METRICS_SCHEMA

    def as_record(self) -> dict[str, Any]:
        """The JSON object, ``schema`` and ``timestamp`` first."""
        record = dataclasses.asdict(self)
        ordered = {"schema": record.pop("schema"), "timestamp": record.pop("timestamp"), **record}
        return {key: None if _not_finite(value) else value for key, value in ordered.items()}


class MetricsWriter:
    """Writes one line per step; after a kill, a reader sees each line complete or not at all.

    A line that cannot be written is kept and written later, see ``JsonLines``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = JsonLines(path)

    def write(self, metrics: StepMetrics) -> None:
        """Append a step; raises OSError if it cannot be written now."""
        self._lines.append(metrics.as_record())

    @property
    def holds_too_much(self) -> bool:
        """Whether more lines wait than memory should hold."""
        return self._lines.waiting_nbytes > MAX_WAITING_NBYTES

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of lines that could not be written yet."""
        return self._lines.waiting_nbytes

    def sync(self) -> None:
        """Make the written lines survive a power cut; raises OSError if they cannot be written now."""
        self._lines.sync()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, before a run resumes from a checkpoint of ``step``."""
        self._lines.keep(lambda record: record["step"] <= step)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a ``metrics.jsonl`` in order, without an incomplete last line."""
    return read_json_lines(path)


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
