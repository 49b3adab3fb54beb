"""Backbones of several ranks train as one rank does, through actors, encoders and pool."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.reading import Fetched
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.export import export_run
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.errors import WorkerLostError
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import run_dir
from flowtrain.training.checkpoint_store import read_meta
from flowtrain.types.plan import StepPlan
from tests.e2e.disturbed import answers
from tests.e2e.oracle import relative_difference
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS, NUM_STEPS_RESUMED, CHECKPOINT_STEP = 6, 3, 5, 2
CORRUPT_ROW, NUM_EVAL = 4, 3
NUM_LAYERS, NUM_HEADS = 8, 12
"""Enough for four pipeline ranks of two chunks each, and heads for tensor groups."""

Shape = tuple[int, int, int]
HYBRID = ("backbone.sharding=hybrid", "backbone.hybrid_shard_size=2", "backbone.gradient_reduction=microbatch")
CASES: list[tuple[Shape, int, tuple[str, ...]]] = [
    ((4, 1, 1), 1, HYBRID),
    ((2, 2, 1), 1, ()),
    ((2, 1, 2), 1, ()),
    ((1, 4, 1), 2, ()),
]
"""Shapes and chunks of a rank, and further settings.

Every axis and pair of axes but (1, 2, 2), which runs interleaved by arrival below. `tests/training/test_parallel.py`
holds all shapes of up to four ranks, interleaved ones too, to a plain loop, and `test_combinations.py` the settings.
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data whose steps take different numbers of microbatches, and have one image that cannot be decoded."""
    directory = tmp_path_factory.mktemp("shapes")
    world = World(seed=3)
    for step in range(NUM_STEPS_RESUMED):
        for index in range(BATCH):
            long = step % 2 and index < 4
            world.add((1, 0, 2, 1)[index % 4], answer=world.words(60, 70) if long else None)
    world.rows[CORRUPT_ROW]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    world.write(directory / "data.parquet")
    held_out = World(seed=4)
    held_out.add_mixed(NUM_EVAL)
    held_out.write(directory / "eval.parquet")
    return directory


def config_of(directory: Path, name: str, shape: Shape, chunks: int = 1, num_steps: int = NUM_STEPS) -> RunConfig:
    data_parallel, pipeline_parallel, tensor_parallel = shape
    evaluation = {"path": str(directory / "eval.parquet"), "every_steps": 2, "num_generated": 2, "max_new_tokens": 4}
    config = tiny_config(
        directory,
        directory / "data.parquet",
        name,
        data={"shuffle": False, "eval": evaluation},
        training={"global_batch_size": BATCH, "max_steps": num_steps, "optimizer": "sgd"},
        backbone={
            "data_parallel_size": data_parallel,
            "pipeline_parallel_size": pipeline_parallel,
            "tensor_parallel_size": tensor_parallel,
        },
        pipeline={"schedule": "1f1b" if chunks == 1 else "interleaved_1f1b", "chunks": chunks},
    )
    heads = [f"backbone.config.{key}={NUM_HEADS}" for key in ("num_attention_heads", "num_key_value_heads")]
    return override_config(
        config,
        [
            *heads,
            "backbone.config.head_dim=8",
            f"backbone.config.num_hidden_layers={NUM_LAYERS}",
            "encoders.vision.data_parallel_size=1",
        ],
    )


def metrics_of(config: RunConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in run_dir(config).metrics.read_text().splitlines()]


def check_same(config: RunConfig, reference: list[dict[str, float]]) -> None:
    """Losses, gradient norms and totals of every step are those of one rank, held-out losses too."""
    metrics = metrics_of(config)
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = [line[key] for line in reference[: len(metrics)]]
        assert [line[key] for line in metrics] == pytest.approx(expected, rel=tolerance), key
    for line, other in zip(metrics, reference, strict=False):
        assert line["eval_loss"] == (other["eval_loss"] and pytest.approx(other["eval_loss"], rel=1e-5))
    for key in ("num_samples", "num_tokens", "num_target_tokens", "rejected"):
        assert [line[key] for line in metrics] == [line[key] for line in reference[: len(metrics)]]
    ledger = read_ledger(run_dir(config).ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(len(metrics) * BATCH))
    assert [row["row"] for row in ledger if row["state"] == "rejected"] == [CORRUPT_ROW]


@pytest.fixture(scope="module")
def alone(directory: Path, ray_cluster: None) -> RunConfig:
    """The run of one rank."""
    config = config_of(directory, "alone", (1, 1, 1), num_steps=NUM_STEPS_RESUMED)
    run_training(config)
    counts = [line["num_microbatches"] for line in metrics_of(config)]
    assert len(set(counts[:NUM_STEPS])) > 1, "steps differ in their number of microbatches"
    return config


@pytest.mark.parametrize(
    ("shape", "chunks", "overrides"), CASES, ids=lambda value: str(value).strip("()").replace(", ", "x")
)
def test_a_shape_trains_as_one_rank_does(
    directory: Path, alone: RunConfig, shape: Shape, chunks: int, overrides: tuple[str, ...]
) -> None:
    config = config_of(directory, f"shape-{'-'.join(map(str, shape))}-{chunks}", shape, chunks)
    checkpoint = run_training(override_config(config, overrides)).checkpoint
    check_same(config, metrics_of(alone))
    first = {name: text for name, text in answers(run_dir(alone)).items() if name.startswith("generated/2/")}
    assert answers(run_dir(config)) == first != {}
    assert checkpoint is not None
    assert read_meta(checkpoint).gradient_reduction == ("microbatch" if overrides else "step"), "as decided"


class DyingRank(BackboneRank):
    """The last stage dies in the step behind the checkpoint."""

    def _ran(self, plan: StepPlan, fetched: Fetched) -> None:
        if self._pp_rank and plan.unit.step > CHECKPOINT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._ran(plan, fetched)


def test_a_run_that_lost_a_rank_goes_on_under_another_shape(directory: Path, alone: RunConfig) -> None:
    every = [f"checkpoint.every_steps={CHECKPOINT_STEP}", "limits.max_backbone_restarts=0"]
    config = override_config(config_of(directory, "resumed", (1, 2, 1), num_steps=NUM_STEPS_RESUMED), every)
    with pytest.raises(WorkerLostError, match=r"^backbone-dp0-pp1-tp0 died .* --resume"):
        run_training(config, classes=ActorClasses(backbone=DyingRank))
    config = override_config(config_of(directory, "resumed", (2, 1, 2), num_steps=NUM_STEPS_RESUMED), every)
    run_training(config, resume=True)
    assert len(metrics_of(config)) == NUM_STEPS_RESUMED
    check_same(config, metrics_of(alone))
    assert answers(run_dir(config)) == answers(run_dir(alone)) != {}
    ours, theirs = (export_run(run_dir(each).root).directory for each in (config, alone))
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    weights = [load_file(path / "model.safetensors") for path in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, expected in weights[1].items():
        assert relative_difference(weights[0][name], expected) < 1e-5, name


def test_by_arrival_the_ranks_of_a_replica_run_the_same_microbatches(directory: Path, ray_cluster: None) -> None:
    """Others would differ in shape, and the transfers between stages hang or fail."""
    config = config_of(directory, "by-arrival", (1, 2, 2), chunks=2)
    config = override_config(config, ["data.order=arrival", "encoders.vision.max_batch_patches=4"])
    run_training(config)
    metrics = metrics_of(config)
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    ledger = read_ledger(run_dir(config).ledger).to_pylist()
    assert sorted(row["position"] for row in ledger) == list(range(NUM_STEPS * BATCH))
    assert sum(line["num_samples"] for line in metrics) == NUM_STEPS * BATCH - 1
