"""From where a run goes on when it lost processes: the newest of its snapshot and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.config.run import RunConfig
from flowtrain.controller import history
from flowtrain.controller.history import History
from flowtrain.controller.keepers import Keepers
from flowtrain.controller.resume import ResumePoint
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.errors import RunFileError
from flowtrain.observability.run_dir import RunDir
from flowtrain.types.events import SnapshotKept
from flowtrain.types.plan import StateOrigin
from flowtrain.types.samples import SamplerState
from tests.controller.fake_ray import Ref
from tests.training.ranks import make_config


class FakeKeepers:
    """Keepers that lack what a test says."""

    def __init__(self) -> None:
        self.lacking: str | None = None
        self.complete: list[int] = []

    def completed(self, step: int) -> None:
        self.complete.append(step)

    def lack(self, step: int) -> str | None:
        return self.lacking


class World:
    """A history that has recorded steps. checkpoint: step of the last one, or 0."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.disk_error = 0, None  # type: ignore[var-annotated]
        self.rewound: list[int] = []
        self.keepers = FakeKeepers()
        recorder = SimpleNamespace(
            take=lambda event: None,
            sampler_states={step: SamplerState(8 * step) for step in range(1, 20)},
            flush=self._flush,
            rewind=lambda step, consumed: self.rewound.append(step) or 20 - step,
        )
        costs = SimpleNamespace(in_use="the cost", rewind=lambda cost: None)
        committer = SimpleNamespace(gradient_reduction="step", forget_incomplete=lambda: None)
        run = SimpleNamespace(run_spec=None, files=RunDir(root), start=ResumePoint())
        (root / "checkpoints").mkdir()
        monkeypatch.setattr(history.checkpoint_store, "latest_complete", lambda path: self._checkpoint())
        monkeypatch.setattr(history.checkpoint_store, "read_meta", lambda path: SimpleNamespace(step=self.checkpoint))
        monkeypatch.setattr(history, "find_resume_point", lambda *_: ResumePoint(self.checkpoint, self._checkpoint()))
        self.history = History(run, recorder, costs, committer, self.keepers)  # type: ignore[arg-type]

    def _checkpoint(self) -> Path | None:
        return Path("step") if self.checkpoint else None

    def _flush(self, step: int) -> None:
        if self.disk_error is not None:
            raise self.disk_error


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_it_goes_back_to_a_snapshot_that_is_newer_than_the_checkpoint(world: World) -> None:
    world.checkpoint = 4
    for step in (5, 6):
        world.history.take(SnapshotKept(step))
    assert world.keepers.complete == [5, 6]
    world.history.go_back()
    start = world.history.start
    assert (start.step, start.sampler_state, start.cost) == (6, SamplerState(48), "the cost")
    assert start.origin == StateOrigin(snapshot_step=6) and world.history.saved_step == 4 and world.rewound == [6]
    world.history.go_back()
    assert world.history.start.origin == StateOrigin(snapshot_step=6), "it is there for the next loss too"


def test_it_goes_back_to_a_checkpoint_that_is_newer_than_the_snapshot(world: World) -> None:
    world.history.take(SnapshotKept(6))
    world.checkpoint = 8
    world.history.go_back()
    assert world.history.start.origin == StateOrigin(checkpoint="step") and world.history.saved_step == 8


def test_without_a_snapshot_it_goes_back_to_the_beginning(world: World) -> None:
    world.history.go_back()
    assert world.history.start.origin == StateOrigin() and world.history.saved_step == 0
    assert world.history.start.text == "the beginning"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda world: setattr(world.keepers, "lacking", "a node is gone"), "is not used: a node is gone"),
        (lambda world: setattr(world, "disk_error", RunFileError("No space left")), "is not used: No space left"),
    ],
)
def test_a_snapshot_that_cannot_be_used_is_said(
    world: World, spoil: Callable[[World], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.checkpoint = 4
    world.history.take(SnapshotKept(6))
    spoil(world)
    world.history.go_back()
    assert world.history.start.origin == StateOrigin(checkpoint="step") and said in caplog.text


# --- keepers ---------------------------------------------------------------------------------------------------------


class FakeKeeper:
    """A keeper's handle. ranks: whose snapshots it has, or the error of a dead one."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks
        self.ranks_of = SimpleNamespace(remote=self._ask)

    def _ask(self, step: int) -> Ref:
        ref = Ref("ranks_of")
        ref.finish(self.ranks)
        return ref


def test_a_snapshot_is_usable_if_each_rank_finds_its_own_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[FakeKeeper] = []
    killed: list[FakeKeeper] = []

    def spawn(actor_class: type, options: dict[str, Any]) -> FakeKeeper:
        spawned.append(FakeKeeper(()))
        return spawned[-1]

    def get(ref: Ref, timeout: float) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    launcher = SimpleNamespace(spawn=spawn, kill=killed.append)
    monkeypatch.setattr(ray, "get", get)
    keepers = Keepers(make_config(), ActorClasses(launcher=launcher))  # type: ignore[arg-type]
    nodes = {0: "a", 1: "a", 2: "b"}
    keepers.for_ranks(nodes)
    keepers.for_ranks(nodes)
    first, second = spawned
    assert keepers.lack(6) == "the state of 3 of 3 ranks is gone"
    first.ranks, second.ranks = (0, 1), (2,)
    assert keepers.lack(6) is None
    first.ranks, second.ranks = (0, 1, 2), ()
    assert keepers.lack(6) == "the state of 1 of 3 ranks is gone", "rank 2 is on another node now"
    first.ranks, second.ranks = (0, 1), ray.exceptions.RayActorError()
    assert "of 1 of 3 ranks is gone: The actor died" in str(keepers.lack(6)) and killed == [second]
    keepers.for_ranks(nodes)
    assert len(spawned) == 3
    keepers.close()
    assert killed == [second, first, spawned[2]]


def test_snapshots_are_off_unless_asked_for() -> None:
    def keepers(config: RunConfig) -> Keepers:
        return Keepers(config, ActorClasses())

    assert not keepers(make_config()).is_on
    assert keepers(make_config(checkpoint={"snapshot_every_steps": 5})).is_on
