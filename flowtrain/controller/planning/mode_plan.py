"""The plan that starts what a mode's rating promises."""

from __future__ import annotations

from dataclasses import replace

from flowtrain.allocator.allocation import ModuleAllocation
from flowtrain.allocator.mode_rating import ModeRating
from flowtrain.allocator.plan import feeders_for, fixed_plan
from flowtrain.config.modes import colocated_shares
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned import Planned
from flowtrain.costs.cluster import Cluster, accelerator_type
from flowtrain.costs.profiled_times import CPU
from flowtrain.types.run_plan import ModulePlan, Plan


def plan_of(planned: Planned, rating: ModeRating, cluster: Cluster) -> Plan:
    """Return the configuration's own plan, with the degrees, types and shares of devices of a mode's best plan."""
    assert rating.rate is not None and rating.modules, "only what fits has a plan"
    config = planned.config.model_copy(update={"mode": rating.mode})
    usual, on_cpu = fixed_plan(config), config.model.device == "cpu" or cluster.device_types[0].name == CPU
    several = len(cluster.device_types) > 1
    *encoders, backbone = rating.modules

    def module_plan(chosen: ModuleAllocation, module: ModulePlan) -> ModulePlan:
        dp, pp, tp = chosen.degrees.dp, chosen.degrees.pp, chosen.degrees.tp
        module = replace(module, data_parallel_size=dp, tensor_parallel_size=tp, pipeline_parallel_size=pp)
        if several:
            module = replace(module, accelerator_type=accelerator_type(chosen.device_type))
        return module

    feeder = usual.feeder
    if config.data.num_feeders is None:
        feeder = replace(feeder, data_parallel_size=feeders_for(rating.rate, rating.devices))
    plan = replace(
        usual,
        feeder=feeder,
        encoders={each.encoder: module_plan(each, usual.encoders[each.encoder]) for each in encoders},
        backbone=module_plan(backbone, usual.backbone),
        gradient_reduction=backbone.gradient_reduction,
        hybrid_shard_size=_shard_size(config, rating),
        backbone_settings=rating.settings,
        encoder_layers=rating.encoder_layers,
    )
    if config.emulation is not None:
        return plan  # actors on emulated devices reserve nothing
    return _on_cpus(plan, config, rating.devices) if on_cpu else _on_devices(plan, config, rating.devices)


def _on_devices(plan: Plan, config: RunConfig, devices: int) -> Plan:
    """Rates are of whole devices: an actor gets a whole one, whatever share is configured, unless several share it."""
    shares, rest = colocated_shares(config)
    if plan.mode != "colocated":
        shares = dict.fromkeys(plan.encoders, _rounded_down(1.0 / _sharing(plan, devices)))
        rest = _rounded_down(1.0 / _sharing(plan, devices))
    encoders = {name: replace(module, num_devices=shares[name]) for name, module in plan.encoders.items()}
    return replace(plan, encoders=encoders, backbone=replace(plan.backbone, num_devices=rest))


def _on_cpus(plan: Plan, config: RunConfig, devices: int) -> Plan:
    """Actors reserve what is configured, but those of one device no more than its CPUs together."""
    device_cpus = cpus_of_a_device(config)
    together = plan.backbone.num_cpus + sum(module.num_cpus for module in plan.encoders.values())
    alone = plan.mode != "colocated" and _sharing(plan, devices) == 1

    def fitting(module: ModulePlan) -> ModulePlan:
        wanted = module.num_cpus if alone else together
        part = min(1.0, device_cpus / wanted) if wanted else 1.0
        num_cpus = module.num_cpus if part == 1.0 else _rounded_down(part * module.num_cpus)
        return replace(module, num_cpus=num_cpus)

    encoders = {name: fitting(module) for name, module in plan.encoders.items()}
    return replace(plan, encoders=encoders, backbone=fitting(plan.backbone)).without_devices()


def cpus_of_a_device(config: RunConfig) -> float:
    """Return the CPUs that count as one device where there are no accelerators: those of a rank, at least a core."""
    return max(1.0, config.backbone.num_cpus)


def _sharing(plan: Plan, devices: int) -> int:
    """Modules that take turns on each device: all of them if there is one device."""
    return 1 + len(plan.encoders) if devices == 1 else 1


def _shard_size(config: RunConfig, rating: ModeRating) -> int | None:
    """None as well for a single replica, which has no groups."""
    backbone, settings = rating.modules[-1], rating.settings
    sharding = settings.sharding if settings is not None else None
    is_hybrid = (sharding or config.backbone.sharding) == "hybrid"
    return backbone.num_shards if is_hybrid and backbone.degrees.dp > 1 else None


def _rounded_down(amount: float) -> float:
    """To what Ray counts, so that all shares fit."""
    return int(amount * 10_000) / 10_000
