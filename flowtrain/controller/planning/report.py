"""From settings, a model and its data to an allocation to show, save and start. No Ray, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.allocation import Allocation, ModuleAllocation
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.plan import changed_overrides, feeders_for
from flowtrain.allocator.program.solvers import Solver, SolverName
from flowtrain.allocator.replication import Replication, replicate
from flowtrain.allocator.request import Request
from flowtrain.allocator.slices import Slices
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.devices import AskedDevices, cluster_of
from flowtrain.controller.planning.nodes import network_note, nodes_needed, with_network
from flowtrain.controller.planning.notes import notes, plan_faults
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.pool import PoolNeed, pool_need, with_pool
from flowtrain.costs.cluster import Cluster, DeviceType, accelerator_type
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.profile import Profile
from flowtrain.costs.profiled_times import CPU, ProfileTimes
from flowtrain.costs.roofline import Efficiency, Roofline
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.errors import Fault
from flowtrain.types.run_plan import ModulePlan, Plan

PLANNING_SCHEMA = 2

_OF_A_CHOICE = ("dp", "tp", "accumulates", "shard_size", "gradient_reduction")
"""Fields of a ``TrainingSetup`` that each candidate configuration sets itself."""


@dataclass(frozen=True)
class PlanReport:
    """An allocation, its assumptions, and the plan that starts it.

    replication: the alternative, the whole model on every device. profile: None if rates are from data sheets.
    """

    planned: Planned
    cluster: Cluster
    setup: TrainingSetup
    budget: MemoryBudget
    efficiency: Efficiency
    allocation: Allocation
    replication: Replication
    plan: Plan
    profile: Profile | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the plan changes in the configuration, as a user would write it on the command line."""
        return changed_overrides(self.plan, self.planned.usual)

    @cached_property
    def pool(self) -> PoolNeed:
        """What the plan needs of the memory pool."""
        return pool_need(self.planned, self.plan, _devices_per_node(self.cluster))

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """Why a run refuses the plan; empty if it does not."""
        of_pool = [self.pool.fault] if self.pool.fault is not None else []
        return (*plan_faults(self.planned, self.plan), *of_pool)

    @property
    def num_nodes(self) -> int:
        """The fewest nodes that have its devices."""
        return nodes_needed(self.allocation, self.cluster)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before starting the plan."""
        others = [fault for fault in self.faults if fault is not self.pool.fault]
        found = notes(self.planned, self.allocation, self.replication, self.plan, others, self.pool)
        network = network_note(self.plan, self.planned.config, self.num_nodes)
        return (*found, *([network] if network is not None else []))

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "schema": PLANNING_SCHEMA,
            "source": self.planned.source,
            "workload": self.planned.workload.to_dict(),
            "devices": [asdict(each) for each in self.cluster.device_types],
            "allocation": self.allocation.to_dict(),
            "replication": asdict(self.replication),
            "assumptions": {
                "profile": self.profile.source if self.profile is not None else None,
                "efficiency": asdict(self.efficiency) if self.profile is None else None,
                "memory": asdict(self.budget),
                "fill": self.planned.workload.fill,
                "setup": {key: value for key, value in asdict(self.setup).items() if key not in _OF_A_CHOICE},
                "chunks_per_rank": self.planned.config.pipeline.chunks,
                "partition": self.planned.config.pipeline.partition,
            },
            "pool": self.pool.as_record(),
            "overrides": list(self.overrides),
            "notes": list(self.notes),
        }


def make_report(
    planned: Planned, asked: AskedDevices, *, solver: SolverName = "auto", profile: Profile | None = None
) -> PlanReport:
    """Choose degrees by Eq. 2 of FlowTrain 3.3, with data sheets' or a profile's rates; ConfigError if none fit."""
    config = planned.config
    cluster = cluster_of(asked, planned, profile)
    setup, efficiency = configured_setup(config, on_cpu=cluster.device_types[0].name == CPU), Efficiency()
    budget = MemoryBudget(pool_nbytes=config.pool.hbm_segment_nbytes)
    limits = {name: encoder.max_batch_patches for name, encoder in config.encoders.items()}
    slices = Slices.of(config.pipeline)
    request = Request(
        cluster,
        planned.model,
        planned.workload,
        setup,
        budget,
        limits,
        slices,
        planned.whole,
        chooses_reduction=config.backbone.gradient_reduction == "auto",
    )
    # A profile's links are measured, so they are reached in full.
    links = efficiency.links if profile is None else 1.0
    times = {each.name: _times(each, request, config, efficiency, profile) for each in cluster.device_types}
    surrogate = Surrogate(cluster, planned.model, planned.workload, setup, times, links, slices)
    allocation = allocate(request, lambda _: surrogate, Solver(solver), config.allocator.method)
    replication = replicate(request, surrogate)
    plan = with_pool(planned, _plan(planned, allocation, cluster), _devices_per_node(cluster))
    plan = with_network(plan, config, nodes_needed(allocation, cluster))
    return PlanReport(planned, cluster, setup, budget, efficiency, allocation, replication, plan, profile)


def _times(
    device_type: DeviceType, request: Request, config: RunConfig, efficiency: Efficiency, profile: Profile | None
) -> ModuleTimes:
    model, workload, setup = request.model, request.workload, request.setup
    if profile is None:
        return Roofline(device_type, model, workload, setup, efficiency)
    communication = TensorCommunication(device_type, model, workload, setup, link_efficiency=1.0)
    threads = {name: encoder.decode_threads for name, encoder in config.encoders.items()}
    return ProfileTimes(profile, workload, communication, request.max_batch_patches, threads)


def _devices_per_node(cluster: Cluster) -> int:
    """The number on the largest nodes."""
    return max(each.devices_per_node for each in cluster.device_types)


def _plan(planned: Planned, allocation: Allocation, cluster: Cluster) -> Plan:
    """The configuration's own plan, with the allocation's degrees, types and shares of devices."""
    usual = planned.usual
    several = len(cluster.device_types) > 1
    sharing = len(allocation.modules) if allocation.shared else 1
    on_cpu = planned.config.model.device == "cpu" or cluster.device_types[0].name == CPU

    def module_plan(chosen: ModuleAllocation, module: ModulePlan) -> ModulePlan:
        dp, pp, tp = chosen.degrees.dp, chosen.degrees.pp, chosen.degrees.tp
        module = replace(module, data_parallel_size=dp, tensor_parallel_size=tp, pipeline_parallel_size=pp)
        if several:
            module = replace(module, accelerator_type=accelerator_type(chosen.device_type))
        if on_cpu:
            return replace(module, num_cpus=_part(module.num_cpus, sharing))
        # The allocation's rates are for whole devices, so a rank gets a whole one, whatever share was configured.
        return replace(module, num_devices=_part(1.0, sharing))

    *encoders, backbone = allocation.modules
    feeder = usual.feeder
    if planned.config.data.num_feeders is None:
        feeder = replace(feeder, data_parallel_size=feeders_for(allocation.rate, allocation.devices))
    return replace(
        usual,
        feeder=feeder,
        encoders={each.encoder: module_plan(each, usual.encoders[each.encoder]) for each in encoders},
        backbone=module_plan(backbone, usual.backbone),
        gradient_reduction=backbone.gradient_reduction,
        hybrid_shard_size=_shard_size(planned.config, backbone),
    )


def _shard_size(config: RunConfig, backbone: ModuleAllocation) -> int | None:
    """None as well for a single replica, which has no groups."""
    return backbone.num_shards if config.backbone.sharding == "hybrid" and backbone.degrees.dp > 1 else None


def _part(amount: float, sharing: int) -> float:
    """An even share, rounded down to what Ray counts, so that all of them fit."""
    return int(amount / sharing * 10_000) / 10_000 if sharing > 1 else amount
