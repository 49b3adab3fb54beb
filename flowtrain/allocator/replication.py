"""Plain replication, the baseline for decoupling: every device runs first the encoders, then the backbone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.request import Request
from flowtrain.allocator.shards import num_shards
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.costs.flops import FloatArray
from flowtrain.types.plan import Degrees

AS_GOOD = 0.97
"""Replication counts as good as the plan from this share of its rate on: predictions are not more exact."""

_SEED = 0
_DRAWS = 1 << 18
"""Samples drawn in total to estimate the slowest replica's time; at most a tenth of a second."""
_MAX_STEPS = 256


@dataclass(frozen=True, slots=True)
class Replication:
    """Replicas of the whole model, one per device, that shard parameters as the run does and wait for each other."""

    device_type: str
    devices: int
    """The largest number of devices that divides the batch."""
    rate: float | None
    """Samples/s; None if the replicas do not fit."""
    imbalance: float
    """Time of a step's slowest replica over the mean, minus one; replicas get random samples."""
    peak_nbytes: int
    """Predicted peak on each device."""
    memory_nbytes: int
    """Memory of a device that a replica may use."""


def replicate(request: Request, surrogate: Surrogate) -> Replication:
    """Return the fastest replication on one type of device; if it fits on none, the one that lacks least memory."""
    every = [_on(request, surrogate, each.name) for each in request.cluster.device_types if each.count]
    return max(every, key=lambda each: (each.rate or 0.0, each.memory_nbytes - each.peak_nbytes))


def _on(request: Request, surrogate: Surrogate, device_type: str) -> Replication:
    batch, counts = request.workload.global_batch_size, np.arange(1, request.cluster[device_type].count + 1)
    counts = counts[batch % counts == 0]
    if request.setup.sharding == "hybrid":
        per_node = request.cluster[device_type].devices_per_node
        counts = counts[num_shards(request.setup, counts, np.ones_like(counts), per_node) > 0]
    dp = int(counts.max())
    # Encoders are unsharded on every device: dp shards only the backbone.
    encoders = sum(request.peak_nbytes(Candidate(name, device_type, Degrees())) for name in request.model.encoders)
    memory = request.memory_nbytes(BACKBONE, device_type)
    backbone = request.backbone(Degrees(dp), device_type, memory - encoders)
    peak = encoders + request.peak_nbytes(backbone)
    if peak > memory:
        return Replication(device_type, dp, None, 0.0, peak, memory)
    step = surrogate.step_time(backbone)
    computing = float(step.computing[0])
    seconds = _sample_s(request, surrogate, device_type, computing * dp / batch)
    mean, slowest = _share_s(seconds, batch // dp, dp)
    rate = batch / (float(step.total[0]) - computing + slowest)
    return Replication(device_type, dp, rate, slowest / mean - 1.0, peak, memory)


def _sample_s(request: Request, surrogate: Surrogate, device_type: str, backbone_s: float) -> FloatArray:
    """Seconds of each sample on one device, ``[S]``: by its FLOPs, scaled to the surrogate's means."""
    workload, model = request.workload, request.model
    flops = workload.flops(model)
    seconds = backbone_s * _relative(flops.backbone + flops.connector)
    encoders_s = sum(
        workload.share(name) / surrogate.rate(Candidate(name, device_type, Degrees())) for name in model.encoders
    )
    return seconds + encoders_s * _relative(flops.encoders)


def _relative(values: FloatArray) -> FloatArray:
    mean = float(values.mean())
    return values / mean if mean else np.ones_like(values)


def _share_s(seconds: FloatArray, num_samples: int, num_replicas: int) -> tuple[float, float]:
    """Expected seconds of one replica with random samples, and of the slowest of ``num_replicas``."""
    mean = float(seconds.mean()) * num_samples
    if not np.ptp(seconds) or num_replicas == 1:
        return mean, mean
    steps = int(np.clip(_DRAWS // (num_samples * num_replicas), 1, _MAX_STEPS))
    drawn = np.random.default_rng(_SEED).choice(seconds, (steps, num_replicas, num_samples))
    return mean, float(drawn.sum(axis=2).max(axis=1).mean())
