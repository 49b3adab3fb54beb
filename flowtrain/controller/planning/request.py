"""What a plan asks the allocator: devices, model, data and settings, and the rates of each choice of settings."""

from __future__ import annotations

from flowtrain.allocator.choices import backbone_choices
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.request import Request, SurrogateFactory
from flowtrain.allocator.simulated import DeviceTimesOf
from flowtrain.allocator.slices import Slices
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned import Planned
from flowtrain.costs.action_times import DeviceTimes
from flowtrain.costs.cluster import Cluster
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import Profile
from flowtrain.costs.profiled_times import CPU


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


def device_times(config: RunConfig, rules: OperatorRules, profile: Profile | None) -> DeviceTimesOf:
    """Return the times of any work with a request's settings; profile: None for rates from data sheets."""
    threads = {name: encoder.decode_threads for name, encoder in config.encoders.items()}

    def times_of(request: Request, device_type: str) -> DeviceTimes:
        device, freeze = request.cluster[device_type], request.workload.freeze
        return DeviceTimes(
            device, request.model, request.setup, freeze, profile, request.max_batch_patches, threads, rules
        )

    return times_of


def surrogates(times_of: DeviceTimesOf) -> SurrogateFactory:
    """Return the surrogate of each choice of settings, made once."""
    made: dict[object, Surrogate] = {}

    def surrogate_for(request: Request) -> Surrogate:
        key = (request.workload.microbatch_tokens, request.setup, request.slices)
        if key not in made:
            of = {each.name: times_of(request, each.name) for each in request.cluster.device_types}
            times = {name: each.of(request.workload) for name, each in of.items()}
            one = next(iter(of.values()))
            cluster, model, workload = request.cluster, request.model, request.workload
            shares = one.link_efficiency, one.sending_efficiency
            made[key] = Surrogate(cluster, model, workload, request.setup, times, shares[0], request.slices, shares[1])
        return made[key]

    return surrogate_for
