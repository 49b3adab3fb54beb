"""Trackers of a real run: they hear everything, and bad ones change nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowtrain.controller.run import run_training
from flowtrain.observability import stream as stream_module
from flowtrain.observability.callback import Callback
from flowtrain.observability.run_dir import RunDir
from flowtrain.types.run_events import EvaluationFinished, RunEnded, RunEvent, RunStarted, StepFinished
from tests.e2e.clusters import json_lines
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

NUM_STEPS = 4


class Told(Callback):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []

    def on_run_start(self, event: RunStarted) -> None:
        self.events.append(event)

    def on_step(self, event: StepFinished) -> None:
        self.events.append(event)

    def on_evaluation(self, event: EvaluationFinished) -> None:
        self.events.append(event)

    def on_run_end(self, event: RunEnded) -> None:
        self.events.append(event)


class Raising(Callback):
    """Fails at once."""

    def on_run_start(self, event: RunStarted) -> None:
        raise RuntimeError("no such project")


class Sleeping(Callback):
    """Does not return from its first call."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def on_run_start(self, event: RunStarted) -> None:
        self._release.wait(600.0)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    """Two sources and a held-out set."""
    paths = []
    for seed, name in enumerate(("cats", "dogs", "held-out")):
        world = World(seed)
        world.add_mixed(24)
        paths.append(str(world.write(tmp_path / f"{name}.parquet")))
    cats, dogs, held_out = paths
    sources = [{"path": cats, "name": "cats"}, {"path": dogs, "name": "dogs", "weight": 2.0}]
    return {"data": {"sources": sources, "eval": {"path": held_out, "every_steps": 2, "max_samples": 8}}}


def figures(run: RunDir) -> list[dict[str, Any]]:
    """What of each step does not depend on time."""
    keys = ("step", "loss", "eval_loss", "grad_norm", "plan_digest", "num_tokens", "source_losses", "slot_imbalance")
    return [{key: line[key] for key in keys} for line in json_lines(run.metrics)]


def test_trackers_hear_everything_and_bad_ones_change_nothing(
    tmp_path: Path,
    ray_cluster: None,
    sections: dict[str, Any],
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_module, "FINISH_S", 5.0)
    source = Path(sections["data"]["sources"][0]["path"])
    configs = [tiny_config(tmp_path, source, name, **sections) for name in ("plain", "followed")]
    plain = RunDir(run_training(configs[0]).directory)
    told = Told()
    summary = run_training(configs[1], callbacks=[Raising(), Sleeping(release), told])
    followed = RunDir(summary.directory)
    assert summary.step == NUM_STEPS and figures(followed) == figures(plain)

    start, *between, end = told.events
    assert isinstance(start, RunStarted) and isinstance(end, RunEnded) and end.outcome == "done"
    assert start.roles == {"coordinator": 1, "feeder": 1, "encoder": 2, "backbone": 1}
    assert [type(event).__name__ for event in between] == [
        *("StepFinished", "StepFinished", "EvaluationFinished"),
        *("StepFinished", "StepFinished", "EvaluationFinished"),
    ]
    lines = json_lines(followed.events)
    kinds = [line["event"] for line in lines]
    assert kinds.count("run_started") == kinds.count("run_ended") == 1 and kinds.count("evaluation") == 2
    (checkpoint,) = (line for line in lines if line["event"] == "checkpoint")
    assert checkpoint["step"] == NUM_STEPS and checkpoint["nbytes"] > 0 and checkpoint["duration_s"] > 0
    assert kinds[-1] == "run_ended"
    (warning,) = (line["text"] for line in lines if line["event"] == "note" and "tracker Raising" in line["text"])
    assert "training goes on: RuntimeError: no such project (" in warning and "test_trackers.py:" in warning
    raising, sleeping = sorted(summary.trackers_off)
    assert raising.startswith("Raising was off from step 0 on: RuntimeError: no such project (")
    assert sleeping.startswith("Sleeping was off from step 0 on: it has not taken the last")


def test_a_step_has_what_flow_ranks_and_pool_know(tmp_path: Path, ray_cluster: None, sections: dict[str, Any]) -> None:
    source = Path(sections["data"]["sources"][0]["path"])
    run = RunDir(run_training(tiny_config(tmp_path, source, "known", **sections)).directory)
    lines = json_lines(run.metrics)
    assert {name for line in lines for name in line["source_losses"]} == {"cats", "dogs"}
    # Ranks read ahead, so bytes may count for an earlier step.
    read = sum(nbytes for line in lines for nbytes in line["read_nbytes_by_transport"].values())
    assert read > sum(line["read_nbytes"] for line in lines) > 0, "texts and encoded images too"
    for line in lines:
        losses = line["source_losses"].values()
        assert min(losses) <= line["loss"] * (1 + 1e-6) and line["loss"] <= max(losses) * (1 + 1e-6), "it is their mean"
        assert len(line["slot_imbalance"]) == line["num_microbatches"], "of one rank"
        assert 0 <= line["lookahead_steps"] <= 3
        assert (line["retries"], line["restarts"]) == (0, 0)
        places = {(use["role"], use["rank"], use["tier"]) for use in line["pool"]}
        assert places <= {("encoder", "0", "dram"), ("encoder", "1", "dram"), ("feeder", "0", "dram")}
        assert ("feeder", "0", "dram") in places
        assert sum(use["used_nbytes"] for use in line["pool"]) == line["pool_dram_nbytes"]
