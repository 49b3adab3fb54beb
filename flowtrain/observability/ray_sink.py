"""A run's metrics in Ray's, for the Ray dashboard and Prometheus. The only file of this package that imports Ray."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from flowtrain.observability.callback import Callback
from flowtrain.observability.lasting_gauges import LastingGauges
from flowtrain.types.metrics import PoolUse, StepMetrics
from flowtrain.types.run_events import (
    CheckpointFinished,
    EvaluationFinished,
    Quarantined,
    Restarted,
    RunEnded,
    RunStarted,
    StepFinished,
)

PREFIX = "flowtrain_"
RUN_TAGS = ("run", "role", "rank", "emulated")
"""``role`` and ``rank`` are those of an actor; empty on what holds for the whole run. To Prometheus an empty label is
none."""

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "step": ("Optimizer steps done.", ()),
    "num_steps": ("Optimizer steps of the whole run.", ()),
    "loss": ("Training loss of the last step.", ()),
    "source_loss": ("Training loss of a source's samples in the last step that had some.", ("source",)),
    "eval_loss": ("Loss of a held-out set at its last evaluation.", ("set",)),
    "learning_rate": ("Learning rate of the last step.", ()),
    "gradient_norm": ("Norm of the last step's gradients before clipping.", ()),
    "tokens_per_second": ("Backbone tokens per second of the last step.", ()),
    "tokens_per_second_per_device": ("Backbone tokens per second and device of the last step.", ()),
    "mfu_ratio": ("Model FLOPs of the last step over the peak of all devices.", ()),
    "produced_samples_per_second": ("Samples that became ready per second.", ()),
    "consumed_samples_per_second": ("Samples that were trained per second.", ()),
    "step_seconds": ("Time of the last step.", ()),
    "starved_seconds": ("Time that the backbone waited for data in the last step.", ()),
    "blocked_seconds": ("Time that encoders had no work that they may do in the last step, summed.", ()),
    "fetch_seconds": ("Time to read the last step from the pool.", ()),
    "plan_seconds": ("Time to plan the last step.", ()),
    "plan_wait_seconds": ("Time that a replica waited for the plan of the last step.", ()),
    "checkpoint_seconds": ("Time that the last checkpoint took.", ()),
    "pool_used_bytes": ("Bytes in use of what a process gives to the pool.", ("tier",)),
    "pool_bound_bytes": ("Bytes that a process gives to the pool.", ("tier",)),
    "pool_occupancy_ratio": ("Share in use of what a process gives to the pool.", ("tier",)),
    "lookahead_steps": ("Steps that were ready when the last step ended.", ()),
    "packing_fill_ratio": ("Share of the microbatches' capacity that tokens fill.", ()),
    "step_imbalance_ratio": ("Cost of the costliest replica over the mean, minus 1.", ()),
    "last_step_timestamp_seconds": ("End of the last step, since the Unix epoch.", ()),
}
"""By name without prefix: what it shows, and its tags beside those of every metric."""
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "read_bytes": ("Bytes that ranks and encoders read from the pool.", ("transport",)),
    "retries": ("Reads of storage and leases that were tried again.", ()),
    "restarts": ("Actors that were started again.", ()),
    "quarantined": ("Samples that were rejected.", ()),
    "skipped_steps": ("Steps that were not finite and made no update.", ()),
}
"""As ``GAUGES``. Ray exports a counter with ``_total`` after its name."""
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "slot_imbalance_ratio": (
        "Cost of a slot's costliest microbatch over the mean, minus 1.",
        (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    ),
}
"""By name without prefix: what it shows, and the upper bounds of its buckets."""


class RayMetricsSink(Callback):
    """Sets the ``flowtrain_`` metrics; Ray must be initialised. Prometheus shows them with Ray's prefix ``ray_``."""

    def __init__(self) -> None:
        self._gauges = LastingGauges(
            {name: Gauge(PREFIX + name, text, RUN_TAGS + tags) for name, (text, tags) in GAUGES.items()}
        )
        self._counters = {
            name: Counter(PREFIX + name, text, RUN_TAGS + tags) for name, (text, tags) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, text, list(bounds), RUN_TAGS) for name, (text, bounds) in HISTOGRAMS.items()
        }
        self._tags = dict.fromkeys(RUN_TAGS, "")
        self._pool: dict[tuple[str, str, str], PoolUse] = {}
        # Counted before the start, when the tags are not known; None: the run has started.
        self._early: list[tuple[str, int, dict[str, str]]] | None = []

    def on_run_start(self, event: RunStarted) -> None:
        """Note the run's name, and set what is known before the first step."""
        self._tags |= {"run": event.run, "emulated": event.device if event.emulated else ""}
        self._set("step", event.step)
        self._set("num_steps", event.num_steps)
        for name in ("retries", "quarantined", "skipped_steps"):
            self._show(name)
        for role in event.roles:
            self._show("restarts", role=role)
        early, self._early = self._early, None
        for name, count, tags in early or ():
            self._count(name, count, **tags)

    def on_step(self, event: StepFinished) -> None:
        """Show a finished step."""
        metrics = event.metrics
        for name, value in _values(metrics).items():
            self._set(name, value)
        for source, loss in metrics.source_losses.items():
            self._set("source_loss", loss, source=source)
        for ratio in metrics.slot_imbalance:
            self._histograms["slot_imbalance_ratio"].observe(ratio, self._tags)
        for transport, nbytes in metrics.read_nbytes_by_transport.items():
            self._count("read_bytes", nbytes, transport=transport)
        self._count("retries", metrics.retries)
        self._count("skipped_steps", int(metrics.skipped))
        self._show_pool(metrics)

    def on_evaluation(self, event: EvaluationFinished) -> None:
        """Show the loss of a held-out set."""
        self._set("eval_loss", event.loss, set=event.name)

    def on_checkpoint(self, event: CheckpointFinished) -> None:
        """Show how long a checkpoint took."""
        self._set("checkpoint_seconds", event.duration_s)

    def on_restart(self, event: Restarted) -> None:
        """Count a restart."""
        self._count("restarts", 1, role=event.role)

    def on_quarantine(self, event: Quarantined) -> None:
        """Count a rejected sample."""
        self._count("quarantined", 1)

    def on_run_end(self, event: RunEnded) -> None:
        """Let the gauges vanish; Ray keeps the counters."""
        self._gauges.close()

    def _show_pool(self, metrics: StepMetrics) -> None:
        """Show the pool; what a process gave that is gone becomes 0."""
        now = {(use.role, use.rank or "", use.tier): use for use in metrics.pool}
        for role, rank, tier in self._pool.keys() - now.keys():
            self._set_pool(PoolUse(role, rank, tier, 0, 0))
        for use in metrics.pool:
            self._set_pool(use)
        self._pool = now

    def _set_pool(self, use: PoolUse) -> None:
        tags = {"role": use.role, "rank": use.rank or "", "tier": use.tier}
        self._set("pool_used_bytes", use.used_nbytes, **tags)
        self._set("pool_bound_bytes", use.bound_nbytes, **tags)
        self._set("pool_occupancy_ratio", use.used_nbytes / use.bound_nbytes if use.bound_nbytes else 0.0, **tags)

    def _set(self, name: str, value: float | None, **tags: str) -> None:
        self._gauges.set(name, value, self._tags | tags)

    def _count(self, name: str, count: int, **tags: str) -> None:
        if self._early is not None:
            self._early.append((name, count, tags))
            return
        if count:
            self._counters[name].inc(count, self._tags | tags)

    def _show(self, name: str, **tags: str) -> None:
        """Show a counter as 0, which ``inc`` refuses: Prometheus only sees an increase from a value that it read."""
        self._counters[name]._record(0.0, self._tags | tags)


def _values(metrics: StepMetrics) -> dict[str, float | None]:
    """The gauges without tags of their own."""
    return {
        "step": metrics.step,
        "loss": metrics.loss,
        "learning_rate": metrics.lr,
        "gradient_norm": metrics.grad_norm,
        "tokens_per_second": metrics.tokens_per_s,
        "tokens_per_second_per_device": metrics.tokens_per_s_per_device,
        "mfu_ratio": metrics.mfu,
        "produced_samples_per_second": metrics.produced_samples_per_s,
        "consumed_samples_per_second": metrics.consumed_samples_per_s,
        "step_seconds": metrics.step_time_s,
        "starved_seconds": metrics.starved_s,
        "blocked_seconds": metrics.blocked_s,
        "fetch_seconds": metrics.fetch_s,
        "plan_seconds": metrics.plan_time_s,
        "plan_wait_seconds": metrics.plan_wait_s,
        "lookahead_steps": metrics.lookahead_steps,
        "packing_fill_ratio": metrics.packing_fill,
        "step_imbalance_ratio": metrics.dp_imbalance,
        "last_step_timestamp_seconds": metrics.timestamp,
    }
