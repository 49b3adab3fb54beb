"""The watcher over a fake Ray: starts, restarts, stops, failures, and that nothing which was reported is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from flowtrain.config.flow import LimitsConfig
from flowtrain.controller import watch
from flowtrain.controller.signals import StopRequest
from flowtrain.controller.stalls import Hang
from flowtrain.controller.state import Abandon, LastLoss, Loss, Restart, Role, RunState
from flowtrain.controller.watch import BackboneLost, GraceOver, GroupLost, StopRequested, Watcher
from flowtrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FlowTrainError,
    SnapshotLostError,
    StallError,
    WorkerLostError,
)
from flowtrain.types.events import CheckpointWritten, Event, Rejected
from tests.controller.fake_ray import FakeRay, FakeWorkerGroup, Ref, died, not_constructed, task_error

ROLES = {
    "encoder-0": Role.ENCODER,
    "backbone-0": Role.BACKBONE,
    "backbone-1": Role.BACKBONE,
    "feeder-0": Role.FEEDER,
}
WRITTEN = CheckpointWritten(3, "somewhere")


class World:
    """A workers that runs, and what the watcher made of it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, roles: dict[str, Role] = ROLES, leaders: dict[str, str] | None = None
    ) -> None:
        self.ray = FakeRay(monkeypatch)
        self.workers = FakeWorkerGroup(dict(roles), leaders)
        self.stop = StopRequest()
        self.taken: list[Event] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.lost: list[Loss] = []
        self.take: Callable[[Event], None] = self.taken.append
        self.state = RunState(
            roles,
            max_restarts=1,
            max_rejected_fraction=0.1,
            leaders=leaders,
            max_backbone_restarts=1,
            may_be_lost=True,
        )
        self.watcher = Watcher(
            self.workers,  # type: ignore[arg-type]  # what it uses of one
            self.state,
            LimitsConfig(stop_timeout_s=0.01, preemption_grace_s=30.0),
            lambda event: self.take(event),
            self.notes.append,
            self.warnings.append,
            self.stop,
            self.lost.append,
        )

    def until_end(self, *script: Callable[[], object]) -> bool:
        self.ray.script = list(script)
        return self.watcher.until_end()

    def finish(self, *names: str, value: Any = None) -> Callable[[], object]:
        return lambda: [self.workers.finish(name, value) for name in names]

    def all_return(self) -> list[Callable[[], object]]:
        return [self.finish("backbone-0", "backbone-1"), self.finish("encoder-0", "feeder-0")]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    return World(monkeypatch)


# --- the run ---------------------------------------------------------------------------------------------------------


def test_a_run_ends_when_all_returned(world: World) -> None:
    assert world.until_end(*world.all_return()) is False
    assert world.workers.log == [] and world.notes == []


def test_events_are_taken_in_order_to_the_last(world: World) -> None:
    first, second, late = (CheckpointWritten(step, "x") for step in (1, 2, 3))
    backbone, others = world.all_return()
    world.until_end(
        lambda: world.workers.report(first),
        lambda: world.workers.report(second),
        backbone,
        lambda: (world.workers.pending.append(late), others()),  # reported as the last of them returned
    )
    assert world.taken == [first, second, late]


def test_a_stop_is_asked_for_once(world: World) -> None:
    assert world.until_end(world.stop.set, lambda: None, *world.all_return()) is True
    assert world.workers.log == ["request_stop"]
    assert len(world.notes) == 1 and "stopping" in world.notes[0]


@pytest.mark.parametrize("ago_s", [10.0, 31.0])
def test_a_run_that_got_sigterm_has_the_grace_and_no_longer(world: World, ago_s: float) -> None:
    def terminate() -> None:
        world.stop.terminated_s = time.monotonic() - ago_s
        world.stop.set()

    if ago_s < 30.0:
        assert world.until_end(terminate, lambda: None, *world.all_return()) is True
        assert "a checkpoint follows if it is complete within 20 s (limits.preemption_grace_s)" in world.notes[0]
    else:
        with pytest.raises(GraceOver):
            world.until_end(terminate, lambda: None, *world.all_return())


def test_a_producer_that_died_is_lost_before_it_runs_again(world: World) -> None:
    world.until_end(world.finish("encoder-0", value=died()), *world.all_return())
    assert world.workers.log == ["process_lost encoder-0", "replace encoder-0"]
    assert world.warnings == [
        "encoder-0 died (Worker exits with SIGKILL); it is started again, and its parts are produced again"
    ]
    assert world.lost == [Restart("encoder-0")] and not world.notes


