"""What an actor's end means, told from what Ray raises."""

from __future__ import annotations

import pickle

import pytest
import ray

from flowtrain.controller.outcomes import Died, Failed, Outcome, Returned, outcome_of, reason_of, root_cause_first
from flowtrain.emulation.meetings import OtherRankFailedError
from flowtrain.errors import DataError, FlowTrainError, StallError
from tests.controller.fake_ray import FakeRay, Ref, died, not_constructed, task_error

TOLD = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: Rank\n\tactor_id: 6f\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    "{}. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray "
    "stop --force was called."
)
"""What Ray tells about a dead worker."""


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


def test_whoever_waits_for_an_answer_of_the_dead_died_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(task_error(died("Worker exits with SIGKILL.")), monkeypatch) == Died("Worker exits with SIGKILL")


def test_other_errors_of_ray_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ray.exceptions.RaySystemError("odd")
    found = outcome(error, monkeypatch)
    assert isinstance(found, Failed) and found.error is error


def test_a_reason_is_never_empty() -> None:
    assert reason_of(ray.exceptions.RayActorError(None, "")) == "RayActorError"
    assert reason_of(ray.exceptions.RayActorError(None, "The actor died.")) == "The actor died"


def test_of_what_ray_tells_about_a_dead_worker_the_detail_is_kept() -> None:
    assert reason_of(ray.exceptions.RayActorError(None, TOLD.format("Worker exits with code 3"))) == (
        "Worker exits with code 3"
    )


@pytest.mark.parametrize(
    ("rays", "ours"),
    [
        (
            TOLD.format("Worker unexpectedly exits with a connection error code 2. End of file"),
            "its process was killed, or crashed",
        ),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Rank\nThe actor died because its "
            "node has died. Node Id: 6f\n\tthe actor's node was terminated unexpectedly: health check failed",
            "its node is gone",
        ),
        (
            "The actor 37 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: Socket closed "
            "rpc_code: 14. The task may or may not have been executed on the actor",
            "its process cannot be reached",
        ),
    ],
)
def test_what_happens_most_is_said_in_our_words(rays: str, ours: str) -> None:
    assert reason_of(ray.exceptions.RayActorError(None, rays)) == ours


def test_emulated_ranks_that_waited_for_a_failed_one_come_after_it() -> None:
    waited = pickle.loads(pickle.dumps(OtherRankFailedError()))
    outcomes: dict[str, Outcome] = {"rank 0": Failed(waited), "rank 1": Failed(ValueError("the cause"))}
    assert root_cause_first(outcomes) == ["rank 1", "rank 0"]


def test_the_cause_comes_before_what_it_caused() -> None:
    outcomes: dict[str, Outcome] = {
        "rank 0": Failed(RuntimeError("connection closed by peer")),
        "rank 1": Failed(StallError("waited for the moon")),
        "rank 2": Died("killed"),
        "feeder": Returned(),
    }
    assert root_cause_first(outcomes)[:2] == ["rank 2", "rank 1"]


def test_an_error_comes_before_what_gloo_says_of_its_rank() -> None:
    outcomes: dict[str, Outcome] = {
        "rank 0": Failed(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")),
        "rank 1": Failed(ValueError("a shape is odd")),
    }
    assert root_cause_first(outcomes) == ["rank 1", "rank 0"]
