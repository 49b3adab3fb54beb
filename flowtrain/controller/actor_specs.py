"""The actor specs of a plan: which actors to start, and which of them share a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowtrain.actors.encoder_rank import rank_name
from flowtrain.actors.feeder import feeder_name
from flowtrain.controller.cluster import ACCELERATOR_TYPE, Bundle
from flowtrain.controller.state import Role
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import ModulePlan, Plan

ACCELERATOR_AMOUNT = 0.001
"""What Ray itself reserves of a node's one ``accelerator_type:X`` for an actor that asks for a type."""
SHARED_PLACE = "shared-device"


@dataclass(frozen=True)
class ActorSpec:
    """Actor spec: one actor to start."""

    name: str
    role: Role
    module: str
    """The module that it serves."""
    index: int
    """Its rank in the module's ``Degrees``."""
    plan: ModulePlan
    place: str
    """Actors with the same place are on one node, and their resources in one bundle: the ranks of a tensor parallel
    group, and the encoders that share their devices."""
    leader: str = ""
    """Of an encoder rank: the name of the encoder that it belongs to."""
    waits: bool = False
    """Whether it starts only once the backbone's ranks have their devices: Ray puts a share of a device where the least
    is left, so encoders that came first could fill a device and leave too little of each other one for a rank."""

    @property
    def segment_nbytes(self) -> int:
        """Bytes that it gives to the memory pool."""
        return 0 if self.role is Role.ENCODER_RANK else self.plan.segment_nbytes

    @property
    def bundle(self) -> Bundle:
        """Resources that Ray reserves for it."""
        bundle = {"CPU": self.plan.num_cpus, "GPU": self.plan.num_devices}
        if self.plan.num_devices and self.plan.accelerator_type is not None:
            bundle[f"{ACCELERATOR_TYPE}{self.plan.accelerator_type}"] = ACCELERATOR_AMOUNT
        return {name: amount for name, amount in bundle.items() if amount > 0}


def actor_specs_of(plan: Plan) -> list[ActorSpec]:
    """Every actor of the plan except the coordinator; encoders are numbered over all modules, ranks by ``Degrees``."""
    specs: list[ActorSpec] = []
    num_replicas, is_colocated = 0, plan.mode == "colocated"
    for module, module_plan in plan.encoders.items():
        for index in range(module_plan.num_actors):
            dp_rank, _, tp_rank = module_plan.degrees.coordinates(index)
            leader, role = f"encoder-{num_replicas + dp_rank}", Role.ENCODER_RANK if tp_rank else Role.ENCODER
            place = _backbone_place(plan.backbone.degrees, index) if is_colocated else leader
            name, waits = rank_name(leader, tp_rank), is_colocated and module_plan.num_devices > 0
            specs.append(ActorSpec(name, role, module, index, module_plan, place, leader if tp_rank else "", waits))
        num_replicas += module_plan.data_parallel_size
    degrees = plan.backbone.degrees
    for rank in range(degrees.world_size):
        place, tp_rank = _backbone_place(degrees, rank), degrees.coordinates(rank)[2]
        specs.append(ActorSpec(f"{place}-tp{tp_rank}", Role.BACKBONE, "backbone", rank, plan.backbone, place))
    if plan.is_shared and not is_colocated:  # in one bundle, so that they get the same device
        specs = [replace(spec, place=SHARED_PLACE) for spec in specs]
    for index in range(plan.feeder.data_parallel_size):
        name = feeder_name(index)
        specs.append(ActorSpec(name, Role.FEEDER, "feeder", index, plan.feeder, name))
    return specs


def bundles_of(specs: Sequence[ActorSpec]) -> list[Bundle]:
    """The bundles that Ray should reserve, one for each place that takes resources; a bundle is on one node.

    Ray packs bundles of one size onto node after node in their order. The backbone's come first: its ranks exchange
    the most data, so they get the fewest nodes. Encoders fill what these nodes have left, then other nodes.
    """
    return list(_bundles_by_place(specs).values())


def bundle_indices(specs: Sequence[ActorSpec]) -> list[int]:
    """The index in ``bundles_of`` of each actor's bundle.

    Places that take no resources are spread over the bundles of the others, and so over their nodes; -1 without
    bundles.
    """
    numbers = {place: number for number, place in enumerate(_bundles_by_place(specs))}
    guests = [place for place in dict.fromkeys(spec.place for spec in specs) if place not in numbers]
    shared = {place: number * len(numbers) // len(guests) if numbers else -1 for number, place in enumerate(guests)}
    return [(numbers | shared)[spec.place] for spec in specs]


def _backbone_place(degrees: Degrees, rank: int) -> str:
    dp_rank, pp_rank, _ = degrees.coordinates(rank)
    return f"backbone-dp{dp_rank}-pp{pp_rank}"


def _bundles_by_place(specs: Sequence[ActorSpec]) -> dict[str, Bundle]:
    members: dict[str, list[Bundle]] = {}
    for spec in sorted(specs, key=lambda spec: spec.role is not Role.BACKBONE):
        members.setdefault(spec.place, []).append(spec.bundle)
    return {place: _sum(bundles) for place, bundles in members.items() if any(bundles)}


def _sum(bundles: Sequence[Bundle]) -> Bundle:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: round(sum(bundle.get(name, 0.0) for bundle in bundles), 4) for name in names}
