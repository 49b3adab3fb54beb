"""Through real actors and the real pool, training equals a plain Hugging Face loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flowtrain.actors.backbone import BackboneRank
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.observability.ledger import read_ledger
from flowtrain.training.checkpoint import load_backbone_state
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.trainer import Trainer
from tests.e2e.oracle import PlainLoop, relative_difference
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BATCH = 8
CORRUPT_ROW = 5
OVERSIZED_ROW = 12


class RecordingRank(BackboneRank):
    """Saves every step's full gradients, as they stand before clipping, beside the run's files."""

    def make_trainer(self, checkpoint: Path | None) -> Trainer:
        directory = Path(self._config.runs_dir) / "gradients"
        directory.mkdir(parents=True, exist_ok=True)
        step = 0

        def save(model: ModelChunks) -> None:
            nonlocal step
            step += 1
            gradients = {
                name: parameter.grad.full_tensor().clone() if parameter.grad is not None else torch.zeros(())
                for name, parameter in model.named_parameters()
            }
            if self._rank == 0:
                torch.save(gradients, directory / f"{step}.pt")

        return Trainer(
            self._config,
            self._family,
            self._group,
            self._num_steps,
            record=self._spans.add,
            before_optimizer=save,
            resume_from=checkpoint,
        )


def steps_of_every_kind(path: Path) -> Path:
    """Step 1 mixed with a corrupt image, 2 mixed with an oversized sample, 3 all text, 4 all images, 5 one image."""
    world = World()
    world.add_mixed(BATCH * 2)
    world.rows[CORRUPT_ROW]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    world.rows[OVERSIZED_ROW]["texts"] = [{"user": "why", "assistant": world.words(200, 200)}]
    for _ in range(BATCH):
        world.add(0)
    for _ in range(BATCH):
        world.add(1)
    world.add(1)
    for _ in range(BATCH - 1):
        world.add(0)
    return world.write(path)


@pytest.mark.parametrize(
    ("dp_size", "normalization", "optimizer", "tolerance"),
    [
        (1, "token", "adamw", 1e-4),
        pytest.param(2, "token", "sgd", 1e-5, marks=pytest.mark.nightly),
        (2, "sample", "adamw", 1e-4),
        pytest.param(1, "sample", "sgd", 1e-5, marks=pytest.mark.nightly),
        (3, "token", "sgd", 1e-5),  # does not divide the batch
    ],
)
def test_training_equals_a_plain_loop(
    tmp_path: Path, ray_cluster: None, dp_size: int, normalization: str, optimizer: str, tolerance: float
) -> None:
    config = tiny_config(
        tmp_path,
        steps_of_every_kind(tmp_path / "data.parquet"),
        f"oracle-{dp_size}-{normalization}",
        data={"shuffle": False},
        backbone={"data_parallel_size": dp_size},
        training={
            "max_steps": 5,
            "loss_normalization": normalization,
            "optimizer": optimizer,
            # Torch sums a norm in fp32, off by 3e-5 here, which SGD hands on to the weights: clipping goes with AdamW.
            "max_grad_norm": 0.0 if optimizer == "sgd" else 1.0,
            "learning_rate": 1e-3,  # below 2 / curvature: above it fp32 noise grows from step to step, in HF as well
        },
    )
    summary = run_training(config, classes=ActorClasses(backbone=RecordingRank))

    plain = PlainLoop(config, rejected_rows={CORRUPT_ROW})
    outcomes = [plain.step() for _ in range(5)]
    metrics = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    assert [step["loss"] for step in metrics] == pytest.approx([outcome.loss for outcome in outcomes], rel=1e-5)
    assert [step["grad_norm"] for step in metrics] == pytest.approx([o.gradient_norm() for o in outcomes], rel=1e-4)
    for step, outcome in enumerate(outcomes, start=1):
        ours = torch.load(Path(config.runs_dir) / "gradients" / f"{step}.pt", weights_only=True)
        assert ours.keys() == outcome.gradients.keys()
        for name, theirs in outcome.gradients.items():
            assert relative_difference(ours[name], theirs) < 1e-5, f"gradient of {name} in step {step}"

    assert summary.checkpoint is not None
    trained = load_backbone_state(summary.checkpoint)
    for name, theirs in plain.weights().items():
        assert relative_difference(trained[name], theirs) < tolerance, f"weight {name}"

    ledger = read_ledger(summary.directory / "ledger.parquet").to_pylist()
    assert [row["position"] for row in ledger] == list(range(5 * BATCH))
    rejected = [row["position"] for row in ledger if row["state"] == "rejected"]
    assert rejected == [CORRUPT_ROW, OVERSIZED_ROW]
    quarantined = [json.loads(line) for line in (summary.directory / "quarantine.jsonl").read_text().splitlines()]
    assert {row["row"]: row["reason"] for row in quarantined} == {
        CORRUPT_ROW: "corrupt_image",
        OVERSIZED_ROW: "oversized_sample",
    }
