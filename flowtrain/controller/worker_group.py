"""The worker group: all actors of a run, how they start, and how they end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.coordinator import POLL_S, Coordinator, RemakeFlow
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.encoder_rank import EncoderRank
from flowtrain.actors.feeder import Feeder
from flowtrain.actors.keeper import RayKeeper, SnapshotKeeper
from flowtrain.actors.link import RayLink
from flowtrain.config.model import BackboneConfig
from flowtrain.config.run import RunConfig
from flowtrain.controller.actor_specs import ActorSpec, bundle_indices
from flowtrain.controller.memory_env import memory_options
from flowtrain.controller.shard_groups import shard_size_of
from flowtrain.controller.state import Role
from flowtrain.errors import ResourceError, StallError
from flowtrain.flow.flow import Flow
from flowtrain.training.mesh import LOOPBACK
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.plan import RankStart, StateOrigin
from flowtrain.types.sources import SourceIndex

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
ENDING_POLL_S = 0.1
Results = Callable[[Mapping[str, ray.ObjectRef[Any]]], list[Any]]


class Launcher:
    """Starts and ends actors, each in a process of its own."""

    def __init__(self) -> None:
        self._remote: dict[type, Any] = {}

    def spawn(self, actor_class: type, options: dict[str, Any], *args: Any) -> ActorHandle:
        """Start an actor. options: Ray's, with its name."""
        if actor_class not in self._remote:  # Ray sends a class to the cluster each time that it is wrapped
            self._remote[actor_class] = ray.remote(actor_class)
        handle: ActorHandle = self._remote[actor_class].options(**options).remote(*args)
        return handle

    def kill(self, handle: ActorHandle) -> None:
        """End an actor at once."""
        ray.kill(handle, no_restart=True)


@dataclass(frozen=True)
class ActorClasses:
    """The plain classes that become actors, and what starts them; tests pass their own."""

    coordinator: type = Coordinator
    feeder: type = Feeder
    encoder: type = Encoder
    encoder_rank: type = EncoderRank
    backbone: type = BackboneRank
    keeper: type = SnapshotKeeper
    launcher: Launcher = field(default_factory=Launcher)


