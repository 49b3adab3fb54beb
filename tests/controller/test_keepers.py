"""Who keeps which snapshots: each rank's on its own node and a copy on another, until the next one is complete."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.actors.keeper import ANSWER_S, RayKeeper
from flowtrain.config.run import RunConfig
from flowtrain.controller.keepers import CHECK_S, Keepers
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.errors import SnapshotLostError
from tests.controller.fake_ray import FakeRay, Ref, task_error
from tests.training.ranks import make_config


class FakeKeeper:
    """The steps that a keeper holds, by rank."""

    def __init__(self) -> None:
        self.kept: dict[int, set[int]] = {}
        self.is_dead = False

    def steps(self) -> dict[int, tuple[int, ...]]:
        return {rank: tuple(sorted(steps)) for rank, steps in self.kept.items()}

    def keep_only(self, step: int | None) -> None:
        self.kept = {rank: steps & {step} for rank, steps in self.kept.items()}

    def completed(self, step: int) -> None:
        self.kept = {rank: {each for each in steps if each >= step} for rank, steps in self.kept.items()}

    def copy(self, of: RayKeeper, ranks: list[int], step: int) -> None:
        source: FakeKeeper = of._handle.keeper
        if source.is_dead or any(step not in source.kept.get(rank, ()) for rank in ranks):
            raise SnapshotLostError("the source has it not")
        for rank in ranks:
            self.kept.setdefault(rank, set()).add(step)


class FakeHandle:
    """An actor's handle, which answers at once. is_silent: not at all. copying: calls of one that copies for long."""

    def __init__(self) -> None:
        self.keeper = FakeKeeper()
        self.is_silent = False
        self.copying: list[Ref] | None = None

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._answer, name))

    def _answer(self, name: str, *args: Any) -> Ref:
        ref = Ref(name)
        if self.keeper.is_dead:
            ref.finish(ray.exceptions.RayActorError())
        elif name == "copy" and self.copying is not None:
            self.copying.append(ref)
        elif not self.is_silent:
            try:
                ref.finish(getattr(self.keeper, name)(*args))
            except SnapshotLostError as error:
                ref.finish(task_error(error))
        return ref


class KeepersWorld:
    """Keepers of a run, the handles by node, and what was ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
        FakeRay(monkeypatch)
        monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": node not in self.lost} for node in nodes])
        self.handles: dict[str, FakeHandle] = {}
        self.ended: list[str] = []
        self.lost: set[str] = set()
        self.names: list[str] = []
        self.now_s = 0.0
        launcher: Any = SimpleNamespace(spawn=self._spawn, kill=self._kill)
        self.keepers = Keepers(make_config(), ActorClasses(launcher=launcher), lambda: self.now_s)

    def take(self, nodes: dict[int, str], step: int) -> None:
        """All ranks put a snapshot into their nodes' memory."""
        for rank, node in nodes.items():
            self.of(node).kept.setdefault(rank, set()).add(step)

    def lose(self, node: str) -> None:
        self.lost.add(node)
        self.of(node).is_dead = True

    def of(self, node: str) -> FakeKeeper:
        return self.handles[node].keeper

    def _spawn(self, actor_class: type, options: dict[str, Any]) -> FakeHandle:
        node = options["scheduling_strategy"].node_id
        assert options["max_concurrency"] > 1, "ranks are answered while it copies"
        self.names.append(options["name"])
        self.handles[node] = FakeHandle()
        return self.handles[node]

    def _kill(self, handle: FakeHandle) -> None:
        self.ended += [node for node, each in self.handles.items() if each is handle]


NODE_A, NODE_B, NODE_C = ("a" * 56, "b" * 56, "c" * 56)
PLACES = {0: NODE_A, 1: NODE_A, 2: NODE_B}


def test_a_snapshot_is_complete_if_some_node_has_it_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = KeepersWorld(monkeypatch, NODE_A, NODE_B)
    world.keepers.for_ranks(PLACES)
    world.keepers.for_ranks(PLACES)
    assert world.keepers.complete_steps() == set()
    first, second = world.of(NODE_A), world.of(NODE_B)
    first.kept, second.kept = {0: {4, 6}, 1: {4, 6, 8}}, {2: {4, 6}}
    assert world.keepers.complete_steps() == {4, 6}
    first.kept, second.kept = {0: {4, 6}, 1: {4, 6}, 2: {4}}, {}
    assert world.keepers.complete_steps() == {4}, "a copy counts"
    first.kept, second.is_dead = {0: {6}, 1: {6}}, True
    assert world.keepers.complete_steps() == set() and world.ended == [NODE_B]
    assert f"the snapshots of node {NODE_B} are lost: The actor experienced an error" in caplog.text
    world.keepers.for_ranks(PLACES)
    world.handles[NODE_B].is_silent = True
    assert world.keepers.complete_steps() == set() and world.ended == [NODE_B, NODE_B]
    assert "are lost: no answer within 60 s" in caplog.text
    world.keepers.close()
    assert world.ended == [NODE_B, NODE_B, NODE_A]


