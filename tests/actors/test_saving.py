"""What a rank saves at the end of which unit, and how snapshots fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain.actors import saving
from flowtrain.actors.keeper import SnapshotKeeper
from flowtrain.actors.saving import RankSaves, Snapshots
from flowtrain.config.training import CheckpointConfig
from flowtrain.errors import ConfigError, SnapshotLostError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.saver import Keep
from flowtrain.training.snapshot import Snapshot
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.memory import MemoryFile
from flowtrain.types.plan import Degrees, Unit, UnitKind

NOTHING = Snapshot({}, {}, {})
NUM_STEPS = 13


class FakeSaver:
    """Notes what is saved. busy: steps at which a rank still writes."""

    def __init__(self, busy: set[int]) -> None:
        self.step = self.now = 0
        self.saved: list[int] = []
        self.kept: list[int] = []
        self.in_place: list[int] = []
        self.prepared = 0
        self.settle: Callable[[], None] = lambda: None
        self._busy = busy

    def prepare(self) -> None:
        self.prepared += 1

    def save(self, step: int, directory: Path, keep: Keep | None = None, *, in_place: bool = False) -> None:
        self.step = step
        self.saved.append(step)
        if in_place:
            self.in_place.append(step)
        if keep is not None:
            self.keep(step, keep)

    def is_free(self) -> bool:
        return self.now not in self._busy

    def keep(self, step: int, keep: Keep) -> None:
        self.kept.append(step)
        keep(step, NOTHING)

    def wait(self) -> str | None:
        return None


class FakeHealth:
    """refused: steps whose state may not be kept."""

    def __init__(self, refused: frozenset[int] = frozenset()) -> None:
        self.now = 0
        self._refused = refused

    def may_save(self, step: int) -> bool:
        return step not in self._refused

    def may_keep(self) -> bool:
        return self.now not in self._refused


class FakeLink:
    """keeper: told of a complete snapshot when the driver has its event, before the next unit ends."""

    def __init__(self, keeper: Any = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._keeper = keeper
        self._complete: int | None = None

    def ask(self, question: Any, *args: Any) -> None:
        self.asked.append((question.__name__, *args))
        (self._complete,) = args

    def settle(self) -> None:
        """The driver has the event, and copies are made."""
        if self._complete is not None:
            self._keeper.completed(self._complete)


class FakeTrainer:
    """A trainer whose state is one byte."""

    def described_frozen(self) -> dict[str, Any]:
        return {}

    def state_nbytes(self) -> int:
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
    every_steps: int | None = None,
) -> tuple[RankSaves, FakeSaver, FakeLink]:
    keeper = SnapshotKeeper() if keeper is None else keeper
    link, saver = FakeLink(keeper), FakeSaver(set(busy))
    saver.settle = link.settle
    snapshots = Snapshots(2, FakeTrainer(), group, link, keeper, "state")  # type: ignore[arg-type]
    saves = RankSaves(
        CheckpointConfig(every_steps=every_steps or 6, snapshot_every_steps=2 if every_steps is None else None),
        lambda report: saver,  # type: ignore[arg-type, return-value]
        link,  # type: ignore[arg-type]
        0,
        evaluations,
        Path("unused"),
        "nonce",
        lambda what: None,
        NUM_STEPS,
        snapshots if every_steps is None else None,
    )
    return saves, saver, link


def unit(index: int, step: int, kind: str = "train") -> Unit:
    return Unit(index, UnitKind(kind), step, 0, 0)


def run(
    saves: RankSaves, saver: FakeSaver, num_steps: int, refused: frozenset[int] = frozenset(), is_last: int = 0
) -> None:
    health = FakeHealth(refused)
    for step in range(1, num_steps + 1):
        saver.now = health.now = step
        saver.settle()
        saves.after_unit(unit(step - 1, step), health, is_last=step == is_last)


def test_snapshots_come_with_checkpoints_and_between_them(group: BackboneGroup) -> None:
    saves, saver, link = saves_of(group)
    run(saves, saver, 13)
    assert saver.saved == [6, 12] and saver.kept == [2, 4, 6, 8, 10, 12]
    assert link.asked == [(CoordinatorApi.snapshot_kept.__name__, step) for step in saver.kept]


def test_the_last_complete_snapshot_stays_until_the_next_is_complete(group: BackboneGroup) -> None:
    asked: list[tuple[Any, ...]] = []

    class NotingKeeper:
        def is_free(self, rank: int) -> bool:
            return True

        def make_room(self, rank: int, complete: int | None) -> None:
            asked.append(("all but", complete))

        def hold(self, rank: int, step: int, file: MemoryFile) -> None:
            asked.append(("hold", step))

    snapshots = Snapshots(1, FakeTrainer(), group, FakeLink(), NotingKeeper(), "state", 4)  # type: ignore[arg-type]
    for step in (5, 6):
        snapshots.keep(step, NOTHING)
    assert asked == [("all but", 4), ("hold", 5), ("all but", 5), ("hold", 6)]


def test_no_snapshot_is_kept_while_the_last_one_is_copied(group: BackboneGroup) -> None:
    keeper = SnapshotKeeper()
    saves, saver, link = saves_of(group, keeper=keeper)
    saver.settle = lambda: None  # the copy takes long
    run(saves, saver, 8)
    assert [step for _, step in link.asked] == [2] and keeper.steps() == {0: (2,)} and saver.saved == [6]
    keeper.completed(2)
    run(saves, saver, 2)
    assert [step for _, step in link.asked] == [2, 2]


def test_what_other_ranks_could_not_keep_is_given_up(group: BackboneGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = SnapshotKeeper()
    snapshots = Snapshots(2, FakeTrainer(), group, FakeLink(keeper), keeper, "state")  # type: ignore[arg-type]
    gathered = iter([[True, True], [None, "no room"], [True, True], [None, None]])
    monkeypatch.setattr(Snapshots, "_gathered", lambda self, mine: next(gathered))
    snapshots.keep(2, NOTHING)
    assert keeper.steps() == {0: ()} and keeper.is_free(0)
    snapshots.keep(4, NOTHING)
    assert keeper.steps() == {0: (4,)} and not keeper.is_free(0)


def test_a_snapshot_that_is_due_while_a_rank_writes_comes_later(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group, busy=frozenset({2, 3, 8, 9, 10, 11}))
    run(saves, saver, 14)
    assert saver.kept == [4, 6, 12, 14] and saver.saved == [6, 12]


def test_a_state_that_is_not_finite_is_not_kept(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group)
    run(saves, saver, 8, refused=frozenset({2, 6, 8}))
    assert saver.kept == [3, 4, 7] and saver.saved == [7]


def test_before_the_last_checkpoint_no_snapshot_is_taken(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group)
    run(saves, saver, 4, is_last=4)
    assert saver.kept == [2]
    saves, saver, _ = saves_of(group)
    run(saves, saver, 6, is_last=6)
    assert saver.kept == [2, 4] and saver.saved == [6]


def test_training_has_no_copies_of_the_state_that_it_ends_with(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group)
    run(saves, saver, 6, is_last=6)
    assert saver.in_place == [6], "no step changes it any more"
    saves, saver, _ = saves_of(group)
    run(saves, saver, 7)
    saves.at_end(7)
    assert saver.saved == [6, 7] and saver.in_place == [7]


@pytest.mark.parametrize(("every_steps", "is_prepared"), [(None, True), (1, True), (12, True), (13, False)])
def test_memory_for_copies_is_got_if_a_copy_comes(
    group: BackboneGroup, every_steps: int | None, is_prepared: bool
) -> None:
    saves, saver, _ = saves_of(group, every_steps=every_steps)
    saves.prepare(1)
    assert bool(saver.prepared) is is_prepared
    saves, saver, _ = saves_of(group, every_steps=every_steps)
    saves.prepare(NUM_STEPS)
    assert not saver.prepared


def test_a_snapshot_waits_for_the_evaluations_of_its_step(group: BackboneGroup) -> None:
    saves, saver, _ = saves_of(group, evaluations=(EvalRounds(every=4, num_samples=1),))
    for index, (step, kind) in enumerate([(1, "train"), (2, "train"), (3, "train"), (4, "train"), (4, "eval")]):
        saves.after_unit(unit(index, step, kind), FakeHealth(), is_last=False)
        assert saver.kept == ([2] if index in (1, 2, 3) else [2, 4] if index == 4 else [])


class RefusingKeeper(SnapshotKeeper):
    """A keeper that cannot keep some steps."""

    def __init__(self, refused: set[int]) -> None:
        super().__init__()
        self._refused = refused

    def hold(self, rank: int, step: int, file: MemoryFile) -> None:
        if step in self._refused:
            raise SnapshotLostError("the node's keeper of snapshots died")
        super().hold(rank, step, file)


def test_a_snapshot_that_fails_is_logged_once_and_the_next_is_tried(
    group: BackboneGroup, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = RefusingKeeper({4, 6})
    saves, saver, link = saves_of(group, keeper=keeper)
    run(saves, saver, 8)
    assert saver.saved == [6] and [step for _, step in link.asked] == [2, 8]
    assert keeper.steps() == {0: (2, 8)}, "what was complete stays until the next is"
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("no snapshot of step 4: rank 0: SnapshotLostError: the node's keeper of snapshots died")
    assert last == "snapshots are kept again, from step 8 on"


def test_a_node_without_room_is_refused(group: BackboneGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(saving, "lacking_memory", lambda nbytes, group: asked.append(nbytes) or "too many bytes")
    snapshots = Snapshots(2, FakeTrainer(), group, FakeLink(), SnapshotKeeper(), "state")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"checkpoint\.snapshot_every_steps \(2\) .* need too many bytes; set it to"):
        snapshots.check_room()
    assert asked == [200]
