"""What an actor's end means, told from what Ray raises."""

from __future__ import annotations

import pytest
import ray

from flowtrain.controller.outcomes import Died, Failed, Outcome, Returned, outcome_of, reason_of, root_cause_first
from flowtrain.errors import DataError, FlowTrainError, StallError
from tests.controller.fake_ray import FakeRay, Ref, died, not_constructed, task_error


def outcome(value: object, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    FakeRay(monkeypatch)
    ref = Ref("encoder-0")
    ref.finish(value)
    return outcome_of(ref, "encoder-0")  # type: ignore[arg-type]  # a reference of the fake


def test_a_loop_that_ends_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(None, monkeypatch) == Returned()


def test_an_error_comes_out_as_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = DataError("no rows")
    found = outcome(task_error(cause), monkeypatch)
    assert isinstance(found, Failed) and found.error is cause and str(found.error) == "no rows"


def test_a_death_says_why_and_not_who(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(died("Worker exits with SIGKILL."), monkeypatch) == Died("Worker exits with SIGKILL")
    assert outcome(ray.exceptions.NodeDiedError("node a is gone"), monkeypatch) == Died("node a is gone")


def test_an_actor_that_cannot_be_constructed_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(not_constructed(ValueError("no such tower")), monkeypatch)
    assert isinstance(found, Failed) and isinstance(found.error, FlowTrainError)
    assert str(found.error) == "encoder-0 could not be constructed: ValueError: no such tower"


def test_other_errors_of_ray_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ray.exceptions.RaySystemError("odd")
    found = outcome(error, monkeypatch)
    assert isinstance(found, Failed) and found.error is error


def test_a_reason_is_never_empty() -> None:
    assert reason_of(ray.exceptions.RayActorError(None, "")) == "RayActorError"
    assert reason_of(ray.exceptions.RayActorError(None, "The actor died.")) == "The actor died"


def test_the_cause_comes_before_what_it_caused() -> None:
    outcomes: dict[str, Outcome] = {
        "rank 0": Failed(RuntimeError("connection closed by peer")),
        "rank 1": Failed(StallError("waited for the moon")),
        "rank 2": Died("killed"),
        "feeder": Returned(),
    }
    assert root_cause_first(outcomes)[:2] == ["rank 2", "rank 1"]
