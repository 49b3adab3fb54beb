"""The figures of a training step."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import Any

METRICS_SCHEMA = 2
"""Of a line of ``metrics.jsonl``. Lines of schema 1 lack the fields from ``source_losses`` on."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What one process gives to the memory pool in one tier, and how much of it is in use."""

    role: str
    """``encoder`` or ``feeder``."""
    rank: str | None
    """The rest of its actor's name, such as ``0``; None: the sum over all processes of the role."""
    tier: str
    used_nbytes: int
    bound_nbytes: int
    """Bytes that it gives."""


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
    """Wall time since the step, evaluation or restart before it ended."""
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
    """Time of the step in which encoders held no lease, sum over encoders."""
    fetch_s: float
    """Time to read the step from the pool: mean over replicas of each replica's slowest rank."""
    read_nbytes: int
    """Bytes of features or encoded images that ranks read, over all ranks."""
    plan_digest: str
    """Digest of the step's plan; ``flowtrain pack`` predicts the same."""
    plan_time_s: float
    plan_wait_s: float
    """Time from a replica's question for the plan until it was there."""
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
    """Over all held-out sets that were evaluated after the step, as if they were one; None if there was none."""
    rejected: int
    """Samples rejected so far."""
    skipped: bool = False
    """The loss or the gradients were not finite, or the loss was a spike, and the step made no update."""
    skipped_steps: int = 0
    """Steps of the run that were skipped so far."""
    emulated: str | None = None
    """The emulated device whose time all durations and rates are in (docs/emulated.md); None: devices are real."""
    host_s: float | None = None
    """On emulated devices, seconds of this machine in which a rank neither computed nor waited for data or another
    rank: mean over replicas of each replica's slowest rank."""
    rewound_to: int | None = None
    """Weights and optimizer went back, after the step, to the checkpoint of this step; None: they did not."""
    eval_losses: dict[str, float] = field(default_factory=dict)
    """Loss of each held-out set that was evaluated after the step."""
    source_losses: dict[str, float] = field(default_factory=dict)
    """Loss of each source with samples in the step, normalised like ``loss``. Empty on emulated devices."""
    slot_imbalance: tuple[float, ...] = ()
    """Of each slot, the cost of its costliest microbatch over the mean, minus 1 (0 if even)."""
    lookahead_steps: int | None = None
    """Units that were ready as a whole when the step ended; None: not known."""
    read_nbytes_by_transport: dict[str, int] = field(default_factory=dict)
    """Bytes that ranks and encoders read from the pool since the step before, texts included, by transport."""
    retries: int = 0
    """Reads of storage and leases that were tried again since the step before."""
    restarts: int = 0
    """Actors that were started again since the step before."""
    pool: tuple[PoolUse, ...] = ()
    """Of each process that gives memory, or of each role where they are many."""
    spike: bool = False
    """The loss stood far above those of the steps before (``training.on_spike``)."""
    timestamp: float = field(default_factory=time.time)
    """End of the step, in seconds since the Unix epoch."""
    schema: int = METRICS_SCHEMA

    def as_record(self) -> dict[str, Any]:
        """The JSON object, ``schema`` and ``timestamp`` first."""
        record = {"schema": self.schema, "timestamp": self.timestamp}
        return record | {name: finite(getattr(self, name)) for name in _NAMES if name not in record}


_NAMES = tuple(each.name for each in dataclasses.fields(StepMetrics))


def finite(value: Any) -> Any:
    """Return a value as JSON has it: None for each number that is not finite, mappings for records."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, PoolUse):
        return {each.name: finite(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return value