@dataclass
class WorkerGroup:
    """The worker group: handles of the running actors."""

    coordinator: ActorHandle
    link: RayLink
    actors: dict[str, ActorHandle] = field(default_factory=dict)
    """Handles by actor name, the coordinator excepted."""
    roles: dict[str, Role] = field(default_factory=dict)
    runs: dict[ray.ObjectRef[Any], str] = field(default_factory=dict)
    """From the reference of each running actor loop to the actor's name."""
    spawn: dict[str, Callable[[], ActorHandle]] = field(default_factory=dict)
    """Starts the actor of that name."""
    leaders: dict[str, str] = field(default_factory=dict)
    """From each encoder rank to the name of its encoder, with which it starts and ends."""
    waits: frozenset[str] = frozenset()
    """Encoders, and their ranks, that start only when the backbone's ranks have their devices."""
    waiting: tuple[str, ...] = ()
    """Those of them that wait now."""
    ranks_have_devices: bool = False
    launcher: Launcher = field(default_factory=Launcher)
    generation: int = 0
    """How often the backbone was started again."""

    def of_role(self, role: Role) -> dict[str, ActorHandle]:
        """Handles of one role by name, in order."""
        return {name: handle for name, handle in self.actors.items() if self.roles[name] is role}

    def run_producers(self) -> None:
        """Start the loops of all feeders and encoders that have started."""
        for name, role in self.roles.items():
            if role in (Role.FEEDER, Role.ENCODER) and name in self.actors:
                self.run(name)

    def start_waiting(self) -> None:
        """Start what waited for the backbone's ranks, and the loops."""
        waiting, self.waiting = self.waiting, ()
        self.ranks_have_devices = True
        for name in waiting:
            self.actors[name] = self.spawn[name]()
        for name in waiting:
            if self.roles[name] is Role.ENCODER:
                self.run(name)

    def run(self, name: str, *args: Any) -> None:
        """Start an actor's loop and those of its encoder ranks."""
        actor, ranks = self.actors[name], self.encoder_ranks(name)
        generation = self.generation if self.roles[name] is Role.BACKBONE else None
        self.runs[actor.run.remote(RayLink(self.coordinator, generation), *args)] = name
        port = actor.open_rendezvous.remote() if ranks else None
        for rank in ranks:  # the call waits for its argument
            self.runs[self.actors[rank].run.remote(port)] = rank

    def encoder_ranks(self, name: str) -> list[str]:
        """Names of an encoder's other ranks."""
        return [rank for rank, leader in self.leaders.items() if leader == name]

    def replace(self, name: str) -> None:
        """Replace an actor that died, and its encoder ranks, by new actors and start their loops.

        Ray's ``max_restarts`` does not fit: with it a broken connection also fails a call (two loops would then run in
        one process), and calls fail again during the restart, so that deaths cannot be counted.
        """
        self.give_up(name)
        members = (name, *self.encoder_ranks(name))
        if name in self.waits and not self.ranks_have_devices:
            self.waiting += members
            for member in members:
                del self.actors[member]
            return
        for member in members:
            self.actors[member] = self.spawn[member]()
        self.run(name)

    def give_up(self, name: str) -> None:
        """Kill an actor and its encoder ranks, and forget their loops.

        Kill the leader too: a broken connection also fails a call, and a live process keeps its memory.
        """
        members = (name, *self.encoder_ranks(name))
        for member in members:
            self.launcher.kill(self.actors[member])
        self.runs = {ref: running for ref, running in self.runs.items() if running not in members}

    def end_backbone(self, timeout_s: float) -> None:
        """Kill all ranks, forget their loops, and wait until they have ended.

        Raises StallError after the timeout: two backbones must not run at a time.
        """
        ranks = self.of_role(Role.BACKBONE)
        open_runs = [ref for ref, name in self.runs.items() if name in ranks]
        for handle in ranks.values():
            self.launcher.kill(handle)
        self.runs = {ref: name for ref, name in self.runs.items() if name not in ranks}
        if not open_runs:
            return
        _, left = ray.wait(open_runs, num_returns=len(open_runs), timeout=timeout_s)
        if left:
            raise StallError(
                f"{len(left)} of {len(ranks)} backbone ranks did not end within limits.stop_timeout_s ({timeout_s:g} "
                "s) after they were killed; their nodes may be out of reach. Start again with --resume"
            )

    def spawn_backbone(self) -> None:
        """Start all ranks again, after ``end_backbone``; ``start_backbone`` then joins them."""
        self.generation += 1
        self.ranks_have_devices = False
        for name in self.of_role(Role.BACKBONE):
            self.actors[name] = self.spawn[name]()

    def kill(self) -> None:
        """End every actor at once."""
        for handle in [*self.actors.values(), self.coordinator]:
            self.launcher.kill(handle)


def namespace_of(config: RunConfig) -> str:
    """The Ray namespace in which a run's actors have their names."""
    return f"flowtrain-{config.name}"


def start_coordinator(
    config: RunConfig, classes: ActorClasses, make_flow: Callable[[], Flow], remake_flow: RemakeFlow | None = None
) -> ActorHandle:
    """Start the coordinator; it reserves no CPU, since it only passes small messages.

    make_flow, remake_flow: as of ``Coordinator``.
    Raises ResourceError if the run is already running.
    """
    options = {"name": COORDINATOR, "namespace": namespace_of(config), "num_cpus": 0}
    try:
        return classes.launcher.spawn(classes.coordinator, options, make_flow, POLL_S, remake_flow)
    except ValueError as error:
        raise ResourceError(
            f"run {config.name!r} is already running in this cluster (its actor {COORDINATOR!r} exists); wait for "
            "its end, or give this run another name"
        ) from error


