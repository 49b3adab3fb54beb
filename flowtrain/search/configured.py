"""The search that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace

from flowtrain.config.run import RunConfig
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.cluster import DeviceType, data_sheet_device_type
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.memory import USABLE_SHARE
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import Profile, configured_profile, module_facts
from flowtrain.costs.profiled_times import CPU
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.pipeline.configured import configured_partition
from flowtrain.scheduler.cost import flops
from flowtrain.search.pipetune import PipeTune
from flowtrain.search.room import StepRoom
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees

_DEVICES_PER_NODE = 8
"""Of real accelerators that no profile describes."""


def configured_search(config: RunConfig, model: ModelSpec) -> PipeTune | None:
    """Return the search of ``pipeline.policy``, the same wherever it is asked for; None if it names none.

    Raises ConfigError if the times of the devices are not known, or layers cannot be cut.
    """
    if config.pipeline.policy != "pipetune":
        return None
    profile, backbone = configured_profile(config), config.backbone
    degrees = Degrees(backbone.data_parallel_size, backbone.pipeline_parallel_size, backbone.tensor_parallel_size)
    device = _device(config, model, profile, degrees.world_size)
    setup, is_cpu = configured_setup(config, on_cpu=device.name == CPU), device.name == CPU
    times = DeviceTimes(
        device,
        model,
        setup,
        config.frozen_modules,
        profile,
        {name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
        {name: encoder.decode_threads for name, encoder in config.encoders.items()},
        OperatorRules.of(config.costs),
    )
    placed = replace(setup, dp=degrees.dp, tp=degrees.tp)
    encoder = next(iter(config.encoders)) if config.mode == "monolithic" else ""
    partition = configured_partition(config, model, degrees.pp)
    actions = ActionTimes(times, degrees, placed.num_shards)
    return search_of(config, StepSimulator(partition, actions, encoder, buffered=is_cpu))


def has_times(config: RunConfig) -> bool:
    """Whether times of the backbone's devices are known, which a search needs."""
    known = config.allocator.profile, config.emulation, config.backbone.accelerator_type
    return any(each is not None for each in known)


def search_of(config: RunConfig, simulator: StepSimulator) -> PipeTune:
    """Return the search by what times a run's steps, which decides the model, its cut and its devices.

    config: its ``scheduler`` and ``pipeline`` decide the rest.
    """
    times, degrees = simulator.times.times, simulator.times.degrees
    placed = replace(times.setup, dp=degrees.dp, tp=degrees.tp)
    limit = int(times.device.memory_nbytes * USABLE_SHARE)
    return PipeTune(
        simulator,
        config.pipeline.schedule,
        StepRoom(times.model, simulator.partition, placed, simulator.encoder, limit),
        flops(times.model.backbone, times.freeze),
        config.scheduler.dispatch,
        config.scheduler.num_buckets,
        config.pipeline.pipetune,
    )


def _device(config: RunConfig, model: ModelSpec, profile: Profile | None, count: int) -> DeviceType:
    """The backbone's devices, as a profile or a data sheet describes them."""
    settings, name = config.emulation, config.backbone.accelerator_type
    per_node = settings.devices_per_node if settings is not None else _DEVICES_PER_NODE
    if profile is not None:
        profile.check_modules(profile.device, module_facts(config, model))
        return profile.devices(count, per_node if settings is not None else profile.known_facts.devices_per_node)
    if name is None and settings is not None:
        name = settings.device
    if name is None:
        raise ConfigError.of(
            "pipeline.policy",
            FaultCode.CONFLICT,
            "pipeline.policy ('pipetune') needs times of the devices, and allocator.profile and "
            "backbone.accelerator_type are both not given; give the first (flowtrain profile measures it; CPUs need "
            "it), or the second for times by data sheets, or set the policy to 'balanced'",
        )
    return data_sheet_device_type(name, count, devices_per_node=per_node, dtype=config.model.dtype)
