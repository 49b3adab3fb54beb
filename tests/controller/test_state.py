"""The state machine, as tables: every role and every event in every phase."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.controller.state import (
    MIN_SAMPLES_TO_JUDGE,
    Abandon,
    Decision,
    Fail,
    Finish,
    LastLoss,
    Phase,
    RequestStop,
    Restart,
    RestartAll,
    RestartBackbone,
    RestartCounts,
    Role,
    RunState,
)
from flowtrain.errors import (
    CoordinatorLostError,
    DataError,
    FlowTrainError,
    ReplicaLostError,
    SourceReadError,
    WorkerLostError,
)

ACTORS = {
    "encoder-0": Role.ENCODER,
    "encoder-1": Role.ENCODER,
    "backbone-0": Role.BACKBONE,
    "backbone-1": Role.BACKBONE,
    "feeder-0": Role.FEEDER,
}
MAX_RESTARTS = 2
PHASES = (Phase.RUNNING, Phase.STOPPING, Phase.DRAINING, Phase.FAILED)


def state_in(phase: Phase) -> RunState:
    state = RunState(ACTORS, MAX_RESTARTS, max_rejected_fraction=0.1)
    if phase is Phase.STOPPING:
        state.on_stop()
    elif phase is Phase.DRAINING:
        state.on_returned("backbone-0")
        state.on_returned("backbone-1")
    elif phase is Phase.FAILED:
        state.on_coordinator_lost("gone")
    assert state.phase is phase
    return state


def failure(decisions: list[Decision]) -> FlowTrainError:
    (decision,) = decisions
    assert isinstance(decision, Fail)
    return decision.error


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["encoder-0", "feeder-0"])
def test_a_producer_that_died_is_started_again_while_it_is_needed(phase: Phase, name: str) -> None:
    state = state_in(phase)
    needed = phase in (Phase.RUNNING, Phase.STOPPING)
    assert state.on_died(name, "killed") == ([Restart(name)] if needed else [])
    assert state.phase is phase


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.STOPPING, Phase.FAILED])
def test_without_a_rank_the_run_cannot_go_on(phase: Phase) -> None:
    state = state_in(phase)
    decisions = state.on_died("backbone-1", "out of memory")
    if phase is not Phase.FAILED:
        error = failure(decisions)
        assert isinstance(error, WorkerLostError)
        assert all(word in str(error) for word in ("backbone-1", "out of memory", "--resume"))
    else:
        assert decisions == []
    assert state.phase is Phase.FAILED


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["encoder-0", "feeder-0", "backbone-0"])
def test_an_error_fails_the_run_unless_its_work_is_done(phase: Phase, name: str) -> None:
    if phase is Phase.DRAINING and name == "backbone-0":
        return  # it has returned
    state = state_in(phase)
    decisions = state.on_failed(name, ValueError("odd"))
    if phase in (Phase.RUNNING, Phase.STOPPING):
        error = failure(decisions)
        assert isinstance(error, WorkerLostError) and str(error) == f"{name} failed: ValueError: odd"
        assert state.phase is Phase.FAILED
    else:
        assert decisions == [] and state.phase is phase


def test_our_own_errors_are_shown_as_they_are() -> None:
    error = SourceReadError("the disk is gone")
    assert failure(state_in(Phase.RUNNING).on_failed("feeder-0", error)) is error


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_is_asked_for_once_and_only_while_running(phase: Phase) -> None:
    state = state_in(phase)
    first, second = state.on_stop(), state.on_stop()
    assert first == ([RequestStop()] if phase is Phase.RUNNING else []) and second == []
    assert state.was_stopped == (phase in (Phase.RUNNING, Phase.STOPPING))


@pytest.mark.parametrize("phase", PHASES)
def test_without_the_coordinator_the_run_fails(phase: Phase) -> None:
    state = state_in(phase)
    assert "coordinator died (gone)" in str(failure(state.on_coordinator_lost("gone")))
    assert state.phase is Phase.FAILED


def kill_often(state: RunState, name: str) -> list[Decision]:
    """One death more than a producer may have."""
    for _ in range(MAX_RESTARTS):
        assert state.on_died(name, "killed") == [Restart(name)]
    return state.on_died(name, "killed")


def test_restarts_are_counted_for_each_producer() -> None:
    state = state_in(Phase.RUNNING)
    assert state.on_died("encoder-0", "killed") == [Restart("encoder-0")]
    error = failure(kill_often(state, "feeder-0"))
    assert f"died {MAX_RESTARTS + 1} times" in str(error) and "limits.max_encoder_restarts is 2" in str(error)


LEADERS = {"encoder-0-tp1": "encoder-0", "encoder-0-tp2": "encoder-0", "encoder-1-tp1": "encoder-1"}


def with_encoder_ranks() -> RunState:
    return RunState({**ACTORS, **dict.fromkeys(LEADERS, Role.ENCODER_RANK)}, MAX_RESTARTS, 0.1, leaders=LEADERS)


def test_a_replica_dies_with_any_of_its_processes_and_its_deaths_count_together() -> None:
    state = with_encoder_ranks()
    assert state.on_died("encoder-0-tp1", "killed") == [Restart("encoder-0", rank="encoder-0-tp1")]
    assert state.on_failed("encoder-0", ReplicaLostError("lost encoder-0-tp2")) == [Restart("encoder-0")]
    assert state.on_died("encoder-1-tp1", "killed") == [Restart("encoder-1", rank="encoder-1-tp1")]
    assert state.on_died("encoder-0-tp2", "killed") == [Abandon("encoder-0")]
    assert state.on_died("encoder-0-tp1", "killed") == [], "it was given up as a whole"
    error = failure([*state.on_died("encoder-1", "killed"), *state.on_died("encoder-1-tp1", "no memory")][1:])
    assert "encoder-1 died 3 times (encoder-1-tp1: no memory)" in str(error), "no other encoder is left"


def test_an_error_of_a_follower_fails_the_run_under_its_name() -> None:
    error = failure(with_encoder_ranks().on_failed("encoder-0-tp1", ValueError("odd")))
    assert str(error) == "encoder-0-tp1 failed: ValueError: odd"


def test_followers_are_not_waited_for() -> None:
    state = with_encoder_ranks()
    assert state.on_returned("encoder-0-tp1") == []
    for name in ("backbone-0", "backbone-1"):
        assert state.on_returned(name) == []
    assert state.phase is Phase.DRAINING
    assert state.on_returned("encoder-0") == [] and state.on_died("encoder-0-tp2", "killed") == []
    assert state.on_failed("encoder-1-tp1", ReplicaLostError("lost encoder-1")) == []
    assert state.on_failed("encoder-1", OSError("late")) == [], "its replica ended already"
    assert state.on_returned("feeder-0") == [Finish()]


def test_the_run_goes_on_without_an_encoder_while_others_are_left() -> None:
    asked: list[Sequence[str]] = []
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, lambda encoders: asked.append(encoders))
    assert kill_often(state, "encoder-1") == [Abandon("encoder-1")]
    assert asked == [["encoder-0"]] and state.phase is Phase.RUNNING
    assert "encoder-0 died 3 times" in str(failure(kill_often(state, "encoder-0"))), "nobody is left"
    assert len(asked) == 1


def test_a_run_whose_memory_does_not_suffice_without_an_encoder_ends_with_the_numbers() -> None:
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, lambda encoders: f"{len(encoders)} segment holds 3 of 8 parts")
    error = str(failure(kill_often(state, "encoder-1")))
    assert "encoder-1 died 3 times" in error and "without its memory 1 segment holds 3 of 8 parts" in error


def test_an_abandoned_encoder_is_not_waited_for() -> None:
    state = state_in(Phase.RUNNING)
    kill_often(state, "encoder-1")
    for name in ("backbone-0", "backbone-1", "encoder-0"):
        assert state.on_returned(name) == []
    assert state.on_returned("feeder-0") == [Finish()]


def test_the_run_drains_behind_the_backbone_and_then_it_is_over() -> None:
    state = state_in(Phase.RUNNING)
    assert state.on_returned("encoder-0") == [] and state.phase is Phase.RUNNING
    assert state.on_returned("backbone-0") == [] and state.phase is Phase.RUNNING
    assert state.on_returned("backbone-1") == [] and state.phase is Phase.DRAINING
    assert state.on_died("feeder-0", "killed") == []
    assert state.on_failed("encoder-1", OSError("late")) == [Finish()]
    assert state.phase is Phase.FINISHED and not state.was_stopped


@pytest.mark.parametrize(
    ("num_rejected", "num_seen", "fails"),
    [
        (MIN_SAMPLES_TO_JUDGE - 1, MIN_SAMPLES_TO_JUDGE - 1, False),
        (10, 100, False),
        (11, 100, True),
        (MIN_SAMPLES_TO_JUDGE, MIN_SAMPLES_TO_JUDGE, True),
        (0, 0, False),
    ],
)
def test_too_many_rejected_samples_fail_the_run(num_rejected: int, num_seen: int, fails: bool) -> None:
    state = state_in(Phase.RUNNING)
    decisions = state.on_rejected(num_rejected, num_seen)
    assert bool(decisions) == fails
    if fails:
        error = failure(decisions)
        assert isinstance(error, DataError)
        assert f"{num_rejected} of {num_seen}" in str(error) and "data.max_rejected_fraction (10%)" in str(error)
        assert state.on_rejected(num_rejected, num_seen) == [], "it is said once"


EVENTS = st.lists(st.tuples(st.sampled_from(["returned", "died", "failed", "stop"]), st.sampled_from(sorted(ACTORS))))


@settings(deadline=None)
@given(EVENTS)
def test_every_run_of_events_ends_in_one_way(events: list[tuple[str, str]]) -> None:
    """Whatever happens: at most one failure is decided, and a run is over when all returned or one failed for good."""
    state = RunState(ACTORS, MAX_RESTARTS, 1.0)
    running = dict(ACTORS)
    decided: list[Decision] = []
    for event, name in events:
        if state.phase in (Phase.FINISHED, Phase.FAILED):
            break
        if event == "stop":
            decided += state.on_stop()
            continue
        if name not in running:
            continue
        if event == "returned":
            new = state.on_returned(name)
        else:
            new = state.on_died(name, "x") if event == "died" else state.on_failed(name, ValueError("x"))
        if Restart(name) not in new:
            del running[name]
        decided += new
    ends = [decision for decision in decided if isinstance(decision, Fail | Finish)]
    assert len(ends) == (state.phase in (Phase.FINISHED, Phase.FAILED))
    assert (state.phase is Phase.FINISHED) == (not running and not any(isinstance(end, Fail) for end in ends))
    assert sum(isinstance(decision, RequestStop) for decision in decided) <= 1
    backbone_left = Role.BACKBONE in running.values()
    if state.phase is not Phase.FAILED and running:
        assert (state.phase is Phase.DRAINING) == (not backbone_left)


def state_of_a_running_backbone(max_backbone_restarts: int = 2) -> RunState:
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=max_backbone_restarts)
    state.on_backbone_started()
    return state


def test_a_rank_that_is_lost_takes_the_whole_backbone_back_once() -> None:
    state = state_of_a_running_backbone()
    assert state.on_died("backbone-1", "out of memory") == [RestartBackbone("backbone-1")]
    assert state.on_died("backbone-0", "killed") == state.on_failed("backbone-0", RuntimeError("no peer")) == []
    assert state.phase is Phase.RUNNING
    state.on_backbone_started()
    assert state.on_died("backbone-0", "killed") == [RestartBackbone("backbone-0")]


@pytest.mark.parametrize("name", ["encoder-0", "feeder-0"])
def test_a_producer_that_hangs_is_started_again_as_one_that_died(name: str) -> None:
    state = state_of_a_running_backbone()
    (restart,) = state.on_hung(name, "it has not answered for 9 s", 9.0)
    assert restart == Restart(name) and isinstance(restart, Restart)
    assert (restart.hung_s, restart.reason) == (9.0, "it has not answered for 9 s")
    assert state.on_died(name, "killed") == [Restart(name)]
    decisions = RunState({name: ACTORS[name]}, 0, 0.1).on_hung(name, "the forward of batch 3", 9.0)
    assert isinstance(decisions[0], Fail) and decisions[0].loss == LastLoss(name, "the forward of batch 3", 9.0)
    error = failure(decisions)
    assert f"{name} died or hung 1 times (the forward of batch 3), limits.max_encoder_restarts is 0" in str(error)


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.FAILED])
def test_who_hangs_when_nobody_waits_for_it_is_left_alone(phase: Phase) -> None:
    assert state_in(phase).on_hung("encoder-0", "the forward", 9.0) == []


def test_a_start_that_fails_is_no_reason_to_start_again() -> None:
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=2)
    assert isinstance(failure(state.on_died("backbone-1", "killed")), WorkerLostError)


def test_ranks_that_had_returned_run_again_with_the_others() -> None:
    state = state_of_a_running_backbone()
    state.on_returned("backbone-0")
    state.on_died("backbone-1", "killed")
    state.on_backbone_started()
    state.on_returned("backbone-1")
    assert state.phase is Phase.RUNNING, "the other one runs too"
    state.on_returned("backbone-0")
    assert state.phase is Phase.DRAINING


@pytest.mark.parametrize("limit", [0, 2])
def test_a_backbone_is_started_again_so_often_and_no_more(limit: int) -> None:
    state = state_of_a_running_backbone(limit)
    for _ in range(limit):
        state.on_died("backbone-0", "killed")
        state.on_backbone_started()
    error = failure(state.on_died("backbone-0", "killed"))
    assert ("limits.max_backbone_restarts is 2" in str(error)) == (limit == 2) and "--resume" in str(error)


def test_our_own_error_of_a_rank_ends_the_run_and_none_while_the_backbone_is_down() -> None:
    state = state_of_a_running_backbone()
    state.on_died("backbone-0", "killed")
    assert state.on_failed("backbone-1", SourceReadError("no disk")) == []
    state.on_backbone_started()
    assert isinstance(failure(state.on_failed("backbone-1", SourceReadError("no disk"))), SourceReadError)


def test_all_start_again_without_a_coordinator_once_they_ran() -> None:
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, may_be_lost=True)
    assert isinstance(failure(state.on_coordinator_lost("killed")), WorkerLostError), "the first start failed"
    for lose in (
        lambda state: state.on_coordinator_lost("killed"),
        lambda state: state.on_failed("backbone-0", CoordinatorLostError("killed")),
    ):
        state = RunState(ACTORS, MAX_RESTARTS, 0.1, may_be_lost=True)
        state.on_backbone_started()
        assert lose(state) == [RestartAll("coordinator")]
        assert state.on_failed("encoder-0", CoordinatorLostError("killed")) == state.on_coordinator_lost("again") == []


def test_a_first_start_that_loses_a_process_is_tried_again_once() -> None:
    def first_start(again: bool, limit: int = 2) -> RunState:
        return RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=limit, may_be_lost=True, may_start_again=again)

    assert first_start(True).on_died("backbone-0", "killed") == [RestartAll("backbone-0")]
    assert first_start(True).on_hung("backbone-0", "silent", 9.0) == [RestartAll("backbone-0")]
    assert first_start(True).on_coordinator_lost("killed") == [RestartAll("coordinator")]
    for state in (first_start(False), first_start(True, limit=0)):
        assert "--resume" in str(failure(state.on_died("backbone-0", "killed")))
    assert "--resume" in str(failure(first_start(False).on_coordinator_lost("killed")))
    assert first_start(True).may_start_again and not first_start(True, limit=0).may_start_again
    later = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=2, may_be_lost=True, has_run=True)
    assert not later.may_start_again and later.may_lose_coordinator, "one that hangs ends the run, with its reason"
    failed = first_start(True).on_failed("backbone-0", ValueError("a bug"))
    assert "a bug" in str(failure(failed)), "it would fail again"


def test_a_group_that_may_not_be_lost_ends_with_its_coordinator() -> None:
    state = state_of_a_running_backbone()
    assert "--resume" in str(failure(state.on_coordinator_lost("killed")))


def test_a_rank_that_is_lost_after_producers_have_ended_takes_all_back() -> None:
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=2, may_be_lost=True)
    state.on_backbone_started()
    state.on_returned("feeder-0")
    assert state.on_died("backbone-0", "killed") == [RestartAll("backbone-0")]
    last = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=2)
    last.on_backbone_started()
    last.on_returned("encoder-0")
    assert "--resume" in str(failure(last.on_died("backbone-0", "killed")))


def test_restarts_are_counted_over_all_groups_of_a_run() -> None:
    counts = RestartCounts()
    for group in range(2):
        state = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=2, has_run=group > 0, counts=counts)
        state.on_backbone_started()
        state.on_died("backbone-0", "killed")
    state.on_backbone_started()
    assert "limits.max_backbone_restarts is 2" in str(failure(state.on_died("backbone-0", "killed")))


def test_a_loss_while_all_start_again_takes_them_back_again() -> None:
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=2, may_be_lost=True, has_run=True)
    assert state.on_died("backbone-0", "killed") == [RestartBackbone("backbone-0")]
    assert state.on_coordinator_lost("killed") == [RestartAll("coordinator")]


def test_the_last_group_that_may_start_fails_with_its_start() -> None:
    state = RunState(ACTORS, MAX_RESTARTS, 0.1, max_backbone_restarts=2, may_be_lost=False, has_run=True)
    assert "--resume" in str(failure(state.on_died("backbone-0", "killed")))