def test_what_ends_for_a_followers_death_is_not_taken_for_the_new_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    rank = "encoder-0-tp1"
    world = World(monkeypatch, {**ROLES, rank: Role.ENCODER_RANK}, {rank: "encoder-0"})
    closed = task_error(RuntimeError("connection closed by peer"))
    together = lambda: [world.workers.finish("encoder-0", closed), world.workers.finish(rank, died())]  # noqa: E731
    world.until_end(together, world.finish("backbone-0", "backbone-1"), world.finish("encoder-0", "feeder-0"))
    assert world.workers.log == ["process_lost encoder-0", "replace encoder-0"]
    (warning,) = world.warnings
    assert warning.startswith("encoder-0-tp1 of encoder-0 died (") and "is started again" in warning


def test_a_producer_that_hangs_is_named_with_what_it_did(world: World) -> None:
    world.watcher.note_hang(Hang("encoder-0", "it has been in the forward of batch 2 of unit 7 for 9 s", 9.0))
    assert world.workers.log == ["process_lost encoder-0", "replace encoder-0"]
    assert world.warnings == [
        "encoder-0 hangs (it has been in the forward of batch 2 of unit 7 for 9 s); it is killed, started again, and "
        "its parts are produced again"
    ]
    assert [loss.hung_s for loss in world.lost] == [9.0]


def test_a_producer_that_dies_too_often_fails_the_run(world: World) -> None:
    death = world.finish("feeder-0", value=died("Worker exits."))
    with pytest.raises(WorkerLostError, match=r"feeder-0 died 2 times \(Worker exits\)"):
        world.until_end(death, death)
    assert world.lost == [Restart("feeder-0"), LastLoss("feeder-0", "Worker exits")], "also the one that ends the run"


def test_an_encoder_that_is_given_up_is_lost_for_good_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    world = World(monkeypatch, {**ROLES, "encoder-1": Role.ENCODER})
    death = world.finish("encoder-0", value=died())
    world.until_end(death, death, world.finish("backbone-0", "backbone-1"), world.finish("feeder-0", "encoder-1"))
    given_up = ["process_lost encoder-0 for_good=True", "give_up encoder-0"]
    assert world.workers.log == ["process_lost encoder-0", "replace encoder-0", *given_up]
    assert "limits.max_encoder_restarts allows; it is given up" in world.warnings[1]
    assert world.lost == [Restart("encoder-0"), Abandon("encoder-0")]


def test_an_error_of_a_producer_fails_the_run_readably(world: World) -> None:
    with pytest.raises(DataError) as caught:
        world.until_end(world.finish("feeder-0", value=task_error(DataError("no rows"))))
    assert str(caught.value) == "no rows"


