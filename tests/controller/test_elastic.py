"""A run on fewer nodes: how long it waits for a lost one, what the others have room for, when all is there again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster, elastic
from flowtrain.controller.elastic import AGAIN_S, POLL_S, Parts, Patience, RoomWatch, StartsAnew, degrees_text, fitting
from flowtrain.controller.lost_nodes import NodeWatch
from flowtrain.errors import ConfigError, DataError, FlowTrainError, ResourceError, WorkerLostError
from tests.e2e.worlds import World, tiny_config


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., RunConfig]:
    world = World(seed=1)
    world.add_mixed(8)
    file = world.write(tmp_path / "train.parquet")

    def made(*overrides: str) -> RunConfig:
        return tiny_config(
            tmp_path,
            file,
            "elastic",
            "pool.network=auto",
            "backbone.data_parallel_size=4",
            "backbone.num_cpus=1",
            "encoders.vision.data_parallel_size=2",
            "encoders.vision.num_cpus=1",
            *overrides,
        )

    return made


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray says of the nodes."""
    found: list[dict[str, Any]] = []

    @contextmanager
    def connected(config: RunConfig) -> Iterator[None]:
        yield

    def total() -> dict[str, float]:
        return {"CPU": sum(node["Resources"]["CPU"] for node in found if node["Alive"])}

    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(cluster, "_why_one_node", lambda nodes, network: None)
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(ray, "cluster_resources", total)
    return found


