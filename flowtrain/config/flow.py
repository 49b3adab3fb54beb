"""How data flows: scheduler, memory pool, limits on waiting, observability."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from flowtrain.config.base import MAX_DURATION_S, ConfigModel
from flowtrain.config.trackers import tracker_faults
from flowtrain.errors import ConfigError

START_BASE_S = 300.0
"""Limit of a start that reads no weights: processes start, import, and meet."""


class SchedulerConfig(ConfigModel):
    """Packing and dispatch. docs/scheduling.md describes the methods of ``packing``, ``cost`` and ``dispatch``."""

    packing: Literal[
        "best_fit_balanced", "best_fit", "best_fit_decreasing", "balanced", "isf", "groups", "sequential", "random"
    ] = "best_fit_balanced"
    microbatch_tokens: int = Field(4096, ge=8, le=1 << 26)
    """Capacity of one packed microbatch. ``data.max_seq_len`` limits one sample."""
    cost: Literal["eq3", "tokens", "flops", "profile"] = "eq3"
    cost_profile: str | None = None
    """The fitted costs that ``cost: profile`` uses: a ``profile.json`` that an earlier run of this model wrote."""
    num_buckets: int = Field(4, ge=1, le=1 << 12)
    """Number of classes of similar cost."""
    dispatch: Literal["lpt", "zigzag", "round_robin"] = "lpt"
    lookahead_steps: int = Field(2, ge=1, le=1 << 16)
    """Units that are sized, planned and encoded ahead of the backbone. With ``data.order: arrival`` also the window W:
    the most steps that a position may wait."""


class PoolConfig(ConfigModel):
    """The unified memory pool."""

    feeder_segment_nbytes: int | None = Field(None, ge=1 << 16)
    """Memory that each feeder gives for texts and encoded images; None: what a worst-case step and the open blocks
    need (docs/running.md). Pages that are not used take no memory."""
    max_processes: int = Field(1 << 16, ge=4, le=1 << 24)
    """N of the address space (FlowTrain 3.2): ``processes_per_node`` times the number of nodes. Reserving addresses
    costs nothing."""
    processes_per_node: int = Field(256, ge=4, le=1 << 24)
    """Process indices that a node owns: encoders, ranks, feeders. A restarted process takes a new one."""
    max_segment_nbytes: int = Field(1 << 36, ge=1 << 20, le=1 << 46)
    """C of the address space (FlowTrain 3.2). Reserving addresses costs nothing."""
    alignment: int = Field(256, ge=64, le=1 << 30, multiple_of=64)
    """Bytes to which every extent is aligned; a multiple of 64, a cache line."""
    network: Literal["none", "auto", "nixl"] = "none"
    """How processes on several nodes read each other's memory. ``none`` keeps the run on one node. ``auto`` uses NIXL
    if the run needs several nodes and all have NIXL. NIXL opens ports without authentication (docs/running.md), so it
    is never the default."""
    exchange: Literal["pool", "point_to_point"] = "pool"
    """How features reach the backbone. ``pool``: ranks read them in shared memory as soon as they are there.
    ``point_to_point``, for comparisons: ranks receive the features of a unit over sockets, all together once the unit
    is encoded, and encoders begin a unit when the one before is received. For one node."""
    transfer_timeout_s: float = Field(30.0, gt=0, le=MAX_DURATION_S)
    """The longest that a read between nodes may take, and that an owner of features may send nothing over a socket."""
    hbm_segment_nbytes: int = Field(0, ge=0)
    """Device memory that each encoder gives in addition, if it computes on an accelerator; 0: none."""
    hbm_low_watermark: float = Field(0.75, gt=0, le=1)
    """Share of the device memory in use below which features go to it again."""
    hbm_high_watermark: float = Field(0.9, gt=0, le=1)
    """Share of the device memory in use above which features go to DRAM."""


class LimitsConfig(ConfigModel):
    """Limits on waiting, in seconds. When one passes, a message names who waits for what."""

    placement_timeout_s: float = Field(120.0, gt=0, le=MAX_DURATION_S)
    start_timeout_s: float | None = Field(None, gt=0, le=MAX_DURATION_S)
    """For all backbone ranks to load and join their group; None: by the model's size (docs/running.md)."""
    stall_warning_s: float = Field(60.0, gt=0, le=MAX_DURATION_S)
    stall_timeout_s: float = Field(900.0, gt=0, le=MAX_DURATION_S)
    lease_timeout_s: float = Field(600.0, gt=0, le=MAX_DURATION_S)
    collective_timeout_s: float = Field(600.0, gt=0, le=MAX_DURATION_S)
    """For one forward, backward, transfer or collective of the backbone, one batch of an encoder, one sample of a
    feeder; what takes longer hangs."""
    silence_timeout_s: float = Field(120.0, gt=0, le=MAX_DURATION_S)
    """For an answer of an encoder, feeder or rank, which answers the driver whatever it computes; one that is silent
    for longer, or for ``collective_timeout_s``, hangs. A process that loads its model has the time of a start."""
    stop_timeout_s: float = Field(60.0, gt=0, le=MAX_DURATION_S)
    preemption_grace_s: float | None = Field(None, gt=0, le=MAX_DURATION_S)
    """After SIGTERM; then the run ends without the checkpoint that is not complete. None: it waits for that."""
    max_encoder_restarts: int = Field(10, ge=0)
    coordinator_timeout_s: float = Field(60.0, gt=5, le=MAX_DURATION_S)
    """For a sign of life of the coordinator, which answers the driver every few seconds."""
    max_coordinator_restarts: int = Field(5, ge=0)
    """How often all actors may go back to a checkpoint because the coordinator was lost, or start again because the
    first start lost a process; 0: that ends the run."""
    max_backbone_restarts: int = Field(5, ge=0)
    """How often the backbone may go back to a checkpoint because a rank was lost; 0: a lost rank ends the run."""
    elastic_after_s: float | None = Field(None, gt=0, le=MAX_DURATION_S)
    """For a lost node without which no step is trained; then the run goes on from its last checkpoint with the
    data-parallel degrees that the other nodes have room for, until there is room for all. None: it waits for the node,
    and ends after ``start_timeout_s``."""

    @property
    def start_limit_s(self) -> float:
        """``start_timeout_s``. The driver of a run sets it by the model's size if it is None; others use the base."""
        return START_BASE_S if self.start_timeout_s is None else self.start_timeout_s


