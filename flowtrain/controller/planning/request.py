"""What a plan asks the allocator: devices, model, data and settings, and the rates of each choice of settings."""

from __future__ import annotations

from flowtrain.allocator.choices import backbone_choices
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.request import Request, SurrogateFactory
from flowtrain.allocator.slices import Slices
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned import Planned
from flowtrain.costs.cluster import Cluster, DeviceType
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.profile import Profile
from flowtrain.costs.profiled_times import CPU, ProfileTimes
from flowtrain.costs.roofline import Efficiency, Roofline


def request_of(planned: Planned, cluster: Cluster, profile: Profile | None) -> Request:
    """Return the request of a plan for these devices; microbatches that a profile does not reach are no choice."""
    config, on_cpu = planned.config, cluster.device_types[0].name == CPU
    choices = backbone_choices(config, planned.model.backbone, planned.workload, on_cpu=on_cpu)
    if profile is not None:
        choices = tuple(each for each in choices if each.microbatch_tokens <= profile.most_tokens) or choices
    return Request(
        cluster,
        planned.model,
        planned.workload,
        configured_setup(config, on_cpu=on_cpu),
        MemoryBudget(pool_nbytes=config.pool.hbm_segment_nbytes),
        {name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
        Slices.of(config, planned.model.backbone.first_layers),
        planned.whole,
        chooses_reduction=config.backbone.gradient_reduction == "auto"
        or "gradient_reduction" in config.planner_choices,
        choices=choices,
    )


def surrogates(config: RunConfig, efficiency: Efficiency, profile: Profile | None) -> SurrogateFactory:
    """Return the surrogate of each choice of settings, made once; profile: None for rates from data sheets."""
    # A profile's links are measured, so they are reached in full.
    links = efficiency.links if profile is None else 1.0
    made: dict[object, Surrogate] = {}

    def surrogate_for(request: Request) -> Surrogate:
        key = (request.workload.microbatch_tokens, request.setup, request.slices)
        if key not in made:
            types = request.cluster.device_types
            times = {each.name: _times(each, request, config, efficiency, profile) for each in types}
            cluster, model, workload = request.cluster, request.model, request.workload
            made[key] = Surrogate(cluster, model, workload, request.setup, times, links, request.slices)
        return made[key]

    return surrogate_for


def _times(
    device_type: DeviceType, request: Request, config: RunConfig, efficiency: Efficiency, profile: Profile | None
) -> ModuleTimes:
    model, workload, setup = request.model, request.workload, request.setup
    if profile is None:
        return Roofline(device_type, model, workload, setup, efficiency)
    communication = TensorCommunication(device_type, model, workload, setup, link_efficiency=1.0)
    threads = {name: encoder.decode_threads for name, encoder in config.encoders.items()}
    return ProfileTimes(profile, workload, communication, request.max_batch_patches, threads)
