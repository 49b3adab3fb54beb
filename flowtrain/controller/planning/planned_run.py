"""The input of a run's plan: its model's shapes, and the sizes of its first steps' samples."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.run import RunConfig
from flowtrain.controller.pack import DEFAULT_STEPS, first_steps
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.predict import sized_units
from flowtrain.controller.prepare import RunSpec, check_memory, prepare, unsplittable
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError, DataError, Fault
from flowtrain.models.families.registry import family_from_config
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.types.samples import SizedSample


def planned_run(config: RunConfig) -> Planned:
    """Size the samples of a run's first steps, as ``flowtrain pack`` does; raises what ``prepare`` raises."""
    # Without images nothing would be known of encoders, whose work all modes but one have.
    sized = config.model_copy(update={"mode": "decoupled"}) if config.mode == "llm_only" else config.settled
    run_spec = prepare(sized, check_pool=False)
    workload = workload_of(config, planned_samples(run_spec))
    usual = fixed_plan(config)  # without the segment of a feeder, which a run sizes by its data
    num_devices = usual.backbone.num_actors
    if usual.mode != "colocated":
        num_devices += sum(module.num_actors for module in usual.encoders.values())
    source = f"run {config.name}: {first_steps(_num_steps(run_spec), run_spec.num_steps)}"
    family = family_from_config(config)

    def pool_fault(changed: RunConfig) -> Fault | None:
        try:
            check_memory(changed, family, run_spec.num_eval)
        except ConfigError as error:
            return error.faults[0]
        return None

    whole = unsplittable(family, run_spec.model_spec)
    return Planned(config, run_spec.model_spec, workload, source, num_devices, pool_fault, whole)


def planned_samples(run_spec: RunSpec) -> list[SizedSample]:
    """Return the samples of a run's first steps; DataError if all are rejected."""
    count = _num_steps(run_spec)
    samples = [sample for unit in sized_units(run_spec, count) for sample in unit.samples]
    if not samples:
        steps = first_steps(count, run_spec.num_steps)
        raise DataError(f"run {run_spec.config.name}: every sample of {steps} is rejected")
    return samples


def workload_of(config: RunConfig, samples: Sequence[SizedSample]) -> Workload:
    """Return the work of these samples for a run's modules."""
    sizes = SampleSizes.in_order(samples, list(range(len(samples))), config.encoders, config.pool.alignment)
    return Workload(
        global_batch_size=config.training.global_batch_size,
        microbatch_tokens=config.scheduler.microbatch_tokens,
        lengths=sizes.tokens,
        vision_lengths=sizes.vision_tokens,
        target_lengths=sizes.target_tokens,
        images={name: (part.images, part.patches) for name, part in sizes.parts.items()},
        freeze=config.frozen_modules,
    )


def _num_steps(run_spec: RunSpec) -> int:
    return min(DEFAULT_STEPS, run_spec.num_steps)