class TraceConfig(ConfigModel):
    """What ``trace.json`` covers; ``flowtrain trace`` traces other steps while the run trains."""

    steps: int = Field(100, ge=0)
    """Steps from the start or a resume; 0 turns it off."""


class ObservabilityConfig(ConfigModel):
    """What a run shows."""

    progress: Literal["auto", "plain", "off"] = "auto"
    """``auto``: a live display on a terminal, elsewhere one line every few seconds; ``plain``: always these lines."""
    trace: TraceConfig = TraceConfig()
    ray_metrics: bool = True
    """Export the run's metrics to Ray's (docs/trackers.md)."""
    trackers: tuple[str, ...] = ()
    """Who follows the run beside its own files: ``tensorboard``, ``wandb``, ``mlflow``, or a class of your own as
    ``package.module:Class``, whose code then runs in the driver (docs/trackers.md)."""
    tracker_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments of trackers, by their names. Credentials come from the environment alone."""
    report: bool = True
    """Write ``report.html`` at the end of the run (docs/report.md)."""
    report_thumbnails: bool = True
    """Show pictures of rejected and generated samples in it."""
    dashboard: bool = True
    """Start the Ray dashboard on localhost when the run starts its own Ray."""

    @model_validator(mode="after")
    def _known_trackers(self) -> ObservabilityConfig:
        fault = next(tracker_faults(self.trackers, self.tracker_options), None)
        if fault is not None:
            raise ConfigError(fault.text, [fault])
        return self
