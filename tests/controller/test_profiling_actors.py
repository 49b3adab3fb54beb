"""What becomes of a measurement whose processes fail or are lost, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from flowtrain.config.run import RunConfig
from flowtrain.controller import profiling_actors
from flowtrain.controller.profiling import _Clock
from flowtrain.controller.profiling_actors import ProfilerLost, Profilers
from flowtrain.errors import DataError, ResourceError
from flowtrain.training.profile_memory import LOG_LEVEL
from tests.controller.fake_ray import FakeRay, Ref, died, task_error
from tests.e2e.worlds import World, tiny_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    world = World(seed=3)
    world.add_mixed(4)
    return tiny_config(tmp_path, world.write(tmp_path / "train.parquet"))


def refs(*values: object) -> Any:
    """Calls that have ended, each with a value or an exception; with an ellipsis one that goes on."""
    found = [Ref(f"call {number}") for number in range(len(values))]
    for ref, value in zip(found, values, strict=True):
        if value is not ...:
            ref.finish(value)
    return found


def test_all_answers_come_in_the_order_of_the_calls(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    late, early = calls = refs(..., "early")
    FakeRay(monkeypatch, lambda: late.finish("late"))
    assert Profilers(config, "CPU").answers(calls) == ["late", "early"] and early.is_done


def test_the_rank_that_was_lost_is_named_and_not_the_one_that_missed_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = task_error(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    first, second = calls = refs(..., ...)
    FakeRay(monkeypatch, lambda: first.finish(missed), lambda: second.finish(died("Worker exits with SIGKILL.")))
    with pytest.raises(ProfilerLost, match=r"^Worker exits with SIGKILL$"):
        Profilers(config, "CPU").measured(calls)
    assert first.is_done and second.is_done


def test_others_are_not_waited_for_long_once_one_has_failed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling_actors, "_GRACE_S", 0.0)
    FakeRay(monkeypatch)
    with pytest.raises(DataError, match="no rows"):
        Profilers(config, "CPU").measured(refs(..., task_error(DataError("no rows"))))
    with pytest.raises(ValueError, match="remote traceback"):
        Profilers(config, "CPU").measured(refs(task_error(ValueError("odd")), ...))


def test_a_lost_peer_counts_as_a_loss_unless_another_error_explains_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRay(monkeypatch)
    missed, odd = task_error(RuntimeError("[gloo/transport/tcp/pair.cc:547] closed")), task_error(ValueError("odd"))
    with pytest.raises(ProfilerLost, match=r"it lost another rank: \[gloo/transport/tcp/pair.cc:547\] closed"):
        Profilers(config, "CPU").measured(refs(missed, missed))
    with pytest.raises(ValueError, match="remote traceback"):
        Profilers(config, "CPU").measured(refs(missed, odd))
    with pytest.raises(ResourceError, match="a process cannot measure: System error: no such environment"):
        Profilers(config, "CPU").measured(refs(ray.exceptions.RaySystemError("no such environment")))


def test_an_answer_that_does_not_come_names_the_limit(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)
    monkeypatch.setattr(profiling_actors.time, "monotonic", iter(range(0, 10**6, 100)).__next__)
    with pytest.raises(ResourceError, match=r"longer than limits\.stall_timeout_s \(\d+ s\); raise it, or"):
        Profilers(config, "CPU").measured(refs("early", ...))


def test_variables_come_with_the_process_and_a_users_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_LEVEL, raising=False)
    monkeypatch.setattr(profiling_actors, "memory_variables", lambda: {"KEEP": "1"})
    assert profiling_actors._cpu_options()["runtime_env"]["env_vars"] == {LOG_LEVEL: "6", "KEEP": "1"}
    monkeypatch.setenv(LOG_LEVEL, "0")
    monkeypatch.setattr(profiling_actors, "memory_variables", dict)
    assert profiling_actors._cpu_options()["runtime_env"]["env_vars"] == {LOG_LEVEL: "0"}


def test_what_lost_a_process_is_measured_again_and_the_report_says_so() -> None:
    told: list[str] = []
    clock, losses = _Clock(told.append), [ProfilerLost("it crashed")]
    clock.num_parts = 8
    with clock("devices"):
        pass

    def measure() -> None:
        for part in ("backbone", "replicas"):
            with clock(part):
                if part == "replicas" and losses:
                    raise losses.pop()

    clock.twice(measure)
    again = "again, since a process was lost in replicas: it crashed"
    begun = ["backbone (2 of 8)", "replicas (3 of 8)"]
    assert told == ["devices (1 of 8)", *begun, again, *begun], "parts keep their numbers"
    lost = "a process was lost while replicas was measured (it crashed); what it measured was measured again"
    assert clock.lost == [lost]
    assert list(clock.seconds) == ["devices", "backbone", "replicas"]
    losses += [ProfilerLost("it crashed again"), ProfilerLost("it crashed")]
    twice = r"twice, now in replicas \(first: it crashed; then: it crashed again\); .* measure smaller microbatches"
    with pytest.raises(ResourceError, match=twice):
        clock.twice(measure)


def test_other_errors_end_a_measurement_at_once() -> None:
    clock, runs = _Clock(None), list[int]()

    def measure() -> None:
        runs.append(1)
        raise DataError("no rows")

    with pytest.raises(DataError, match="no rows"):
        clock.twice(measure)
    assert len(runs) == 1 and not clock.lost
