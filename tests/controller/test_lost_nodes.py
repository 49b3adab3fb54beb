"""What a run says about a node that is lost, and when there is another one."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from flowtrain.controller import lost_nodes
from flowtrain.controller.lost_nodes import POLL_S, NodeWatch

GONE, HERE, NEW = "a" * 56, "b" * 56, "c" * 56


class World:
    """Ray's answers: where bundles are, and which nodes live."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: Any = "the group") -> None:
        self.table: Any = self._table("CREATED", GONE)
        self.alive = {GONE, HERE}
        self.num_asked = 0
        self.now_s = 0.0
        self.said: list[str] = []
        monkeypatch.setattr(lost_nodes, "placement_group_table", self._answer)
        monkeypatch.setattr(
            ray, "nodes", lambda: [{"NodeID": node, "Alive": node in self.alive} for node in (GONE, HERE, NEW)]
        )
        self.watch = NodeWatch(group, self.said.append, self.said.append, lambda: self.now_s)

    def lose(self, node: str = GONE) -> None:
        self.alive.discard(GONE)
        self.table = self._table("RESCHEDULING", node)

    def poll(self) -> list[str]:
        """Poll after a while; returns what is said."""
        self.now_s += POLL_S
        self.watch.poll()
        said, self.said[:] = list(self.said), []
        return said

    def _table(self, state: str, first: str) -> dict[str, Any]:
        bundles = {0: {"CPU": 1.0, "GPU": 1.0}, 1: {"CPU": 1.0, "GPU": 1.0}, 2: {"CPU": 1.0, "GPU": 1.0}}
        return {"state": state, "bundles": bundles, "bundles_to_node_id": {0: first, 1: HERE, 2: first}}

    def _answer(self, group: Any) -> Any:
        self.num_asked += 1
        if isinstance(self.table, BaseException):
            raise self.table
        return self.table


@pytest.mark.parametrize("place", [GONE, ""])
def test_a_loss_and_its_end_are_said_once(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    world = World(monkeypatch)
    assert world.poll() == [] and world.watch.reason == ""
    world.lose(place)
    waits = "2 of 3 groups of actors wait for a node with free resources (1 CPU, 1 GPU)"
    (said,) = world.poll()
    assert said.startswith(f"a node of the run is lost: {waits}") and world.poll() == []
    assert world.watch.reason == f"; a node of the run is lost, and {waits}"
    world.alive.add(NEW)
    world.table = world._table("CREATED", NEW)
    assert world.poll() == ["the run has all its nodes again"] and world.poll() == []
    world.table = world._table("RESCHEDULING", place)
    assert len(world.poll()) == 1, "it may be lost again"


def test_ray_is_asked_now_and_then_and_may_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.num_asked == 1, "where the run begins"
    for _ in range(100):
        world.watch.poll()
    assert world.num_asked == 1
    world.lose()
    assert len(world.poll()) == 1
    for error in (ray.exceptions.RpcError("no GCS"), RuntimeError("not connected")):
        world.table = error
        assert world.poll() == [] and world.watch.reason == ""


def test_a_run_without_bundles_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, group=None)
    assert world.poll() == [] and world.watch.reason == "" and not world.num_asked


def test_a_loss_is_waited_for_as_long_as_ray_takes_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    def sleep(seconds: float) -> None:
        world.now_s += seconds
        if world.now_s > 8.0:
            world.lose()

    assert world.watch.has_lost_one(20.0, sleep) and 8.0 < world.now_s < 10.0
    world.alive.add(NEW)
    world.table = world._table("CREATED", NEW)
    assert world.watch.has_lost_one(20.0, sleep), "another node has taken its place"


def test_no_loss_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        world.now_s += seconds
        waited.append(seconds)

    assert not world.watch.has_lost_one(20.0, sleep) and 19.0 <= sum(waited) <= 22.0
    waited.clear()
    alone = World(monkeypatch, group=None)
    assert not alone.watch.has_lost_one(20.0, sleep) and not waited