def node(number: int, cpus: float, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": str(number), "Alive": alive, "Resources": {"CPU": cpus, "memory": 1e12}}


@pytest.mark.parametrize(
    ("cpus", "degrees"),
    [
        ([3, 3], "backbone 4, vision 2"),
        ([3, 2], "backbone 4, vision 1"),
        ([2, 2], "backbone 3, vision 1"),
        ([2], "backbone 1, vision 1"),
    ],
)
def test_the_backbones_replicas_come_first(
    config_of: Callable[..., RunConfig], nodes: list[dict[str, Any]], cpus: list[float], degrees: str
) -> None:
    nodes += [node(number, count) for number, count in enumerate(cpus)]
    nodes.append(node(len(cpus), 100, alive=False))
    config = config_of()
    found = fitting(config)
    assert degrees_text(found) == degrees
    assert found.backbone.tensor_parallel_size == config.backbone.tensor_parallel_size
    assert found.training.global_batch_size == config.training.global_batch_size


def test_a_replica_needs_a_node_with_room_for_all_of_it(
    config_of: Callable[..., RunConfig], nodes: list[dict[str, Any]]
) -> None:
    nodes += [node(number, 1.5) for number in range(4)]
    assert degrees_text(fitting(config_of())) == "backbone 3, vision 1"
    assert degrees_text(fitting(config_of(), {"backbone 3, vision 1"})) == "backbone 2, vision 2"
    with pytest.raises(ResourceError, match="no room even for one replica"):
        fitting(config_of("backbone.num_cpus=2"))


def test_a_pool_that_joins_no_nodes_stays_on_one(
    config_of: Callable[..., RunConfig], nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes += [node(0, 4), node(1, 4)]
    monkeypatch.setattr(cluster, "_why_one_node", lambda nodes, network: "a reason")
    assert degrees_text(fitting(config_of())) == "backbone 3, vision 1"


def test_colocated_encoders_follow_the_backbone(
    config_of: Callable[..., RunConfig], nodes: list[dict[str, Any]]
) -> None:
    nodes.append(node(0, 4))
    found = fitting(config_of("mode=colocated", "encoders.vision.data_parallel_size=4"))
    assert degrees_text(found) == "backbone 2"
    assert found.encoder_replicas("vision") == 2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_patience_counts_from_the_loss_or_the_last_step() -> None:
    clock = Clock()
    watch = SimpleNamespace(lost_since_s=None, reason="; two wait")
    patience = Patience(10.0, cast(NodeWatch, watch), clock)
    clock.now_s = 100.0
    patience.progressed()
    clock.now_s = 200.0
    patience.check()  # slow, and nothing is lost
    watch.lost_since_s = 195.0
    patience.check()
    clock.now_s = 206.0
    patience.progressed()  # it trains without the node
    clock.now_s = 215.0
    patience.check()
    clock.now_s = 216.0
    with pytest.raises(StartsAnew, match=r"no step was trained for limits.elastic_after_s \(10 s\); two wait"):
        patience.check()


def test_without_a_limit_a_run_waits() -> None:
    clock = Clock()
    patience = Patience(None, cast(NodeWatch, SimpleNamespace(lost_since_s=0.0, reason="")), clock)
    clock.now_s = 1e6
    patience.check()


def test_room_is_asked_for_now_and_then(config_of: Callable[..., RunConfig], nodes: list[dict[str, Any]]) -> None:
    nodes.append(node(0, 3))
    clock = Clock()
    room = RoomWatch(config_of(), 5.0, clock)
    nodes.append(node(1, 3))
    assert not room.has_room(), "it waits first"
    clock.now_s = 5.0
    assert room.has_room()
    nodes.pop()
    assert not room.has_room(), "not asked again so soon"
    clock.now_s += POLL_S
    assert not room.has_room()


def test_a_pool_that_joins_no_nodes_needs_one_with_room_for_all(
    config_of: Callable[..., RunConfig], nodes: list[dict[str, Any]]
) -> None:
    nodes += [node(0, 5), node(1, 5)]
    config, clock = config_of("pool.network=none"), Clock()
    assert RoomWatch(config_of(), 0.0, clock).has_room()
    assert not RoomWatch(config, 0.0, clock).has_room()
    nodes.append(node(2, 6))
    assert RoomWatch(config, 0.0, clock).has_room()


def test_ray_may_not_answer(config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(config: RunConfig) -> bool:
        raise ray.exceptions.RaySystemError("no answer")

    monkeypatch.setattr(elastic, "_has_room", silent)
    assert not RoomWatch(config_of(), 0.0, Clock()).has_room()


class Fit:
    """Stands for ``fitting``: the next of these numbers of backbone replicas, none of which was refused."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)

    def __call__(self, config: RunConfig, refused: Collection[str]) -> RunConfig:
        for count in self.counts:
            backbone = config.backbone.model_copy(update={"data_parallel_size": count})
            found = config.model_copy(update={"backbone": backbone})
            if degrees_text(found) not in refused:
                return found
        raise ResourceError("no room")


LOST = WorkerLostError("backbone rank 3 is lost")


@pytest.mark.parametrize("error", [ConfigError("no"), ResourceError("no"), DataError("no"), LOST])
def test_an_error_of_a_run_that_was_never_smaller_ends_it(
    config_of: Callable[..., RunConfig], error: FlowTrainError
) -> None:
    parts = Parts(config := config_of(), Fit(2))
    with pytest.raises(type(error)) as caught:
        parts.go_on_after(error)
    assert caught.value is error and parts.now is config and parts.room_watch() is None


def test_degrees_that_do_not_start_are_not_tried_again(config_of: Callable[..., RunConfig]) -> None:
    parts = Parts(config_of(), Fit(3, 2))
    parts.go_on_after(StartsAnew("a node is lost"))
    assert parts.now.backbone.data_parallel_size == 3
    parts.go_on_after(ResourceError("another job holds the room"))
    assert parts.now.backbone.data_parallel_size == 2
    with pytest.raises(WorkerLostError):
        parts.go_on_after(LOST)  # it did start
    with pytest.raises(ResourceError, match="no room"):
        parts.go_on_after(ConfigError("too little memory"))
    parts.go_on_after(StartsAnew("another node is lost"))
    assert parts.now.backbone.data_parallel_size == 3, "other nodes may be there now"


@pytest.mark.parametrize("error", [ConfigError("no"), ResourceError("no"), LOST])
def test_a_run_that_cannot_grow_goes_on_as_it_was(config_of: Callable[..., RunConfig], error: FlowTrainError) -> None:
    parts = Parts(config := config_of(), Fit(2))
    parts.go_on_after(StartsAnew("a node is lost"))
    small, room = parts.now, parts.room_watch()
    assert small.backbone.data_parallel_size == 2 and room is not None and room.waits_s <= 0.0
    parts.grow()
    assert parts.now is config and parts.room_watch() is None
    parts.go_on_after(error)
    again = parts.room_watch()
    assert parts.now is small and again is not None and again.waits_s == pytest.approx(AGAIN_S, abs=60.0)


def test_a_run_of_bad_data_ends_though_it_has_grown(config_of: Callable[..., RunConfig]) -> None:
    parts = Parts(config_of(), Fit(2))
    parts.go_on_after(StartsAnew("a node is lost"))
    parts.grow()
    with pytest.raises(DataError):
        parts.go_on_after(DataError("too many rejected samples"))


def test_a_run_that_ends_without_a_checkpoint_does_not_grow(config_of: Callable[..., RunConfig]) -> None:
    parts = Parts(config_of("checkpoint.at_end=false"), Fit(2))
    parts.go_on_after(StartsAnew("a node is lost"))
    assert parts.now.backbone.data_parallel_size == 2 and parts.room_watch() is None
