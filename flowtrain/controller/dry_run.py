"""What a run would do, without starting anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowtrain.allocator.run_memory import RunMemory, memory_of_run
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned_run import workload_of
from flowtrain.controller.planning.report import PlanReport
from flowtrain.controller.predict import image_tokens, sized_units
from flowtrain.controller.prepare import RunSpec, prepare
from flowtrain.controller.resume import Resumption, foresee_resume
from flowtrain.types.run_plan import Plan


@dataclass(frozen=True)
class DryRunReport:
    """What a run would be."""

    run: RunSpec
    """Its configuration, plan, steps, data and model."""
    image_tokens: dict[str, tuple[int, int]]
    """By encoder: the fewest and the most tokens of an image, see ``predict.image_tokens``."""
    memory: RunMemory | None = None
    """Predicted for some of the data's samples; None if all of them are rejected."""
    resumption: Resumption | None = None
    """The step that a resume would go on from, and what changed; None if no resume was asked for."""
    planning: PlanReport | None = None
    """The plan that ``mode: auto`` made; None if there was nothing to choose."""


def foresee_run(config: RunConfig, resume: bool = False, plan: Plan | None = None) -> DryRunReport:
    """Look at data, model headers and checkpoints as a run would; raises the same ConfigError or DataError.

    plan: the plan that the configuration has its degrees from; None: they are its own.
    """
    run_spec = prepare(config, plan=plan)
    resumption = foresee_resume(run_spec) if resume else None
    return DryRunReport(run_spec, image_tokens(run_spec), foresee_memory(run_spec), resumption)


def foresee_memory(run_spec: RunSpec) -> RunMemory | None:
    """Predict the memory of each rank and encoder, for samples like those in one block of each source."""
    config = run_spec.config
    # A step's own samples would be in as many blocks as are open at a time.
    data = config.data.model_copy(update={"shuffle": "blocks", "shuffle_blocks": 1})
    few = replace(run_spec, config=config.model_copy(update={"data": data}))
    samples = [sample for unit in sized_units(few, 1) for sample in unit.samples]
    if not samples:
        return None
    on_cpu = config.model.device == "cpu"
    return memory_of_run(config, run_spec.model_spec, workload_of(config, samples), on_cpu=on_cpu)
