"""Which actors there are, how they are started, and that all end when one cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.model import BackboneConfig
from flowtrain.config.run import RunConfig
from flowtrain.controller import worker_group as worker_group_module
from flowtrain.controller.actor_specs import actor_specs_of
from flowtrain.controller.state import Role
from flowtrain.controller.worker_group import (
    ActorClasses,
    WorkerGroup,
    start_actors,
    start_backbone,
    start_coordinator,
)
from flowtrain.errors import ResourceError
from flowtrain.types.plan import Degrees, DevicePeak, GradientReduction, RankStart, Sharding, StateOrigin
from flowtrain.types.run_plan import Plan
from tests.training.ranks import make_config


class FakeActors:
    """Stands for ``ray.remote``: notes who is spawned with which options, and who is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spawned: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = []
        self.wrapped: list[str] = []
        self.killed: list[Any] = []
        self.refused: str | None = None
        monkeypatch.setattr(ray, "remote", self._remote)
        monkeypatch.setattr(ray, "kill", lambda handle, no_restart: self.killed.append(handle))
        monkeypatch.setattr(
            worker_group_module,
            "RayLink",
            lambda coordinator, generation=None, patience_s=None: f"link to {coordinator}",
        )

    def _remote(self, actor_class: type) -> Any:
        self.wrapped.append(actor_class.__name__)
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._spawner(actor_class, options)))

    def _spawner(self, actor_class: type, options: dict[str, Any]) -> Any:
        def spawn(*args: Any) -> str:
            if options["name"] == self.refused:
                raise ValueError(f"name {self.refused} is taken")
            self.spawned.append((actor_class.__name__, options, args))
            return f"{options['name']} #{len(self.spawned)}"

        return spawn


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> FakeActors:
    return FakeActors(monkeypatch)


@pytest.fixture
def config() -> RunConfig:
    return make_config(
        name="kite",
        encoders={"vision": {"path": "unused", "data_parallel_size": 2}},
        backbone={"path": "unused", "data_parallel_size": 2},
    )


NAMES = ["encoder-0", "encoder-1", "backbone-dp0-pp0-tp0", "backbone-dp1-pp0-tp0", "feeder-0"]


def start(config: RunConfig, plan: Plan | None = None) -> WorkerGroup:
    specs = actor_specs_of(plan or fixed_plan(config).without_devices())
    return start_actors(config, specs, None, ActorClasses(), "coordinator", "run", 10)  # type: ignore[arg-type]  # a fake


def test_actors_are_spawned_by_name_in_the_runs_namespace(config: RunConfig, actors: FakeActors) -> None:
    workers = start(config)
    assert list(workers.actors) == list(workers.roles) == NAMES
    assert [name for name, _, _ in actors.spawned] == ["Encoder"] * 2 + ["BackboneRank"] * 2 + ["Feeder"]
    assert actors.wrapped == ["Encoder", "BackboneRank", "Feeder"], "each class is sent to the cluster once"
    assert all(options["namespace"] == "flowtrain-kite" for _, options, _ in actors.spawned)
    assert actors.spawned[1][2] == (config, "vision", "encoder-1", "run")
    assert actors.spawned[3][2] == (config, 1, Degrees(dp=2), "backbone-dp1-pp0-tp0", 10, "run")
    assert list(workers.of_role(Role.BACKBONE)) == NAMES[2:4]


def test_actors_that_compute_on_a_cpu_keep_their_memory(
    config: RunConfig, actors: FakeActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group_module, "memory_options", lambda: {"runtime_env": "keeps"})
    start(config)
    keeping = [options["name"] for _, options, _ in actors.spawned if options.get("runtime_env") == "keeps"]
    assert keeping == NAMES[:-1], "a feeder decodes in many threads"
    actors.spawned.clear()
    start(config, fixed_plan(config))
    assert not any("runtime_env" in options for _, options, _ in actors.spawned), "an accelerator's memory is torch's"


