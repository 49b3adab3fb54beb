"""From where a run goes on when it lost processes: the newest of its snapshot and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flowtrain.controller import history
from flowtrain.controller.history import History
from flowtrain.controller.resume import ResumePoint
from flowtrain.controller.state import Role
from flowtrain.errors import RunFileError
from flowtrain.observability.run_dir import RunDir
from flowtrain.types.events import SnapshotKept
from flowtrain.types.plan import StateOrigin
from flowtrain.types.samples import SamplerState


class FakeKeepers:
    """Keepers that have what a test says."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.completed_steps: list[int] = []
        self.only: list[int | None] = []
        self.node_is_lost = False

    def has_lost_a_node(self) -> bool:
        return self.node_is_lost

    def completed(self, step: int) -> None:
        self.completed_steps.append(step)

    def keep_only(self, step: int | None) -> None:
        self.only.append(step)

    def complete_steps(self) -> set[int]:
        return self.steps


class World:
    """A history that has recorded steps. checkpoint: step of the last one, or 0."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.disk_error = 0, None  # type: ignore[var-annotated]
        self.rewound: list[int] = []
        self.told: list[tuple[object, ...]] = []
        self.keepers = FakeKeepers()
        recorder = SimpleNamespace(
            take=lambda event: None,
            sampler_states={step: SamplerState(8 * step) for step in range(1, 20)},
            flush=self._flush,
            ended_step=6,
            rewind=lambda step, consumed: self.rewound.append(step) or 20 - step,
            lost=lambda *loss: self.told.append(loss),
            went_back=lambda name, role, reason, down_s, *rest: self.told.append((name, role, reason, *rest)),
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
    assert world.keepers.completed_steps == [5, 6]
    world.keepers.steps = {5, 6, 7, 30}  # the driver has no event of step 30, nor of the evaluation after step 7
    world.history.go_back()
    start = world.history.start
    assert (start.step, start.sampler_state, start.cost) == (6, SamplerState(48), "the cost")
    assert start.origin == StateOrigin(snapshot_step=6) and world.history.saved_step == 4 and world.rewound == [6]
    assert world.history.origin == StateOrigin(snapshot_step=6, again=True)
    assert world.keepers.only == [6], "later ones are made again"
    assert start.text == "the snapshot of step 6 in its nodes' memory"
    world.history.go_back()
    assert world.history.start.origin == StateOrigin(snapshot_step=6), "it is there for the next loss too"


def test_a_snapshot_is_blamed_for_what_it_does_and_for_a_second_start(world: World) -> None:
    world.history.start = ResumePoint(step=4, in_memory=True)
    assert not world.history.blames_snapshot("coordinator", "killed"), "it loads none"
    assert world.history.blames_snapshot("backbone-0", "it cannot start: the snapshot is gone")
    world.history.start = ResumePoint(step=8, in_memory=True)
    world.keepers.node_is_lost = True
    for _ in range(2):
        assert not world.history.blames_snapshot("backbone-0", "killed"), "its node is gone"
    world.keepers.node_is_lost = False
    assert not world.history.blames_snapshot("backbone-0", "killed"), "somebody killed it meanwhile"
    assert not world.history.blames_snapshot("coordinator", "killed")
    assert world.history.blames_snapshot("backbone-1", "killed")
    world.history.start = ResumePoint(step=8)
    assert not world.history.blames_snapshot("backbone-1", "killed"), "it started from a checkpoint"


@pytest.mark.parametrize("kept", [{6}, {8}, set()])
def test_it_goes_back_to_a_checkpoint_that_is_as_new(world: World, kept: set[int]) -> None:
    world.keepers.steps, world.checkpoint = kept, 8
    world.history.go_back()
    assert world.history.start.origin == StateOrigin(checkpoint="step") and world.history.saved_step == 8
    assert world.history.start.text == "the checkpoint of step 8"


def test_without_a_snapshot_it_goes_back_to_the_beginning(world: World) -> None:
    world.history.go_back()
    assert world.history.start.origin == StateOrigin() and world.history.saved_step == 0
    assert world.keepers.only == [None]
    assert world.history.start.text == "the beginning"


def test_a_snapshot_that_the_files_do_not_reach_is_not_used(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.checkpoint, world.keepers.steps = 4, {6}
    world.disk_error = RunFileError("No space left")
    world.history.go_back()
    assert world.history.start.origin == StateOrigin(checkpoint="step")
    assert "the snapshot of step 6 is not used: No space left" in caplog.text


def test_losses_while_it_recovers_are_part_of_the_first(world: World) -> None:
    world.history.lost("backbone-0", Role.BACKBONE, "silent", 600.0)
    world.history.go_back()
    world.history.lost("coordinator", Role.COORDINATOR, "killed", None)
    world.history.go_back()
    assert world.history.went_back() >= 0.0
    assert world.told == [
        ("backbone-0", Role.BACKBONE, "silent", 600.0),
        ("coordinator", Role.COORDINATOR, "killed", None),
        ("backbone-0", Role.BACKBONE, "silent", sum(20 - step for step in world.rewound), 600.0),
    ]
    world.history.lost("coordinator", Role.COORDINATOR, "killed again", None)
    world.history.went_back()
    assert world.told[-1] == ("coordinator", Role.COORDINATOR, "killed again", 0, None)
