"""What a rank saves at the end of which unit, and how snapshots fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain.actors import saving
from flowtrain.actors.keeper import SnapshotKeeper
from flowtrain.actors.saving import RankSaves, Snapshots
from flowtrain.config.training import CheckpointConfig
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.saver import Keep
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.memory import MemoryFile
from flowtrain.types.plan import Degrees, Unit, UnitKind


class FakeSaver:
    """Notes what is saved. busy: steps at which a rank still writes."""

    def __init__(self, busy: set[int]) -> None:
        self.step, self.saved, self.kept, self._busy = 0, [], [], busy  # type: ignore[var-annotated]

    def save(self, step: int, directory: Path) -> None:
        self.step = step
        self.saved.append(step)

    def keep(self, step: int, keep: Keep) -> bool:
        if step in self._busy:
            return False
        self.kept.append(step)
        keep(step, None)  # type: ignore[arg-type]
        return True

    def wait(self) -> str | None:
        return None


class FakeLink:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, question: Any, *args: Any) -> None:
        self.asked.append((question.__name__, *args))


class FakeTrainer:
    """A trainer whose state is one byte."""

    def write_memory(self, name: str, snapshot: object) -> MemoryFile:
        return MemoryFile(os.getpid(), os.memfd_create(name), name)

    def copy_nbytes(self) -> int:
        return 100


@pytest.fixture
def group() -> Iterator[BackboneGroup]:
    group = init_backbone_group(0, Degrees(), torch.device("cpu"))
    yield group
    group.close()


def saves_of(
    group: BackboneGroup,
    *,
    evaluations: tuple[EvalRounds, ...] = (),
    busy: frozenset[int] = frozenset(),
    keeper: Any = None,
) -> tuple[RankSaves, FakeSaver, FakeLink]:
    link, saver = FakeLink(), FakeSaver(set(busy))
    keeper = SnapshotKeeper() if keeper is None else keeper
    snapshots = Snapshots(2, FakeTrainer(), group, link, keeper, "state")  # type: ignore[arg-type]
    saves = RankSaves(
        CheckpointConfig(every_steps=6, snapshot_every_steps=2),
        lambda report: saver,  # type: ignore[arg-type, return-value]
        link,  # type: ignore[arg-type]
        0,
        evaluations,
        Path("unused"),
        "nonce",
        lambda what: None,
        snapshots,
    )
    return saves, saver, link


def unit(index: int, step: int, kind: str = "train") -> Unit:
    return Unit(index, UnitKind(kind), step, 0, 0)


def run(saves: RankSaves, num_steps: int, refused: frozenset[int] = frozenset()) -> None:
    for step in range(1, num_steps + 1):
        saves.after_unit(unit(step - 1, step), lambda step: step not in refused)


def test_snapshots_come_between_checkpoints(group: BackboneGroup) -> None:
    saves, saver, link = saves_of(group)
    run(saves, 13)
    assert saver.saved == [6, 12] and saver.kept == [2, 4, 8, 10]
    assert [asked for asked in link.asked if asked[0] == "snapshot_kept"] == [
        (CoordinatorApi.snapshot_kept.__name__, step) for step in saver.kept
    ]


def test_the_last_complete_snapshot_stays_until_the_next_is_complete(group: BackboneGroup) -> None:
    asked: list[tuple[int, int | None]] = []

    class NotingKeeper:
        def hold(self, rank: int, step: int, file: MemoryFile, complete: int | None) -> None:
            asked.append((step, complete))

    snapshots = Snapshots(1, FakeTrainer(), group, FakeLink(), NotingKeeper(), "state", 4)  # type: ignore[arg-type]
    for step in (5, 6):
        snapshots.after_unit(unit(step - 1, step), True, lambda step: True, FakeSaver(set()))  # type: ignore[arg-type]
    assert asked == [(5, 4), (6, 5)]


def test_a_snapshot_that_is_due_while_a_rank_writes_comes_later(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group, busy=frozenset({2, 3, 8, 9, 10, 11}))
    run(saves, 14)
    assert saver.kept == [4, 14] and saver.saved == [6, 12]


def test_a_state_that_is_not_finite_is_not_kept(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group)
    run(saves, 8, refused=frozenset({2, 6, 8}))
    assert saver.kept == [3, 4] and saver.saved == [7]


def test_a_snapshot_waits_for_the_evaluations_of_its_step(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group, evaluations=(EvalRounds(every=4, num_samples=1),))
    for index, (step, kind) in enumerate([(1, "train"), (2, "train"), (3, "train"), (4, "train"), (4, "eval")]):
        saves.after_unit(unit(index, step, kind), lambda step: True)
        assert saver.kept == ([2] if index in (1, 2, 3) else [2, 4] if index == 4 else [])


class RefusingKeeper:
    def __init__(self) -> None:
        self.asked = 0

    def hold(self, rank: int, step: int, file: MemoryFile, complete: int | None) -> None:
        self.asked += 1
        raise CheckpointError("the node's keeper of snapshots died")


def test_snapshots_end_with_a_warning_when_a_rank_cannot(
    group: BackboneGroup, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = RefusingKeeper()
    saves, saver, link = saves_of(group, keeper=keeper)
    run(saves, 13)
    assert keeper.asked == 1 and saver.saved == [6, 12] and not link.asked
    assert "no snapshot of step 2, and no later one: rank 0: the node's keeper of snapshots died" in caplog.text


def test_a_node_without_room_is_said_at_the_start(group: BackboneGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(saving, "lacking_memory", lambda nbytes, group: asked.append(nbytes) or "too many bytes")
    keeper = SnapshotKeeper()
    snapshots = Snapshots(2, FakeTrainer(), group, FakeLink(), keeper, "state")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"checkpoint\.snapshot_every_steps \(2\) .* need too many bytes; set it to"):
        snapshots.check_room()
    monkeypatch.setattr(keeper, "held_nbytes", lambda rank: 130)  # of a rank before this one
    with pytest.raises(ConfigError):
        snapshots.check_room()
    assert asked == [200, 70]
