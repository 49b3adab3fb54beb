"""Which starts that fail are tried again, and from where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.controller import run, worker_group
from flowtrain.controller.group_run import GroupRun
from flowtrain.controller.lost_nodes import NODE
from flowtrain.controller.resume import ResumePoint
from flowtrain.controller.watch import BackboneLost, GroupLost
from flowtrain.errors import CoordinatorLostError, CoordinatorSilentError, StallError, WorkerLostError
from tests.training.ranks import make_config


@pytest.mark.parametrize("lost", [BackboneLost("a", "it cannot start", "died"), GroupLost("a", "it cannot start")])
@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("node_is_lost", [False, True])
def test_after_a_failed_start_its_snapshots_are_given_up_unless_a_node_was_lost(
    monkeypatch: pytest.MonkeyPatch, lost: Exception, in_memory: bool, node_is_lost: bool
) -> None:
    def fails(*_: Any) -> None:
        raise lost

    closed: list[bool] = []
    monkeypatch.setattr(worker_group, "start_backbone", fails)
    keepers = SimpleNamespace(is_on=True, for_ranks=None, close=lambda: closed.append(True))
    start = ResumePoint(step=4, in_memory=in_memory)
    history = SimpleNamespace(start=start, origin=start.origin, keepers=keepers)
    blamed = in_memory and not node_is_lost
    history.blames_snapshot = lambda name, reason: blamed and (name, reason) == ("a", "it cannot start")
    run_spec = SimpleNamespace(config=make_config(), evaluations=())
    run: Any = SimpleNamespace(run_spec=run_spec, group=None)
    said: list[str] = []
    stream: Any = SimpleNamespace(warn=said.append, note=None)
    group = GroupRun(run, history, None, stream, None, None)  # type: ignore[arg-type]  # nothing else is asked
    group._actors, group._watcher = SimpleNamespace(), SimpleNamespace(results=fails)  # type: ignore[assignment]
    with pytest.raises(type(lost)):
        group._start_backbone()
    assert closed == [True] * (in_memory and not node_is_lost)
    assert len(said) == len(closed) and all("snapshot of step 4 is given up" in line for line in said)


@pytest.mark.parametrize("may_start_again", [False, True])
@pytest.mark.parametrize("error", [StallError("backbone-0 did not answer"), CoordinatorSilentError("it is silent")])
def test_a_first_start_that_hangs_is_tried_again_and_no_later_one(
    monkeypatch: pytest.MonkeyPatch, may_start_again: bool, error: StallError
) -> None:
    def hangs(*_: Any) -> None:
        raise error

    monkeypatch.setattr(worker_group, "start_backbone", hangs)
    start = ResumePoint(step=0)
    history: Any = SimpleNamespace(start=start, origin=start.origin, keepers=SimpleNamespace(is_on=False))
    run: Any = SimpleNamespace(run_spec=SimpleNamespace(config=make_config(), evaluations=()), group=None)
    stream: Any = SimpleNamespace(warn=None, note=None)
    nothing: Any = None  # is asked of the others
    group = GroupRun(run, history, nothing, stream, nothing, nothing)
    state, watcher = SimpleNamespace(may_start_again=may_start_again), SimpleNamespace(results=hangs)
    for name, value in (("_actors", nothing), ("_state", state), ("_watcher", watcher)):
        monkeypatch.setattr(group, name, value, raising=False)
    is_rank = type(error) is StallError  # the coordinator is lost under its own name
    with pytest.raises(GroupLost if may_start_again and is_rank else type(error), match=str(error)):
        group._start_backbone()


@pytest.mark.parametrize("error", [WorkerLostError("rank 0 died"), CoordinatorLostError("the coordinator died")])
@pytest.mark.parametrize("node_is_lost", [False, True])
@pytest.mark.parametrize("may_be_lost", [False, True])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_first_start_that_loses_a_node_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: WorkerLostError, node_is_lost: bool, may_be_lost: bool, is_second: bool
) -> None:
    def fails() -> None:
        raise error

    killed: list[bool] = []
    actors = SimpleNamespace(roles={}, leaders={}, run_producers=fails, kill=lambda: killed.append(True))
    monkeypatch.setattr(worker_group, "start_actors", lambda *_: actors)
    history = SimpleNamespace(run_id="", counts=None, has_run=False)
    run_spec = SimpleNamespace(config=make_config(), num_steps=1, indexes=())
    run: Any = SimpleNamespace(run_spec=run_spec, group=None, specs=())
    stream: Any = SimpleNamespace(warn=None, note=None)
    display: Any = SimpleNamespace(phase=lambda text: None)
    nothing: Any = None  # is asked of the others
    faked: Any = history
    group = GroupRun(run, faked, nothing, stream, display, nothing, nothing)
    for name, value in (("_start_coordinator", None), ("_hang_watches", (None, None, None)), ("_new_watcher", None)):
        monkeypatch.setattr(group, name, lambda *_, value=value: value)
    monkeypatch.setattr(group, "_nodes", SimpleNamespace(has_lost_one=lambda: node_is_lost))
    is_worth_one = node_is_lost or (isinstance(error, CoordinatorLostError) and not is_second)
    with pytest.raises(GroupLost if is_worth_one and may_be_lost else type(error)) as caught:
        group.run(nothing, may_be_lost, (lambda: None) if is_second else None, may_start_again=not is_second)
    assert killed == [True] and str(error) in str(caught.value)


@pytest.mark.parametrize(
    ("losses", "allowed"),
    [
        (["backbone-0"], [True, False]),
        ([NODE, NODE, "coordinator"], [True, True, True, False]),
        (["backbone-0", NODE], [True, False, False]),
    ],
)
def test_a_first_start_that_lost_a_node_does_not_count(
    monkeypatch: pytest.MonkeyPatch, losses: list[str], allowed: list[bool]
) -> None:
    given: list[bool] = []

    def run_group(classes: Any, may_be_lost: bool, again: Any, may_start_again: bool) -> bool:
        given.append(may_start_again)
        if len(given) <= len(losses):
            raise GroupLost(losses[len(given) - 1], "it died")
        return False

    monkeypatch.setattr(run, "GroupRun", lambda *_: SimpleNamespace(run=run_group))
    nothing: Any = None  # is asked of the others
    opened: Any = SimpleNamespace(run_spec=SimpleNamespace(config=make_config()))
    controller = run.Controller(opened, nothing, nothing, nothing, nothing, nothing, nothing)
    monkeypatch.setattr(controller, "_go_back", lambda lost: lambda: None)
    assert controller._run_groups(nothing) is False
    assert given == allowed
