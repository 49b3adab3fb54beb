"""Gauges in Ray's metrics, for the Ray dashboard and Prometheus. The only file of this package that imports Ray."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Gauge

from flowtrain.observability.metrics import StepMetrics
from flowtrain.types.memory import Tier


class RayMetricsSink:
    """Sets the ``flowtrain_`` gauges; Ray must be initialised. Prometheus shows them with Ray's prefix ``ray_``."""

    def __init__(self) -> None:
        self._step = _gauge("flowtrain_step", "Optimizer steps done.")
        self._loss = _gauge("flowtrain_loss", "Training loss of the last step.")
        self._tokens_per_second = _gauge("flowtrain_tokens_per_second", "Backbone tokens per second of the last step.")
        self._starved = _gauge("flowtrain_starved_seconds", "Time that the backbone waited for data in the last step.")
        self._blocked = _gauge("flowtrain_blocked_seconds", "Time that encoders waited for memory in the last step.")
        self._pool = _gauge("flowtrain_pool_bytes", "Bytes in use in the memory pool.", "tier")

    def update(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        tags = {"emulated": metrics.emulated or ""}  # to Prometheus an empty label is none
        self._step.set(metrics.step, tags)
        self._loss.set(metrics.loss, tags)
        self._tokens_per_second.set(metrics.tokens_per_s, tags)
        self._starved.set(metrics.starved_s, tags)
        self._blocked.set(metrics.blocked_s, tags)
        pool: Mapping[Tier, int] = {Tier.DRAM: metrics.pool_dram_nbytes, Tier.HBM: metrics.pool_hbm_nbytes}
        for tier, nbytes in pool.items():
            self._pool.set(nbytes, tags | {"tier": tier.value})


def _gauge(name: str, description: str, *tag_keys: str) -> Gauge:
    """A gauge that says whether its run's devices are emulated."""
    return Gauge(name, description, tag_keys=("emulated", *tag_keys))