def wait_until_ended(config: RunConfig, names: Sequence[str], timeout_s: float) -> None:
    """Wait until the names of killed actors are free. Raises StallError after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while there := [name for name in names if _is_there(config, name)]:
        if time.monotonic() > deadline_s:
            raise StallError(
                f"{', '.join(there)} did not end within limits.stop_timeout_s ({timeout_s:g} s) after they were "
                "killed; start again with --resume"
            )
        time.sleep(ENDING_POLL_S)


def _is_there(config: RunConfig, name: str) -> bool:
    try:
        ray.get_actor(name, namespace_of(config))
    except ValueError:
        return False
    return True


def start_actors(
    config: RunConfig,
    specs: list[ActorSpec],
    group: PlacementGroup | None,
    classes: ActorClasses,
    coordinator: ActorHandle,
    run_id: str,
    num_steps: int,
    indexes: tuple[SourceIndex, ...] = (),
) -> WorkerGroup:
    """Start feeders, encoders and backbone ranks, which construct themselves in parallel; on an error kill them all.

    Actors whose spec waits are started by ``WorkerGroup.start_waiting``.
    """
    waiting = tuple(spec.name for spec in specs if spec.waits)
    link, launcher = RayLink(coordinator, patience_s=config.limits.coordinator_timeout_s), classes.launcher
    workers = WorkerGroup(coordinator, link, waits=frozenset(waiting), waiting=waiting, launcher=launcher)
    stored = ray.put(indexes)  # once, not for each feeder
    try:
        for spec, options in _options(config, specs, group):
            workers.spawn[spec.name] = partial(_construct, config, spec, classes, options, run_id, num_steps, stored)
            workers.roles[spec.name] = spec.role
            if spec.role is Role.ENCODER_RANK:
                workers.leaders[spec.name] = spec.leader
            if not spec.waits:
                workers.actors[spec.name] = workers.spawn[spec.name]()
    except BaseException:
        workers.kill()
        raise
    return workers


def _options(
    config: RunConfig, specs: list[ActorSpec], group: PlacementGroup | None
) -> Iterator[tuple[ActorSpec, dict[str, Any]]]:
    for spec, index in zip(specs, bundle_indices(specs), strict=True):
        options: dict[str, Any] = {"name": spec.name, "namespace": namespace_of(config), "max_concurrency": 3}
        options["num_cpus"] = spec.plan.num_cpus
        if spec.plan.num_devices:
            options["num_gpus"] = spec.plan.num_devices
        elif spec.role is not Role.FEEDER and config.emulation is None:
            options |= memory_options()
        if group is not None:
            # An actor without its own bundle (a feeder) still belongs on a node of the others.
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        yield spec, options


def _construct(
    config: RunConfig,
    spec: ActorSpec,
    classes: ActorClasses,
    options: dict[str, Any],
    run_id: str,
    num_steps: int,
    indexes: ray.ObjectRef[tuple[SourceIndex, ...]],
) -> ActorHandle:
    spawn = classes.launcher.spawn
    if spec.role is Role.FEEDER:
        num_feeders, segment_nbytes = spec.plan.data_parallel_size, spec.segment_nbytes
        return spawn(classes.feeder, options, config, run_id, indexes, spec.index, num_feeders, segment_nbytes)
    if spec.role is Role.ENCODER:
        return spawn(classes.encoder, options, config, spec.module, spec.name, run_id)
    if spec.role is Role.ENCODER_RANK:
        _, _, tp_rank = spec.plan.degrees.coordinates(spec.index)
        return spawn(classes.encoder_rank, options, config, spec.module, spec.leader, tp_rank)
    return spawn(classes.backbone, options, config, spec.index, spec.plan.degrees, spec.name, num_steps, run_id)


def start_backbone(
    workers: WorkerGroup,
    backbone: BackboneConfig,
    origin: StateOrigin,
    evaluations: tuple[EvalRounds, ...],
    results: Results,
    keepers: Callable[[Mapping[int, str]], Mapping[int, RayKeeper]] | None = None,
) -> RankStart:
    """Join the ranks to one process group and load their state; returns the answer of the rank with the slowest device.

    evaluations: of each held-out set.
    results: waits for calls, given by actor name; it raises if they fail or take too long.
    keepers: returns who keeps each rank's snapshots, from the ids of the ranks' nodes; None: nobody.
    """
    ranks = workers.of_role(Role.BACKBONE)
    addresses = results({name: rank.node_address.remote() for name, rank in ranks.items()})
    workers.start_waiting()  # a rank that answers has its device
    shard_size = shard_size_of(backbone, addresses)
    host = LOOPBACK if len(set(addresses)) == 1 else addresses[0]
    name, first = next(iter(ranks.items()))
    (port,) = results({name: first.open_rendezvous.remote(host)})
    kept: Mapping[int, RayKeeper] = {}
    if keepers is not None:
        kept = keepers(dict(enumerate(results({name: rank.node_id.remote() for name, rank in ranks.items()}))))
    args = (host, port, origin, evaluations, shard_size)
    starts = results(
        {name: rank.start.remote(*args, kept.get(index)) for index, (name, rank) in enumerate(ranks.items())}
    )
    slowest: RankStart = min(starts, key=attrgetter("peak.flops"))
    return slowest
