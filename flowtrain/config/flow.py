"""How it flows: scheduler, memory pool, limits on waiting, observability."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flowtrain.config.base import ConfigModel


class SchedulerConfig(ConfigModel):
    """Packing and dispatch.

    packing, cost, dispatch: methods by name (docs/scheduling.md). microbatch_tokens: capacity of one packed microbatch
    (not ``data.max_seq_len``, what one sample may have). cost_profile: the fitted model that ``cost: profile`` uses, a
    ``cost_profile.json`` that an earlier run of this model wrote. num_buckets: classes of similar cost.
    lookahead_steps: units that are sized, planned and encoded ahead of the backbone; with ``data.order: arrival`` also
    the window W, the steps that a position may wait at most.
    """

    packing: Literal[
        "best_fit_balanced", "best_fit", "best_fit_decreasing", "balanced", "isf", "sequential", "random"
    ] = "best_fit_balanced"
    microbatch_tokens: int = Field(4096, ge=8)
    cost: Literal["eq3", "tokens", "flops", "profile"] = "eq3"
    cost_profile: str | None = None
    num_buckets: int = Field(4, ge=1)
    dispatch: Literal["lpt", "zigzag", "round_robin"] = "lpt"
    lookahead_steps: int = Field(2, ge=1)


class PoolConfig(ConfigModel):
    """The unified memory pool.

    text_segment_nbytes: what the feeder gives for token ids. max_processes, max_segment_nbytes: extent of the address
    space (N and C of FlowTrain 3.2); reserving costs nothing. processes_per_node: indices that a node owns, restarts
    included. alignment: of every extent, a multiple of 64 (a cache line). network: how processes on several nodes read
    each other: ``none`` keeps the run on one node; ``nixl``, and ``auto`` where the run needs several nodes and all
    have NIXL, opens ports without authentication (docs/running.md), so it is never the default. transfer_timeout_s:
    what one read between nodes may take. hbm_segment_nbytes: device memory that each encoder gives besides, where it
    computes on an accelerator (0: none); above hbm_high_watermark, a share of it, features go to DRAM until less than
    hbm_low_watermark is in use.
    """

    text_segment_nbytes: int = Field(64 << 20, ge=1 << 16)
    max_processes: int = Field(1024, ge=4)
    processes_per_node: int = Field(64, ge=4)
    max_segment_nbytes: int = Field(1 << 36, ge=1 << 20)
    alignment: int = Field(256, ge=64, multiple_of=64)
    network: Literal["none", "auto", "nixl"] = "none"
    transfer_timeout_s: float = Field(30.0, gt=0)
    hbm_segment_nbytes: int = Field(0, ge=0)
    hbm_low_watermark: float = Field(0.75, gt=0, le=1)
    hbm_high_watermark: float = Field(0.9, gt=0, le=1)


class LimitsConfig(ConfigModel):
    """Limits on waiting, in seconds. Each prints who waits for what when it passes."""

    placement_timeout_s: float = Field(120.0, gt=0)
    start_timeout_s: float = Field(300.0, gt=0)
    stall_warning_s: float = Field(60.0, gt=0)
    stall_timeout_s: float = Field(900.0, gt=0)
    lease_timeout_s: float = Field(600.0, gt=0)
    stop_timeout_s: float = Field(60.0, gt=0)
    max_encoder_restarts: int = Field(10, ge=0)


class ObservabilityConfig(ConfigModel):
    """What a run shows. trace_steps: steps that ``trace.json`` covers (from the start or a resume; 0 turns it off).

    progress: the live display (``auto``: on a terminal; else one line every few seconds). dashboard: start the Ray
    dashboard on localhost when the run starts its own Ray.
    """

    progress: Literal["auto", "plain", "off"] = "auto"
    trace_steps: int = Field(100, ge=0)
    ray_metrics: bool = True
    dashboard: bool = True
