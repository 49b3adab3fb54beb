"""What of a run decides its plan: its model's shapes, and the sizes of its first steps' samples."""

from __future__ import annotations

from flowtrain.allocator.plan import fixed_plan
from flowtrain.allocator.workload import Workload
from flowtrain.config.run import RunConfig
from flowtrain.controller.pack import DEFAULT_STEPS, first_steps
from flowtrain.controller.planning import Planned
from flowtrain.controller.predict import sized_units
from flowtrain.controller.prepare import prepare
from flowtrain.errors import DataError
from flowtrain.scheduler.sample_sizes import SampleSizes


def planned_run(config: RunConfig) -> Planned:
    """Size the samples of a run's first steps, as ``flowtrain pack`` does; raises as ``prepare``."""
    prepared = prepare(config, check_pool=False)
    count = min(DEFAULT_STEPS, prepared.num_steps)
    samples = [sample for unit in sized_units(prepared, count) for sample in unit.samples]
    if not samples:
        raise DataError(f"run {config.name}: every sample of {first_steps(count, prepared.num_steps)} is rejected")
    sizes = SampleSizes.in_order(samples, list(range(len(samples))), config.encoders, config.pool.alignment)
    workload = Workload(
        global_batch_size=config.training.global_batch_size,
        microbatch_tokens=config.scheduler.microbatch_tokens,
        lengths=sizes.tokens,
        vision_lengths=sizes.vision_tokens,
        target_lengths=sizes.target_tokens,
        images={name: (part.images, part.patches) for name, part in sizes.parts.items()},
        freeze=config.model.freeze,
    )
    plan = fixed_plan(config)
    num_devices = plan.backbone.num_actors + sum(module.num_actors for module in plan.encoders.values())
    source = f"run {config.name}: {first_steps(count, prepared.num_steps)}"
    return Planned(config, prepared.model_spec, workload, source, num_devices)
