"""Faults that a run survives, and those after which it must not go on as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.link import CoordinatorLink
from flowtrain.config.run import RunConfig
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.errors import ConfigError, NonFiniteError
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.trainer import Trainer
from tests.e2e.disturbed import json_lines
from tests.e2e.processes import driver
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    world = World()
    world.add_mixed(64)
    world.write(directory / "train.parquet")
    return directory


def config_of(data: Path, name: str, *overrides: str) -> RunConfig:
    return tiny_config(data, data / "train.parquet", name, *overrides)


def checkpoints_of(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


class HangingEncoder(Encoder):
    """encoder-1 does not return when all is done."""

    def run(self, link: CoordinatorLink) -> None:
        super().run(link)
        if self._name == "encoder-1":
            time.sleep(HOUR_S)


def test_an_encoder_that_hangs_after_the_last_step_is_a_warning(
    data: Path, ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(data, "hanging", "limits.stop_timeout_s=5")
    summary = run_training(config, classes=ActorClasses(encoder=HangingEncoder))
    assert summary.step == 4 and summary.checkpoint is not None and not summary.stopped
    assert checkpoints_of(run_dir(config)) == ["step-00000004"]
    assert "encoder-1 did not end within limits.stop_timeout_s" in capfd.readouterr().err


class SpoilingRank(BackboneRank):
    """The gradients of steps 5 and 6 are not finite."""

    _num_updates = 0

    def make_trainer(self, checkpoint: Path | None) -> Trainer:
        return Trainer(
            self._config,
            self._family,
            self._group,
            self._num_steps,
            record=self._spans.add,
            resume_from=checkpoint,
            before_optimizer=self._spoil,
        )

    def _spoil(self, model: ModelChunks) -> None:
        self._num_updates += 1
        if self._num_updates in (5, 6):
            for _, parameter in model.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.to_local().fill_(torch.inf)


def test_a_rewind_goes_back_to_the_checkpoint_on_all_ranks_and_the_data_goes_on(data: Path, ray_cluster: None) -> None:
    overrides = ["training.on_nonfinite=rewind", "training.max_skipped_steps=1", "training.max_steps=8"]
    config = config_of(data, "rewound", *overrides, "checkpoint.every_steps=3", "backbone.data_parallel_size=2")
    summary = run_training(config, classes=ActorClasses(backbone=SpoilingRank))
    assert summary.step == 8 and summary.num_skipped == 2
    lines = json_lines(run_dir(config).metrics)
    assert [line["step"] for line in lines if line["skipped"]] == [5, 6]
    assert [line["rewound_to"] for line in lines] == [None] * 5 + [3] + [None] * 2
    positions = read_ledger(run_dir(config).ledger)["position"].to_pylist()
    assert positions == list(range(8 * 8)), "no data is run twice"
    skipped = [(line["step"], line["position"]) for line in json_lines(run_dir(config).skipped)]
    assert sorted(skipped) == [(1 + position // 8, position) for position in range(4 * 8, 6 * 8)]
    # The checkpoint of step 6 waited for step 7, which was finite.
    assert checkpoints_of(run_dir(config)) == ["step-00000007", "step-00000008"]


def test_a_run_that_diverged_fails_and_keeps_its_last_healthy_checkpoint(data: Path, ray_cluster: None) -> None:
    config = config_of(data, "diverged", "training.max_steps=6", "checkpoint.every_steps=1", "checkpoint.keep=1")
    with pytest.raises(NonFiniteError, match=r"the run ends with 2 steps in a row.*step-00000004"):
        run_training(config, classes=ActorClasses(backbone=SpoilingRank))
    assert checkpoints_of(run_dir(config)) == ["step-00000004"]
    assert [line["skipped"] for line in json_lines(run_dir(config).metrics)] == [False] * 4 + [True] * 2


def test_a_resume_whose_metrics_were_cut_goes_on_from_the_older_checkpoint_or_not_at_all(
    data: Path, ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(data, "cut", "training.max_steps=4", "checkpoint.every_steps=2")
    run_training(config)
    run = run_dir(config)
    whole = run.metrics.read_text().splitlines(keepends=True)
    losses = [line["loss"] for line in json_lines(run.metrics)]
    run.metrics.write_text("".join(whole[:3]))
    summary = run_training(config, resume=True)
    assert summary.step == 4 and "step-00000004 is not used" in caplog.text
    lines = json_lines(run.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["loss"] for line in lines] == losses
    run.metrics.write_text("".join(whole[:1]))
    with pytest.raises(ConfigError, match=r"metrics.jsonl has the steps up to 1"):
        run_training(config, resume=True)


def can_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


def test_a_disk_that_is_full_for_a_while_costs_no_step(data: Path) -> None:
    if not can_mount():
        pytest.skip("mounting a small file system needs root")
    config = config_of(data, "full", "training.max_steps=100", f"runs_dir={data / 'small'}")
    (data / "small").mkdir()
    script = 'mount -t tmpfs -o size=48m tmpfs "$0" && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, str(data / "small"))
    with driver(config, data / "full.log", prefix=prefix) as disturbed:
        inside = Path(f"/proc/{disturbed.pid}/root") / run_dir(config).root.relative_to("/")
        disturbed.wait_until(lambda: (inside / "trace.json").exists(), "the run's files")
        fill(inside / "ballast")
        said = "metrics.jsonl cannot be written"
        disturbed.wait_until(lambda: said in disturbed.log.read_text(errors="replace"), "the warning")
        (inside / "ballast").unlink()
        disturbed.wait_until(lambda: "metrics.jsonl is written again" in disturbed.log.read_text(), "the recovery")
        metrics = inside / "metrics.jsonl"
        disturbed.wait_until(lambda: metrics.read_bytes().count(b"\n") >= 20, "more steps")
        assert [line["step"] for line in json_lines(metrics)][:20] == list(range(1, 21))
        assert disturbed.wait() == 0, disturbed.report("it failed")
    log = disturbed.log.read_text()
    assert "Traceback" not in log and log.count("metrics.jsonl cannot be written") == 1


def fill(path: Path) -> None:
    """Take all room of a file system."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\x00" * size)
            except OSError:
                continue