def test_the_next_node_copies_a_snapshot_before_the_earlier_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    world = KeepersWorld(monkeypatch, NODE_A, NODE_B, NODE_C)
    world.keepers.for_ranks(PLACES)
    first, second = world.of(NODE_A), world.of(NODE_B)
    world.take(PLACES, 2)
    world.keepers.completed(2)
    assert first.steps() == second.steps() == {0: (2,), 1: (2,), 2: (2,)} and NODE_C not in world.handles
    world.handles[NODE_B].copying = copying = []
    world.take(PLACES, 4)
    world.keepers.completed(4)
    for _ in range(2):
        world.keepers.poll()
    assert first.steps()[0] == (2, 4), "the copy is not there yet"
    second.copy(RayKeeper(world.handles[NODE_A]), [0, 1], 4)
    copying[0].finish()
    world.keepers.poll()
    assert first.steps() == second.steps() == {0: (4,), 1: (4,), 2: (4,)}


@pytest.mark.parametrize("others", [(NODE_B, NODE_C), ()])
def test_another_node_copies_the_snapshots_of_one_that_has_all_ranks(
    monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    world = KeepersWorld(monkeypatch, NODE_A, *others)
    places = {0: NODE_A, 1: NODE_A}
    world.keepers.for_ranks(places)
    for step in (2, 4):
        world.take(places, step)
        world.keepers.completed(step)
        assert {node: world.of(node).steps() for node in world.handles} == {
            node: {0: (step,), 1: (step,)} for node in (NODE_A, *others[:1])
        }
    if others:
        world.lose(NODE_B)
        world.take(places, 6)
        world.keepers.completed(6)
        assert world.of(NODE_C).steps() == {0: (6,), 1: (6,)}


def test_ranks_of_a_lost_node_find_their_snapshots_where_they_are_now(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = KeepersWorld(monkeypatch, NODE_A, NODE_B, NODE_C)
    world.keepers.for_ranks(PLACES)
    for step in (2, 4):
        world.take(PLACES, step)
    world.keepers.completed(4)
    assert not world.keepers.has_lost_a_node()
    world.lose(NODE_A)
    assert world.keepers.has_lost_a_node()
    assert world.keepers.complete_steps() == {4}
    world.keepers.keep_only(4)
    world.keepers.for_ranks({0: NODE_C, 1: NODE_C, 2: NODE_B})
    assert world.of(NODE_C).steps() == {0: (4,), 1: (4,)}
    assert world.of(NODE_B).steps()[2] == (4,) and "has no snapshot" not in caplog.text
    world.keepers.keep_only(None)
    world.keepers.for_ranks(PLACES)
    assert world.of(NODE_A).steps() == {}, "the run starts from a checkpoint"


def test_a_copy_that_fails_is_said_once_and_the_snapshot_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = KeepersWorld(monkeypatch, NODE_A, NODE_B)
    world.keepers.for_ranks(PLACES)
    own = {0: NODE_A, 1: NODE_A}  # node B's own is missing, so A cannot copy it
    for step in (2, 4):
        world.take(own, step)
        world.keepers.completed(step)
    text = f"snapshots of node {NODE_B} have no copy on another node: the source has it not"
    assert caplog.text.count(text) == 1
    assert world.of(NODE_A).steps()[0] == (4,)


def test_snapshots_are_off_unless_asked_for() -> None:
    def keepers(config: RunConfig) -> Keepers:
        return Keepers(config, ActorClasses())

    assert not keepers(make_config()).is_on
    assert keepers(make_config(checkpoint={"snapshot_every_steps": 5})).is_on


def test_a_keeper_that_died_or_hangs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = KeepersWorld(monkeypatch, NODE_A, NODE_B)
    world.keepers.for_ranks(PLACES)
    first, second = world.handles[NODE_A], world.handles[NODE_B]
    first.keeper.is_dead, second.is_silent = True, True
    for _ in range(int(2 * CHECK_S / 5)):
        world.now_s += 5.0
        world.keepers.poll()
    assert world.ended == [NODE_A] and world.handles[NODE_A] is not first and world.handles[NODE_B] is second
    for _ in range(int(ANSWER_S / 5)):
        world.now_s += 5.0
        world.keepers.poll()
    assert world.ended == [NODE_A, NODE_B] and world.handles[NODE_B] is not second
    assert len(world.names) == len(set(world.names)) == 4, "one that is being ended may hold its name"
    assert [caplog.text.count(f"the keeper of node {node} is lost") for node in (NODE_A, NODE_B)] == [1, 1]
    world.take(PLACES, 4)
    world.keepers.completed(4)
    assert world.keepers.complete_steps() == {4}


def test_a_lost_nodes_keeper_is_not_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = KeepersWorld(monkeypatch, NODE_A, NODE_B)
    world.keepers.for_ranks(PLACES)
    world.lose(NODE_B)
    for _ in range(int(4 * CHECK_S)):
        world.now_s += 1.0
        world.keepers.poll()
    assert len(world.names) == 2 and "is lost" not in caplog.text, "the watch over nodes says so"
