"""The plans that a run's own planner makes of sizes alone."""

from __future__ import annotations

from collections.abc import Iterator

from flowtrain.config.run import RunConfig
from flowtrain.controller.predict import sized_units
from flowtrain.controller.prepare import prepare
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.types.plan import StepPlan


def predicted_plans(config: RunConfig, num_steps: int | None = None) -> Iterator[StepPlan]:
    """Yield the plans of a run's training steps, of all of them or of the first ``num_steps``."""
    run_spec = prepare(config, check_pool=False)
    planner = StepPlanner.from_config(config, run_spec.plan.backbone.data_parallel_size, run_spec.cost)
    for sized in sized_units(run_spec, num_steps):
        yield planner.plan(sized.unit, sized.samples)
