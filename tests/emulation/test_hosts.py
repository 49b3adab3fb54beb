"""Processes of emulated actors: errors of constructors arrive, and nothing of a run is on other nodes or left over."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flowtrain.actors.feeder import Feeder
from flowtrain.controller.emulated import EmulatedLauncher
from flowtrain.controller.worker_group import Launcher
from flowtrain.emulation.hosts import EmulatedHandle, EmulatedHost
from flowtrain.emulation.meetings import Meeting, Meetings
from flowtrain.emulation.rank import EmulatedRank
from flowtrain.emulation.thread_replica import ThreadReplica
from flowtrain.errors import ConfigError, StallError
from flowtrain.types.plan import Degrees
from tests.emulation.test_check import config_of

NODE = "ab" * 28


class Fails:
    def __init__(self, process: Any) -> None:
        raise ConfigError("the constructor's own words")


def test_calls_of_an_actor_that_cannot_be_constructed_say_why(tmp_path: Path) -> None:
    host = EmulatedHost(config_of(tmp_path, "backbone.data_parallel_size=2"), None)
    host.add("rank", Fails)
    with pytest.raises(ConfigError, match="the constructor's own words"):
        host.call("rank", "run")
    with pytest.raises(RuntimeError, match="another emulated rank failed"):
        host._process.meetings.meet(Meeting.WORLD, 0, range(2), 0.0)


def test_an_actor_that_is_never_constructed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.emulation.hosts.CONSTRUCT_S", 0.01)
    with pytest.raises(StallError, match=r"encoder-3 \(emulated\) was not constructed within 0\.01 s"):
        EmulatedHost(config_of(tmp_path), None).call("encoder-3", "run")


def test_handles_can_be_copied_and_pickled() -> None:
    handle: Any = EmulatedHandle(None, "rank")  # type: ignore[arg-type]
    assert copy.copy(handle) == pickle.loads(pickle.dumps(handle)) == handle
    assert handle.run.method == "run"


def test_ranks_of_a_replica_wait_no_longer_than_the_limit_and_say_why() -> None:
    with pytest.raises(StallError, match="passed before all 2 of a replica met"):
        ThreadReplica(2, 0.01).exchange(0, None)
    replica = ThreadReplica(2, 20.0)
    threading.Timer(0.01, replica.abort).start()
    with pytest.raises(RuntimeError, match="another emulated rank failed"):
        replica.exchange(0, None)


def test_ranks_of_several_processes_meet_in_memory_that_has_no_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, "backbone.data_parallel_size=2", "emulated.ranks_per_process=1")
    launcher = EmulatedLauncher(config)
    memory = launcher._hosts._memory
    assert memory is not None and memory.parts[:2] == ("/", "proc"), "a file would be left over by a killed driver"
    Meetings(Degrees(2, 1, 1), 1.0, memory).fail()
    with pytest.raises(RuntimeError, match="another emulated rank failed"):
        Meetings(Degrees(2, 1, 1), 1.0, memory).meet(Meeting.WORLD, 0, range(2), 0.0)
    del launcher
    assert not memory.exists()


def test_all_actors_are_on_the_drivers_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    call = SimpleNamespace(remote=lambda *args: None)

    def options(**given: Any) -> Any:
        found.append(given)
        return SimpleNamespace(remote=lambda *args: SimpleNamespace(add=call))

    monkeypatch.setattr(ray, "remote", lambda actor_class: SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: NODE))
    launcher: Launcher = EmulatedLauncher(config_of(tmp_path))
    launcher.spawn(EmulatedRank, {"name": "backbone-dp0-pp0-tp0"}, None, 0)
    launcher.spawn(Feeder, {"name": "feeder-0"})
    assert len(found) == 2
    for each in found:
        assert (each["scheduling_strategy"].node_id, each["scheduling_strategy"].soft) == (NODE, False)
