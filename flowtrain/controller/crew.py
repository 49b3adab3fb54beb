"""The actors of a run: which there are, how they are started, and how they end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.coordinator import Coordinator
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.feeder import NAME as FEEDER
from flowtrain.actors.feeder import Feeder
from flowtrain.actors.flow import Flow
from flowtrain.actors.link import RayLink
from flowtrain.allocator.plan import ModulePlan, Plan
from flowtrain.config.run import RunConfig
from flowtrain.controller.cluster import Bundle
from flowtrain.controller.state import Role
from flowtrain.errors import StallError
from flowtrain.training.mesh import LOOPBACK

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"


@dataclass(frozen=True)
class ActorClasses:
    """The plain classes that become actors; tests put their own in."""

    coordinator: type = Coordinator
    feeder: type = Feeder
    encoder: type = Encoder
    backbone: type = BackboneRank


@dataclass(frozen=True)
class Post:
    """One actor to start: its name and role, the module it serves, its place among the module's actors."""

    name: str
    role: Role
    module: str
    index: int
    plan: ModulePlan

    @property
    def bundle(self) -> Bundle:
        """What Ray reserves for it."""
        bundle = {"CPU": self.plan.num_cpus, "GPU": self.plan.num_devices}
        return {name: amount for name, amount in bundle.items() if amount > 0}


def posts_of(plan: Plan) -> list[Post]:
    """Every actor of the plan but the coordinator, encoders numbered over all modules."""
    posts = []
    for module, module_plan in plan.encoders.items():
        for index in range(module_plan.num_actors):
            posts.append(Post(f"encoder-{len(posts)}", Role.ENCODER, module, index, module_plan))
    for index in range(plan.backbone.num_actors):
        posts.append(Post(f"backbone-dp{index}-pp0-tp0", Role.BACKBONE, "backbone", index, plan.backbone))
    posts.append(Post(FEEDER, Role.FEEDER, "feeder", 0, plan.feeder))
    return posts


@dataclass
class Crew:
    """Handles of the running actors. ``runs`` maps the reference of each actor's running loop to its name."""

    coordinator: ActorHandle
    link: RayLink
    actors: dict[str, ActorHandle] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    runs: dict[ray.ObjectRef, str] = field(default_factory=dict)

    def of_role(self, role: Role) -> list[ActorHandle]:
        """Handles of one role, in order."""
        return [handle for name, handle in self.actors.items() if self.roles[name] is role]

    def run(self, name: str, *args: Any) -> None:
        """Start an actor's loop (again, after a restart)."""
        self.runs[self.actors[name].run.remote(RayLink(self.coordinator), *args)] = name

    def kill(self) -> None:
        """End every actor at once."""
        for handle in [*self.actors.values(), self.coordinator]:
            ray.kill(handle, no_restart=True)


def namespace_of(config: RunConfig) -> str:
    """The Ray namespace in which a run's actors have their names."""
    return f"flowtrain-{config.name}"


def start_coordinator(config: RunConfig, classes: ActorClasses, make_flow: Callable[[], Flow]) -> ActorHandle:
    """Start the coordinator; it reserves no CPU, since it only passes small messages."""
    options = {"name": COORDINATOR, "namespace": namespace_of(config), "num_cpus": 0}
    return ray.remote(classes.coordinator).options(**options).remote(make_flow)


def start_actors(
    config: RunConfig,
    posts: list[Post],
    group: PlacementGroup | None,
    classes: ActorClasses,
    coordinator: ActorHandle,
    run_id: str,
    num_steps: int,
) -> Crew:
    """Start feeder, encoders and backbone ranks; they construct themselves in parallel."""
    crew = Crew(coordinator, RayLink(coordinator))
    bundle_index = 0
    for post in posts:
        options: dict[str, Any] = {"name": post.name, "namespace": namespace_of(config), "max_concurrency": 2}
        options["num_cpus"] = post.plan.num_cpus
        if post.plan.num_devices:
            options["num_gpus"] = post.plan.num_devices
        if post.bundle:
            assert group is not None
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle_index
            )
            bundle_index += 1
        if post.role is not Role.BACKBONE:
            options["max_restarts"] = config.limits.max_encoder_restarts
        actor = _construct(config, post, classes, options, run_id, num_steps)
        crew.actors[post.name] = actor
        crew.roles[post.name] = post.role
    return crew


def _construct(
    config: RunConfig,
    post: Post,
    classes: ActorClasses,
    options: dict[str, Any],
    run_id: str,
    num_steps: int,
) -> ActorHandle:
    if post.role is Role.FEEDER:
        return ray.remote(classes.feeder).options(**options).remote(config, run_id)
    if post.role is Role.ENCODER:
        return ray.remote(classes.encoder).options(**options).remote(config, post.module, post.name, run_id)
    dp_size = post.plan.data_parallel_size
    arguments = (config, post.index, dp_size, post.name, num_steps, run_id)
    return ray.remote(classes.backbone).options(**options).remote(*arguments)


def start_backbone(crew: Crew, checkpoint: str | None, eval_every: int | None, timeout_s: float) -> float:
    """Join the ranks to one group and load their state; returns the peak FLOP/s of the slowest rank's device.

    Raises StallError when they are not up within ``timeout_s``.
    """
    ranks = crew.of_role(Role.BACKBONE)
    try:
        nodes = set(ray.get([rank.node_address.remote() for rank in ranks], timeout=timeout_s))
        host = LOOPBACK if len(nodes) == 1 else ray.get(ranks[0].node_address.remote(), timeout=timeout_s)
        port = ray.get(ranks[0].open_rendezvous.remote(host), timeout=timeout_s)
        peaks = ray.get([rank.start.remote(host, port, checkpoint, eval_every) for rank in ranks], timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise StallError(
            f"the {len(ranks)} backbone ranks were not up within limits.start_timeout_s ({timeout_s:g} s); their logs "
            "say how far they came"
        ) from error
    return float(min(peaks))
