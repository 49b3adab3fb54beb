"""A tiny run is profiled through Ray, and planned from the file that came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle
from typer.testing import CliRunner

from flowtrain import api
from flowtrain.cli.app import app
from flowtrain.config.yaml_text import dump_yaml
from flowtrain.controller import trials
from flowtrain.controller.profiling_actors import Profilers
from flowtrain.costs.profile import read_profile
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e


def lose_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first tensor parallel group lose a rank as it starts."""
    started, lost = Profilers.started, list[ActorHandle]()

    @contextmanager
    def losing(
        self: Profilers, ranks: Sequence[tuple[int, Degrees]], *, on_one: bool = False
    ) -> Iterator[list[ActorHandle]]:
        with started(self, ranks, on_one=on_one) as actors:
            if ranks[0][1].tp > 1 and not lost:
                lost.append(actors[1])
                ray.kill(actors[1])
            yield actors

    monkeypatch.setattr(Profilers, "started", losing)


def test_a_profile_is_measured_and_planned_from(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(trials, "MOST_TRIALS", 1)
    monkeypatch.setattr(trials, "NUM_STEPS", 2)
    lose_a_rank(monkeypatch)
    world = World(seed=7)
    world.add_mixed(32)
    layers = "encoders.vision.config.num_hidden_layers=3"  # one layer has no strategies, and two compute one
    config = tiny_config(tmp_path, world.write(tmp_path / "train.parquet"), "tiny", layers)
    path, saved = tmp_path / "tiny.yaml", tmp_path / "profile.json"
    path.write_text(dump_yaml(config.model_dump(mode="json")))

    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        app, ["profile", str(path), "--save", str(saved), "--devices", "2", "--trials"]
    )
    assert result.exit_code == 0, result.stderr
    assert "warning: the load average was 9.0 before measuring began" in result.stdout
    told = [line.removeprefix("measuring ") for line in result.stderr.splitlines() if line.startswith("measuring ")]
    parts = ["devices", "encoders.vision", "backbone", "interference", "replicas", "backbone, tp=2", "trials"]
    assert told[0] == "the data's sizes"
    for number, part in enumerate(parts, 2):
        assert f"{part} ({number} of 8)" in told
    assert "measuring again, since a process was lost in backbone, tp=2: " in result.stderr
    assert "warning: a process was lost while backbone, tp=2 was measured (" in result.stdout
    assert result.stdout.count("was lost") == result.stderr.count("was lost") == 1
    assert "2 x cpu" in result.stdout and "backbone, ms a microbatch, tp=2" in result.stdout
    profile = read_profile(saved)
    (trial,) = profile.trials
    assert trial.plan.mode == "decoupled" and trial.measured > 0 and "measured / predicted" in result.stdout
    assert not (Path(config.runs_dir) / config.name).exists(), "a trial leaves nothing"
    assert set(profile.layers) == set(profile.heads) == set(profile.connectors) == {1, 2}
    assert profile.layers[1].num_tokens[-1] == 4 * config.scheduler.microbatch_tokens, "which mode auto may choose"
    assert all(factor > 0 for factor in profile.interference["vision"].factors)
    assert set(profile.replicas) == {"full", "gradients"} and profile.host is not None and profile.host.sample_s > 0
    assert profile.steps.messages_s > 0 and "ms each to tell each other of a microbatch" in result.stdout
    assert profile.steps.launch_s > 0 and "at each end of a transfer" in result.stdout
    assert profile.known_facts.link is not None and profile.known_facts.devices_per_node == 4
    for tp, attention in profile.attention.items():
        assert attention.square_s >= 0 and len(attention.squares) == len(profile.layers[tp].num_tokens)
    words = {"none", "selective", "full", "offload"}
    backbone = profile.strategies
    assert set(backbone) == set(profile.encoder_strategies["vision"]) == words
    assert backbone["full"].kept_nbytes < backbone["selective"].kept_nbytes < backbone["none"].kept_nbytes

    result = CliRunner().invoke(app, ["plan", str(path), "--profile", str(saved), "--devices", "3", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["allocation"]["rate"] > 0
    with pytest.raises(ConfigError, match=r"--devices \(9\) is more than the 4 CPU cores"):
        api.profile(config, devices=9)
