"""How the driver follows the nodes' downloads, with fakes in place of Ray's functions."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.controller import weights
from flowtrain.controller.watch import StopRequested
from flowtrain.controller.weights import fetch_models, progress_text
from flowtrain.errors import ResourceError, StallError
from flowtrain.types.nodes import FetchState, HubModel
from tests.controller.fake_ray import Ref

MODELS = (HubModel("owner/model", "backbone.path", True),)


class FakeNode:
    """One node's download. states: what it answers, the last again and again; commit: None while it goes on."""

    def __init__(self, name: str, states: list[FetchState], commit: str | None, error: BaseException | None = None):
        self.name, self.states, self.commit, self.error = name, states, commit, error
        self.is_killed = False
        self.address = SimpleNamespace(remote=lambda: done(name))
        self.fetch = SimpleNamespace(remote=self._fetch)
        self.state = SimpleNamespace(remote=self._state)
        self._asked = 0

    def _fetch(self) -> Ref:
        self.running = Ref(self.name)
        return self.running

    def _state(self) -> Ref:
        self._asked += 1
        if self._asked >= len(self.states) and not self.running.is_done:
            if self.error is not None:
                self.running.finish(self.error)
            elif self.commit is not None:
                self.running.finish({"owner/model": self.commit})
        return done(self.states[min(self._asked, len(self.states)) - 1])


def done(value: Any) -> Ref:
    ref = Ref("done")
    ref.finish(value)
    return ref


def get(ref: Ref, timeout: float) -> Any:
    if not ref.is_done:
        raise ray.exceptions.GetTimeoutError(f"not within {timeout}")
    if isinstance(ref.value, BaseException):
        raise ref.value
    return ref.value


def follow(monkeypatch: pytest.MonkeyPatch, *nodes: FakeNode, **options: Any) -> list[str]:
    """Follow downloads; a second passes with each look. Returns what was shown."""
    left, shown, now = list(nodes), [], [1e3]

    def wait(refs: list[Ref], num_returns: int, timeout: float) -> Any:
        now[0] += timeout
        return [ref for ref in refs if ref.is_done], []

    monkeypatch.setattr(ray, "remote", lambda actor: SimpleNamespace(options=lambda **kwargs: actor_of(left)))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", lambda node, no_restart: setattr(node, "is_killed", True))
    monkeypatch.setattr(weights, "NodeAffinitySchedulingStrategy", lambda node_id, soft: node_id)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    try:
        fetch_models(MODELS, [node.name for node in nodes], 30.0, shown.append, **options)
    finally:
        assert all(node.is_killed for node in nodes)
    return shown


def actor_of(left: list[FakeNode]) -> Any:
    return SimpleNamespace(remote=lambda models: left.pop(0))


def growing(count: int) -> list[FetchState]:
    return [FetchState(step * 10**9, count * 10**9) for step in range(count)]


def test_each_node_is_shown_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = follow(monkeypatch, FakeNode("a", growing(3), "c1"), FakeNode("b", growing(50), "c1"))
    assert "a 0.00 of 3.00 GB, b 0.00 of 50.00 GB" in shown[0]
    assert "(1 of 2 nodes done): b" in shown[-1] and len(shown) > 5


def test_a_slow_node_is_no_fault_and_a_silent_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StallError, match=r"node b got no byte of owner/model for limits.stall_timeout_s \(30 s\), 0"):
        follow(monkeypatch, FakeNode("a", growing(3), "c1"), FakeNode("b", [FetchState(0, 10)], None))


def test_a_node_that_cannot_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = ResourceError("backbone.path: 'owner/model' cannot be fetched from the hub: offline")
    error = ray.exceptions.RayTaskError("fetch", "", cause)
    with pytest.raises(ResourceError, match=r"node b: backbone.path: .*offline; give the node access.*HF_HUB_OFFLINE"):
        follow(monkeypatch, FakeNode("a", growing(3), "c1"), FakeNode("b", growing(2), None, error))


def test_nodes_with_other_commits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match=r"different commits of 'owner/model' \(a has c1, b has c2\)"):
        follow(monkeypatch, FakeNode("a", growing(2), "c1"), FakeNode("b", growing(2), "c2"))


def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StopRequested):
        follow(monkeypatch, FakeNode("a", growing(9), None), stop=stop)


def test_a_size_that_is_not_known_is_said() -> None:
    assert progress_text(MODELS, {"a": FetchState(10**9, None)}, set()).endswith("a 1.00 of ? GB")


def test_a_process_that_never_starts_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, lost = FakeNode("a", growing(2), "c1"), FakeNode("b", growing(2), "c1")
    silent.address = SimpleNamespace(remote=lambda: Ref("address"))
    with pytest.raises(StallError, match=r"node a: .*did not answer within limits.stall_timeout_s \(30 s\)"):
        follow(monkeypatch, silent)
    lost.address = SimpleNamespace(remote=lambda: done(ray.exceptions.ActorUnschedulableError("its node is dead")))
    with pytest.raises(ResourceError, match=r"node b: the process that fetches the models was lost.*its node is dead"):
        follow(monkeypatch, lost)
