"""Rates of a run by the simulator and as it was measured, over the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from _pinned import stay_on

from flowtrain.actors.backbone import BackboneRank
from flowtrain.config.run import RunConfig
from flowtrain.controller.predict import planner_of, sized_units
from flowtrain.controller.prepare import prepare
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.metrics import read_metrics
from flowtrain.scheduler.layout import Arrangement
from flowtrain.scheduler.packing.base import Bins
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.search.configured import configured_search
from flowtrain.types.plan import StepPlan

WARM_UP, ENDING = 2, 1
"""Steps that do not count."""


def simulated(config: RunConfig) -> float:
    """Return tokens/s by the simulator, of the very steps that the run would plan."""
    spec = prepare(config, check_pool=False)
    planner, known = planner_of(spec), spec.config  # it has the numbers that a word of pipeline.partition stands for
    searching = known.pipeline.model_copy(update={"policy": "pipetune"})
    timer = configured_search(known.model_copy(update={"pipeline": searching}), spec.model_spec)
    assert timer is not None
    seconds, tokens = 0.0, 0
    for number, sized in enumerate(sized_units(spec, spec.num_steps)):
        if WARM_UP <= number < spec.num_steps - ENDING:
            sizes = planner.sizes_of(sized.samples)
            arrangement = _arrangement(planner.plan(sized.unit, sizes), sizes)
            seconds += timer.seconds(sizes, arrangement) + timer.simulator.optimizer_s()
            tokens += int(sizes.tokens.sum())
    return tokens / seconds


def _arrangement(plan: StepPlan, sizes: SampleSizes) -> Arrangement:
    """The microbatches of a plan, in the order in which replicas run them."""
    members = np.searchsorted(sizes.positions, np.array(plan.positions, dtype=np.int64))
    bins = Bins(members, np.array([0, *plan.ends], dtype=np.int64))
    return Arrangement(bins, np.arange(len(plan.ends)).reshape(-1, plan.dp_size), plan.schedules)


def measured(config: RunConfig, *, pinned: bool) -> tuple[float, float]:
    """Train; return tokens/s, and the loss of the first step. pinned: each backbone rank has a core of its own."""
    summary = run_training(config, classes=ActorClasses(backbone=PinnedRank) if pinned else None)
    lines = list(read_metrics(summary.directory / "metrics.jsonl"))
    counted = lines[WARM_UP : len(lines) - ENDING]
    rate = sum(line["num_tokens"] for line in counted) / sum(line["step_time_s"] for line in counted)
    return float(rate), float(lines[0]["loss"])


class PinnedRank(BackboneRank):
    """A backbone rank on the core of its number."""

    def __init__(self, config: RunConfig, rank: int, *args: Any) -> None:
        stay_on(rank)
        super().__init__(config, rank, *args)