def test_the_ranks_of_a_tensor_parallel_group_share_a_bundle(config: RunConfig, actors: FakeActors) -> None:
    backbone = config.backbone.model_copy(update={"tensor_parallel_size": 2})
    specs = actor_specs_of(fixed_plan(config.model_copy(update={"backbone": backbone})).without_devices())
    group: Any = SimpleNamespace(id=None, bundle_specs=[{}] * 4)
    start_actors(config, specs, group, ActorClasses(), "coordinator", "run", 10)  # type: ignore[arg-type]  # a fake
    bundles = {
        name: options["scheduling_strategy"].placement_group_bundle_index
        for name, options in ((options["name"], options) for _, options, _ in actors.spawned)
    }
    assert bundles == {
        "encoder-0": 2,
        "encoder-1": 3,
        "backbone-dp0-pp0-tp0": 0,
        "backbone-dp0-pp0-tp1": 0,
        "backbone-dp1-pp0-tp0": 1,
        "backbone-dp1-pp0-tp1": 1,
        "feeder-0": 0,
    }
    ranks = [args[1] for _, options, args in actors.spawned if options["name"].startswith("backbone")]
    assert ranks == [0, 1, 2, 3]


class FakeEncoder:
    """A member of a replica, which notes its loops' arguments."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.run = SimpleNamespace(remote=lambda *args: log.append(f"{name} runs with {args}") or object())
        self.open_rendezvous = SimpleNamespace(remote=lambda: f"port of {name}")


def test_a_replica_starts_and_ends_whole(config: RunConfig, actors: FakeActors) -> None:
    encoders = {"vision": config.encoders["vision"].model_copy(update={"tensor_parallel_size": 2})}
    config = config.model_copy(update={"encoders": encoders})
    specs = actor_specs_of(fixed_plan(config).without_devices())
    workers = start_actors(config, specs, None, ActorClasses(), "coordinator", "run", 10)  # type: ignore[arg-type]
    assert [args for _, options, args in actors.spawned if options["name"] == "encoder-1-tp1"] == [
        (config, "vision", "encoder-1", 1)
    ]
    assert workers.leaders == {"encoder-0-tp1": "encoder-0", "encoder-1-tp1": "encoder-1"}
    log: list[str] = []
    for name in ("encoder-0", "encoder-0-tp1", "encoder-1", "encoder-1-tp1"):
        workers.actors[name] = FakeEncoder(name, log)
        workers.spawn[name] = lambda name=name: FakeEncoder(f"new {name}", log)
    old = list(workers.actors.values())[:2]
    workers.run("encoder-0")
    workers.run("encoder-1")
    link = "link to coordinator"
    assert log[:2] == [f"encoder-0 runs with ('{link}',)", "encoder-0-tp1 runs with ('port of encoder-0',)"]
    loops = list(workers.runs)
    workers.replace("encoder-0")
    assert actors.killed == old, "nobody else, and both"
    assert [workers.runs.get(loop) for loop in loops] == [None, None, "encoder-1", "encoder-1-tp1"]
    assert log[4:] == [f"new encoder-0 runs with ('{link}',)", "new encoder-0-tp1 runs with ('port of new encoder-0',)"]
    workers.give_up("encoder-0")
    assert list(workers.runs.values()) == ["encoder-1", "encoder-1-tp1"]


def test_encoders_that_share_devices_start_after_the_ranks(actors: FakeActors) -> None:
    config = make_config(
        name="kite",
        mode="colocated",
        model={"device": "auto"},
        encoders={"vision": {"path": "unused"}},
        backbone={"path": "unused", "data_parallel_size": 2},
    )
    specs = actor_specs_of(fixed_plan(config))
    workers = start_actors(config, specs, None, ActorClasses(), "coordinator", "run", 10)  # type: ignore[arg-type]
    assert list(workers.actors) == ["backbone-dp0-pp0-tp0", "backbone-dp1-pp0-tp0", "feeder-0"]
    assert list(workers.roles) == NAMES, "all of them are watched"
    assert {options["num_gpus"] for _, options, _ in actors.spawned if "num_gpus" in options} == {0.6}
    log: list[str] = []
    workers.actors["feeder-0"] = FakeEncoder("feeder-0", log)  # type: ignore[assignment]
    workers.run_producers()
    assert log == ["feeder-0 runs with ('link to coordinator',)"]
    for name in workers.waiting:
        workers.spawn[name] = lambda name=name: FakeEncoder(name, log)  # type: ignore[misc]
    workers.start_waiting()
    assert [line.split()[0] for line in log[1:]] == ["encoder-0", "encoder-1"]
    assert list(workers.runs.values()) == ["feeder-0", "encoder-0", "encoder-1"]


def test_an_encoder_that_dies_while_the_ranks_are_down_waits_for_their_devices(actors: FakeActors) -> None:
    config = make_config(
        name="kite",
        mode="colocated",
        model={"device": "auto"},
        encoders={"vision": {"path": "unused", "tensor_parallel_size": 2}},
        backbone={"path": "unused", "tensor_parallel_size": 2},
    )
    specs = actor_specs_of(fixed_plan(config))
    workers = start_actors(config, specs, None, ActorClasses(), "coordinator", "run", 10)  # type: ignore[arg-type]
    log: list[str] = []
    for name in workers.spawn:
        workers.spawn[name] = lambda name=name: FakeEncoder(name, log)  # type: ignore[misc]
    workers.start_waiting()
    workers.spawn_backbone()
    log.clear()
    workers.replace("encoder-0")
    assert not log and "encoder-0" not in workers.actors and "encoder-0-tp1" not in workers.actors
    workers.start_waiting()
    assert log == [
        "encoder-0 runs with ('link to coordinator',)",
        "encoder-0-tp1 runs with ('port of encoder-0',)",
    ]
    workers.replace("encoder-0")
    assert len(log) == 4, "the ranks have their devices"


def test_when_one_cannot_be_started_none_is_left(config: RunConfig, actors: FakeActors) -> None:
    actors.refused = "backbone-dp1-pp0-tp0"
    with pytest.raises(ValueError, match="is taken"):
        start(config)
    assert actors.killed == ["encoder-0 #1", "encoder-1 #2", "backbone-dp0-pp0-tp0 #3", "coordinator"]


def test_a_run_that_is_running_already_is_said(config: RunConfig, actors: FakeActors) -> None:
    actors.refused = "coordinator"
    with pytest.raises(ResourceError, match="'kite' is already running in this cluster"):
        start_coordinator(config, ActorClasses(), lambda: None)  # type: ignore[arg-type, return-value]  # never called


REDUCTION, SHARDING = GradientReduction("step", "as configured"), Sharding("full", "as configured")


class FakeRank:
    """A backbone rank on a node."""

    def __init__(self, name: str, node: str, log: list[str], peak: DevicePeak) -> None:
        self.node_address = SimpleNamespace(remote=lambda: node)
        self.open_rendezvous = SimpleNamespace(remote=lambda host: log.append(f"{name} listens on {host}") or 77)
        self.start = SimpleNamespace(
            remote=lambda host, port, origin, every, shard_size, keeper: (
                log.append(f"{name} joins {host}:{port}, shards over {shard_size}")
                or log.extend([f"{name} has keeper {keeper}"] if keeper is not None else [])
                or RankStart(peak, REDUCTION, SHARDING)
            )
        )
        self.node_id = SimpleNamespace(remote=lambda: f"id of {node}")


@pytest.mark.parametrize(
    ("nodes", "host"), [(("10.0.0.1", "10.0.0.1"), "127.0.0.1"), (("10.0.0.1", "10.0.0.2"), "10.0.0.1")]
)
def test_ranks_meet_on_the_loopback_only_if_they_share_a_node(nodes: tuple[str, str], host: str) -> None:
    log: list[str] = []
    workers = WorkerGroup(None, None)  # type: ignore[arg-type]  # nobody talks to them
    for index, (node, peak) in enumerate(zip(nodes, (3.0, 2.0), strict=True)):
        workers.actors[f"rank {index}"] = FakeRank(f"rank {index}", node, log, DevicePeak("cpu", peak, "measured"))
        workers.roles[f"rank {index}"] = Role.BACKBONE
    waited: list[list[str]] = []

    def results(calls: Any) -> list[Any]:
        waited.append(list(calls))
        return list(calls.values())

    settings = BackboneConfig(sharding="hybrid", hybrid_shard_size=2, data_parallel_size=2)
    assert start_backbone(workers, settings, StateOrigin(), (), results).peak.flops == 2.0, "the slowest device counts"
    joined = [f"rank {index} joins {host}:77, shards over 2" for index in range(2)]
    assert log == [f"rank 0 listens on {host}", *joined]
    assert waited == [["rank 0", "rank 1"], ["rank 0"], ["rank 0", "rank 1"]]
    log.clear()

    def keepers(nodes: Mapping[int, str]) -> Any:
        return {rank: f"on {node}" for rank, node in nodes.items()}

    start_backbone(workers, settings, StateOrigin(snapshot_step=3), (), results, keepers)
    assert log[2::2] == [f"rank {index} has keeper on id of {node}" for index, node in enumerate(nodes)]