def test_a_dead_rank_is_named_though_its_peer_failed_first(world: World) -> None:
    closed = task_error(RuntimeError("connection closed by peer"))

    def settle(refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> Any:
        if num_returns == len(world.workers.runs) - 1:  # it looks for the cause in all others
            world.workers.finish("backbone-0", died())
        return FakeRay.wait(world.ray, refs, num_returns, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.ray, "wait", settle)
        with pytest.raises(WorkerLostError, match="backbone-0 died"):
            world.until_end(world.finish("backbone-1", value=closed))


CLOSED = RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


def test_a_lost_rank_of_a_backbone_that_ran_ends_the_wait_and_the_others_say_nothing(world: World) -> None:
    world.state.on_backbone_started()
    fails = world.finish("backbone-0", value=task_error(CLOSED))
    with pytest.raises(BackboneLost) as caught:
        world.until_end(lambda: [fails(), world.workers.finish("backbone-1", died("Worker exits."))])
    assert (caught.value.name, caught.value.reason) == ("backbone-1", "Worker exits")
    assert world.workers.log == [] and world.taken == []


def test_a_collective_that_failed_is_a_lost_rank_though_none_has_ended(world: World) -> None:
    world.state.on_backbone_started()
    with pytest.raises(BackboneLost, match="Connection closed by peer"):
        world.until_end(world.finish("backbone-0", value=task_error(CLOSED)))


def test_a_rank_that_cannot_load_its_snapshot_is_a_lost_one(world: World) -> None:
    world.state.on_backbone_started()
    with pytest.raises(BackboneLost, match="it cannot start: the snapshot of backbone-0 is gone"):
        world.until_end(
            world.finish("backbone-0", value=task_error(SnapshotLostError("the snapshot of backbone-0 is gone")))
        )


def test_an_error_of_a_rank_ends_the_run_though_its_peers_lost_it(world: World) -> None:
    world.state.on_backbone_started()
    fails = world.finish("backbone-0", value=task_error(CLOSED))
    with pytest.raises(DataError, match="no rows"):
        world.until_end(lambda: [fails(), world.workers.finish("backbone-1", task_error(DataError("no rows")))])


def test_the_watch_goes_on_after_a_restart_until_the_limit(world: World) -> None:
    world.state.on_backbone_started()
    with pytest.raises(BackboneLost):
        world.until_end(world.finish("backbone-0", value=died()))
    world.workers.runs = {ref: name for ref, name in world.workers.runs.items() if "backbone" not in name}
    world.workers.runs |= {Ref(name): name for name in ("backbone-0", "backbone-1")}
    world.state.on_backbone_started()
    with pytest.raises(WorkerLostError, match=r"limits\.max_backbone_restarts is 1"):
        world.until_end(world.finish("backbone-0", value=died()))


@pytest.mark.parametrize("was_answered", [False, True])
def test_events_until_now_are_taken_while_no_rank_runs(world: World, was_answered: bool) -> None:
    """The open question may have been answered before the backbone ended."""
    first, second = (CheckpointWritten(step, "x") for step in (1, 2))
    if was_answered:
        world.workers.report(first)
        world.workers.pending.append(second)
    else:
        world.workers.pending += [first, second]
    world.watcher.take_pending_events()
    assert world.taken == [first, second]
    assert world.until_end(*world.all_return()) is False and world.taken == [first, second]


def test_the_loss_of_the_coordinator_ends_the_group_once_the_backbone_ran(world: World) -> None:
    world.state.on_backbone_started()
    with pytest.raises(GroupLost, match="Worker exits") as caught:
        world.until_end(lambda: world.workers.lose_coordinator(died("Worker exits.")))
    assert caught.value.name == "coordinator"


def test_a_coordinator_that_dies_with_the_last_events_is_lost_too(world: World) -> None:
    world.state.on_backbone_started()
    backbone, others = world.all_return()
    with pytest.raises(GroupLost):
        world.until_end(backbone, lambda: (others(), world.workers.lose_coordinator(died("Worker exits."))))


def test_a_coordinator_that_does_not_answer_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.state.on_backbone_started()
    now_s = time.monotonic()
    world.workers.report(WRITTEN)

    def minutes_pass() -> None:
        monkeypatch.setattr(watch.time, "monotonic", lambda: now_s + 1000.0)

    with pytest.raises(GroupLost, match=r"limits\.coordinator_timeout_s \(60 s\)"):
        world.until_end(lambda: None, minutes_pass)


def test_the_loss_of_the_coordinator_fails_the_run(world: World) -> None:
    with pytest.raises(WorkerLostError, match=r"the coordinator died \(killed\)"):
        world.until_end(lambda: world.workers.lose_coordinator(died("killed")))


def test_a_coordinator_that_could_not_be_constructed_says_why(world: World) -> None:
    with pytest.raises(WorkerLostError, match="unknown packing"):
        world.until_end(lambda: world.workers.lose_coordinator(not_constructed(ConfigError("unknown packing"))))


def test_a_checkpoint_that_was_written_is_taken_though_the_run_failed(world: World) -> None:
    def written_then_dead() -> None:
        world.workers.pending.append(WRITTEN)
        world.workers.finish("backbone-0", died())

    with pytest.raises(WorkerLostError, match="backbone-0 died"):
        world.until_end(written_then_dead)
    assert world.taken == [WRITTEN]


def test_the_first_error_is_raised_though_the_last_events_cannot_be_taken(world: World) -> None:
    def fail(event: Event) -> None:
        raise CheckpointError("disk full")

    def written_then_dead() -> None:
        world.take = fail
        world.workers.pending.append(WRITTEN)
        world.workers.finish("backbone-0", died())

    with pytest.raises(WorkerLostError, match="backbone-0 died"):
        world.until_end(written_then_dead)


def test_what_fails_in_taking_an_event_fails_the_run(world: World) -> None:
    def fail(event: Event) -> None:
        raise CheckpointError("disk full")

    world.take = fail
    with pytest.raises(CheckpointError, match="disk full"):
        world.until_end(lambda: world.workers.report(WRITTEN))


def test_too_many_rejected_samples_fail_the_run(world: World) -> None:
    with pytest.raises(DataError, match="20 of 100"):
        world.until_end(lambda: world.workers.report(Rejected((), 20, 100)))
    assert len(world.taken) == 1, "they are in quarantine.jsonl before the run fails"


def test_a_producer_that_does_not_end_is_named_and_does_not_fail_the_run(world: World) -> None:
    backbone, _ = world.all_return()
    world.workers.pending.append(WRITTEN)
    ended = world.until_end(backbone, world.finish("feeder-0"), *[lambda: time.sleep(0.01)] * 3)
    assert ended is False and world.taken == [WRITTEN], "the last checkpoint is taken all the same"
    (note,) = world.notes
    assert "encoder-0 did not end within limits.stop_timeout_s (0.01 s)" in note


def test_a_stopped_run_whose_producer_does_not_end_was_stopped(world: World) -> None:
    backbone, _ = world.all_return()
    assert world.until_end(world.stop.set, backbone, *[lambda: time.sleep(0.01)] * 3) is True


def test_an_error_of_a_producer_that_is_not_needed_any_more_harms_nobody(world: World) -> None:
    backbone, _ = world.all_return()
    late = task_error(OSError("too late"))
    assert world.until_end(backbone, world.finish("encoder-0", value=late), world.finish("feeder-0")) is False


# --- the start -------------------------------------------------------------------------------------------------------


def start(world: World, calls: dict[str, Ref], *script: Callable[[], object], limit_s: float = 60.0) -> list[Any]:
    world.workers.runs = {ref: name for ref, name in world.workers.runs.items() if ROLES[name] is not Role.BACKBONE}
    world.ray.script = list(script)
    return world.watcher.results(calls, time.monotonic() + limit_s, "starting")  # type: ignore[arg-type]  # fakes


@pytest.fixture
def calls() -> dict[str, Ref]:
    return {"backbone-0": Ref("start 0"), "backbone-1": Ref("start 1")}


def test_answers_come_in_the_order_of_the_calls(world: World, calls: dict[str, Ref]) -> None:
    found = start(world, calls, lambda: calls["backbone-1"].finish("b"), lambda: calls["backbone-0"].finish("a"))
    assert found == ["a", "b"]


def test_a_producer_that_fails_ends_the_start_at_once(world: World, calls: dict[str, Ref]) -> None:
    with pytest.raises(FlowTrainError, match="encoder-0 could not be constructed: ValueError: no such tower"):
        start(world, calls, world.finish("encoder-0", value=not_constructed(ValueError("no such tower"))))


def test_a_producer_that_dies_meanwhile_is_started_again(world: World, calls: dict[str, Ref]) -> None:
    start(
        world,
        calls,
        world.finish("encoder-0", value=died()),
        lambda: [call.finish(1.0) for call in calls.values()],
    )
    assert world.workers.log == ["process_lost encoder-0", "replace encoder-0"]


def test_a_rank_that_fails_or_dies_ends_the_start(world: World, calls: dict[str, Ref]) -> None:
    with pytest.raises(CheckpointError, match="another model"):
        start(world, calls, lambda: calls["backbone-1"].finish(task_error(CheckpointError("of another model"))))


def test_a_rank_that_dies_while_starting_ends_the_start(world: World, calls: dict[str, Ref]) -> None:
    with pytest.raises(WorkerLostError, match="backbone-0 died"):
        start(world, calls, lambda: calls["backbone-0"].finish(died()))


def test_ranks_that_do_not_come_are_named(world: World, calls: dict[str, Ref]) -> None:
    with pytest.raises(StallError, match=r"backbone-1 did not answer within limits.start_timeout_s"):
        start(world, calls, lambda: calls["backbone-0"].finish(1.0), limit_s=-1.0)


def test_a_stop_while_starting_ends_the_start(world: World, calls: dict[str, Ref]) -> None:
    with pytest.raises(StopRequested):
        start(world, calls, world.stop.set)
