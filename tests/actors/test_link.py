"""Calls to a coordinator that raises, does not answer, or is gone; and how long a wait may last."""

from __future__ import annotations

import asyncio
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.actors import link as link_module
from flowtrain.actors.link import Answering, Patience, RayLink
from flowtrain.actors.spans import SpanLog
from flowtrain.config.flow import LimitsConfig
from flowtrain.errors import OwnerLostError, StallError, WorkerLostError
from flowtrain.flow.api import CoordinatorApi
from tests.actors.elsewhere import Elsewhere

PATIENCE_S = 7.5


def task_error(cause: BaseException) -> BaseException:
    error = ray.exceptions.RayTaskError("lease", "remote traceback", cause, proctitle="x", pid=1, ip="127.0.0.1")
    return error.as_instanceof_cause()


class World:
    """A link whose coordinator answers every call with ``answer``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: Any = None
        self.sent: list[tuple[Any, ...]] = []
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "other-node"))
        answer = SimpleNamespace(remote=lambda question: self.sent.append(pickle.loads(question)))
        offer = SimpleNamespace(remote=lambda node_id: node_id)
        self.link = RayLink(SimpleNamespace(answer=answer, offer=offer), patience_s=PATIENCE_S)

    def _get(self, ref: Any, timeout: float | None = None) -> Any:
        assert timeout == PATIENCE_S, "no wait without a timeout"
        if ref == "other-node":
            return None
        if isinstance(self.answer, BaseException):
            raise self.answer
        return pickle.dumps(self.answer)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_call_brings_the_answer(world: World) -> None:
    world.answer = "yes"
    assert world.link.ask(CoordinatorApi.lease, 1, "vision") == "yes"
    assert world.sent == [("lease", (1, "vision"), {}, None)]


class Echo(Answering):
    error: Exception | None = None

    async def lease(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        return args, kwargs


def test_an_actor_answers_what_a_link_packs(world: World) -> None:
    world.link.ask(CoordinatorApi.lease, 1, encoder="vision")
    packed = asyncio.run(Echo().answer(pickle.dumps(world.sent[0])))
    assert pickle.loads(packed) == ((1,), {"encoder": "vision"})


def test_our_errors_arrive_as_themselves(world: World) -> None:
    world.answer = task_error(OwnerLostError("gone"))
    with pytest.raises(OwnerLostError) as caught:
        world.link.ask(CoordinatorApi.lease)
    assert type(caught.value) is OwnerLostError and str(caught.value) == "gone"
    assert "remote traceback" in str(caught.value.__cause__)


def test_other_errors_keep_their_remote_traceback(world: World) -> None:
    world.answer = task_error(AssertionError("a bug"))
    with pytest.raises(AssertionError, match="remote traceback"):
        world.link.ask(CoordinatorApi.lease)


def test_a_coordinator_that_is_gone_or_silent_is_reported(world: World) -> None:
    world.answer = ray.exceptions.RayActorError(None, "The actor died.")
    with pytest.raises(WorkerLostError, match="the coordinator died"):
        world.link.ask(CoordinatorApi.lease)
    world.answer = ray.exceptions.GetTimeoutError("late")
    with pytest.raises(StallError, match=r"did not answer \(lease\) within 7\.5 s"):
        world.link.ask(CoordinatorApi.lease)


def test_questions_on_the_coordinators_node_need_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    with Elsewhere(Echo()) as echo:
        coordinator = SimpleNamespace(
            offer=SimpleNamespace(remote=lambda node_id: echo.call(echo.actor.offer(node_id))),
            answer=SimpleNamespace(remote=lambda question: pytest.fail("a question went through Ray")),
        )
        link = RayLink(coordinator)
        assert link.ask(CoordinatorApi.lease, 1, encoder="vision") == ((1,), {"encoder": "vision"})
        for raised in (OwnerLostError("gone"), AssertionError("a bug"), TimeoutError("its own")):
            echo.actor.error = raised
            with pytest.raises(type(raised), match=str(raised)) as caught:
                link.ask(CoordinatorApi.lease)
            assert type(caught.value) is type(raised)
            assert "in lease" in str(caught.value.__cause__), "the remote traceback is kept"
    with pytest.raises(WorkerLostError, match="the coordinator died"):
        link.ask(CoordinatorApi.lease)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))


LIMITS = LimitsConfig(stall_warning_s=10.0, stall_timeout_s=35.0)


def test_a_wait_warns_in_time_and_then_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock, described = Clock(monkeypatch), []
    patience = Patience("rank 0", LIMITS, lambda: described.append(1) or "the moon")
    with caplog.at_level(logging.WARNING):
        for clock.now_s in (1.0, 11.0, 12.0, 21.0, 29.0):
            patience.tick()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 has waited 11 s: the moon",
        "rank 0 has waited 21 s: the moon",
    ]
    assert len(described) == 2, "it is asked only when there is something to say"
    clock.now_s = 35.0
    with pytest.raises(StallError, match=r"rank 0 waited 35 s, the limit of limits.stall_timeout_s: the moon"):
        patience.tick()


def test_a_wait_that_another_process_reports_ends_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    patience = Patience("rank 1", LIMITS, lambda: "rank 0 knows", warns=False)
    for clock.now_s in (11.0, 21.0, 34.0):
        patience.tick()
    assert caplog.records == []
    clock.now_s = 35.0
    with pytest.raises(StallError, match="rank 1 waited 35 s.*rank 0 knows"):
        patience.tick()


def test_spans_are_returned_once() -> None:
    spans = SpanLog("encoder-0")
    spans.add("encode", 1.0, 2.0, images=3)
    spans.add("put", 2.0, 3.0)
    first = spans.take()
    assert [(span.actor, span.name, span.args) for span in first] == [
        ("encoder-0", "encode", {"images": 3}),
        ("encoder-0", "put", {}),
    ]
    assert spans.take() == ()
