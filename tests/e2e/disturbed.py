"""One run that tests disturb in many ways, and what must come out of it as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowtrain.config.run import RunConfig
from flowtrain.observability.files import read_json_lines
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir
from tests.e2e.processes import driver
from tests.e2e.worlds import World, tiny_config

NUM_STEPS = 24
BF16_STEPS = 10
BATCH = 8
NUM_ROWS = 120  # so that the run begins a second epoch
TRUNCATED_ROWS = (7, 50, 93)
OVERSIZED_ROWS = (12, 71)
NUM_EVAL, NUM_ANSWERED = 6, 3
EVERY_EVAL, EVERY_CHECKPOINT = 3, 2

EXACT = ("step", "loss", "grad_norm", "lr", "eval_loss", "num_samples", "num_tokens", "num_target_tokens")
"""What must be equal to the last bit; the other keys tell times."""


def spoiled_world() -> World:
    """Samples of every kind, some bad: a truncated image is found late, an oversized sample before planning."""
    world = World(seed=3)
    world.add_mixed(NUM_ROWS)
    for row in TRUNCATED_ROWS:
        world.rows[row]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    for row in OVERSIZED_ROWS:
        world.rows[row]["texts"] = [{"user": "why", "assistant": world.words(200, 200)}]
    return world


def eval_world() -> World:
    """Held-out samples, the second of them bad."""
    world = World(seed=4)
    world.add_mixed(NUM_EVAL)
    world.rows[1]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    return world


def config_of(world: Path, name: str, *overrides: str) -> RunConfig:
    """The run that is disturbed in many ways, under a name of its own."""
    evaluation = {"path": str(world / "eval.parquet"), "every_steps": EVERY_EVAL, "max_samples": NUM_EVAL}
    evaluation |= {"num_generated": NUM_ANSWERED, "max_new_tokens": 4}
    return tiny_config(
        world,
        world / "train.parquet",
        name,
        *overrides,
        data={"eval": evaluation},
        backbone={"data_parallel_size": 2},
        training={"max_steps": NUM_STEPS, "global_batch_size": BATCH, "lr_schedule": "cosine", "warmup_steps": 3},
        checkpoint={"every_steps": EVERY_CHECKPOINT},
    )


def bf16_config(world: Path, name: str) -> RunConfig:
    """A wider model in bfloat16 on one rank."""
    text = {"hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6}
    changes = [f"backbone.config.{key}={value}" for key, value in (text | {"head_dim": 64}).items()]
    return config_of(
        world,
        name,
        "model.dtype=bfloat16",
        f"training.max_steps={BF16_STEPS}",
        "backbone.data_parallel_size=1",
        "encoders.vision.data_parallel_size=1",
        *changes,
    )


def run_undisturbed(config: RunConfig, log: Path) -> RunDir:
    with driver(config, log) as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.report("the undisturbed run failed")
        undisturbed.check_nothing_is_left()
        return undisturbed.run


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, which somebody may be writing: a reader can see a part of the line that comes last."""
    return list(read_json_lines(path))


def exact_metrics(run: RunDir) -> list[dict[str, Any]]:
    """What a run computed, step by step."""
    return [{key: line[key] for key in EXACT} for line in json_lines(run.metrics)]


def answers(run: RunDir) -> dict[str, str]:
    """What the model answered, by file."""
    return {str(path.relative_to(run.root)): path.read_text() for path in run.generated.glob("*/*.jsonl")}


def quarantined(run: RunDir) -> list[tuple[Any, ...]]:
    keys = ("position", "source", "row", "epoch", "reason", "detail")
    return sorted(tuple(line[key] for key in keys) for line in json_lines(run.quarantine))


def check_same_end(run: RunDir, undisturbed: RunDir, num_steps: int = NUM_STEPS) -> None:
    """Same numbers to the bit, every position once and with the same end, every bad sample once, no rubbish."""
    metrics = exact_metrics(run)
    assert [line["step"] for line in metrics] == list(range(1, num_steps + 1))
    assert metrics == exact_metrics(undisturbed)
    assert [line["step"] for line in metrics if line["eval_loss"] is not None] == list(
        range(EVERY_EVAL, num_steps + 1, EVERY_EVAL)
    )
    assert len(answers(run)) == num_steps // EVERY_EVAL and answers(run) == answers(undisturbed)
    assert all([json.loads(line)["row"] for line in text.splitlines()] == [0, 2] for text in answers(run).values())
    for line in (json.loads(line) for text in answers(run).values() for line in text.splitlines()):
        assert line["prompt"] and all((run.root / name).is_file() for name in line["images"])

    ledger = read_ledger(run.ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(num_steps * BATCH))
    assert ledger == read_ledger(undisturbed.ledger).to_pylist()
    rejected = {row["row"] for row in ledger if row["state"] == "rejected"}
    assert {row["state"] for row in ledger} == {"consumed", "rejected"}

    bad = quarantined(run)
    assert bad == quarantined(undisturbed)
    assert {line[2] for line in bad if line[1] != "eval"} == rejected
    assert rejected <= {*TRUNCATED_ROWS, *OVERSIZED_ROWS}
    assert [line[2] for line in bad if line[1] == "eval"] == [1]

    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        f"step-{step:08d}" for step in (num_steps - EVERY_CHECKPOINT, num_steps)
    ]
