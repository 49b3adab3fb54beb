"""Every mode trains what a plain loop trains, survives the same faults, and goes on after a kill to the bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.util import list_named_actors
from transformers import LlavaForConditionalGeneration

from flowtrain import api
from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder, Work
from flowtrain.actors.pooling import PoolMember
from flowtrain.actors.prefetch import Fetched
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.export import export_run
from flowtrain.controller.predict import run_workload
from flowtrain.controller.prepare import prepare
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.errors import ConfigError, WorkerLostError
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.training.memory_choice import predicted_peak_nbytes
from flowtrain.types.plan import Degrees, StepPlan
from tests.e2e.disturbed import answers, exact_metrics, json_lines
from tests.e2e.oracle import PlainLoop
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS, CHECKPOINT_STEP = 6, 4, 2
CORRUPT_ROW, NUM_EVAL = 4, 3
TEXT_STEP = 3
"""A step without images, which is also the one after the checkpoint."""

ANSWERED = {"num_generated": 2, "max_new_tokens": 4}

MODES: dict[str, tuple[str, ...]] = {
    "decoupled": (),
    "disaggregated": ("encoders.vision.data_parallel_size=2",),
    "colocated": ("backbone.data_parallel_size=2",),
    "monolithic": ("backbone.pipeline_parallel_size=2", "pipeline.encoder_layers=own"),
    "llm_only": (),
}
SEEING = [mode for mode in MODES if mode != "llm_only"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps with images and without, and one image that cannot be decoded."""
    directory = tmp_path_factory.mktemp("modes")
    world = World(seed=3)
    for step in range(1, NUM_STEPS + 1):
        for index in range(BATCH):
            world.add(0 if step == TEXT_STEP else (1, 0, 2, 1)[index % 4])
    world.rows[CORRUPT_ROW]["images"] = [{"bytes": world.truncated_image(), "path": None}]
    world.write(directory / "data.parquet")
    held_out = World(seed=4)
    held_out.add_mixed(NUM_EVAL)
    held_out.write(directory / "eval.parquet")
    return directory


def config_of(directory: Path, mode: str, name: str, *overrides: str) -> RunConfig:
    config = tiny_config(
        directory,
        directory / "data.parquet",
        name,
        data={"shuffle": False, "eval": {"path": str(directory / "eval.parquet"), "every_steps": 2, **ANSWERED}},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS, "optimizer": "sgd"},
        checkpoint={"every_steps": CHECKPOINT_STEP, "background": False},
    )
    given = [f"mode={mode}", "encoders.vision.data_parallel_size=1", "encoders.vision.config.num_hidden_layers=3"]
    return override_config(config, [*given, *MODES[mode], *overrides])


Run = Callable[[str], RunConfig]


@pytest.fixture(scope="module")
def whole(directory: Path, ray_cluster: None) -> Run:
    """The undisturbed run of a mode; it is run once."""
    done: dict[str, RunConfig] = {}

    def run(mode: str) -> RunConfig:
        if mode not in done:
            config = config_of(directory, mode, mode)
            assert run_training(config).step == NUM_STEPS
            done[mode] = config
        return done[mode]

    return run


@pytest.fixture(scope="module")
def oracle(directory: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of the plain loop."""
    loop = PlainLoop(config_of(directory, "decoupled", "plain"), {CORRUPT_ROW})
    steps = [loop.step() for _ in range(NUM_STEPS)]
    return [(step.loss, step.gradient_norm()) for step in steps]


def check_ledger(config: RunConfig, rejected: list[int]) -> None:
    ledger = read_ledger(run_dir(config).ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(NUM_STEPS * BATCH)), "each position once"
    assert [row["row"] for row in ledger if row["state"] == "rejected"] == rejected


@pytest.mark.parametrize("mode", SEEING)
def test_a_mode_trains_as_the_plain_loop_does(
    directory: Path, whole: Run, oracle: list[tuple[float, float]], mode: str
) -> None:
    config = whole(mode)
    metrics = json_lines(run_dir(config).metrics)
    assert [line["loss"] for line in metrics] == pytest.approx([loss for loss, _ in oracle], rel=1e-5)
    assert [line["grad_norm"] for line in metrics] == pytest.approx([norm for _, norm in oracle], rel=1e-4)
    evaluated = [line["eval_loss"] for line in json_lines(run_dir(whole("decoupled")).metrics)]
    for line, expected in zip(metrics, evaluated, strict=True):
        assert line["eval_loss"] == (expected and pytest.approx(expected, rel=1e-5))
    assert answers(run_dir(config)) == answers(run_dir(whole("decoupled"))) != {}
    assert [line["rejected"] for line in metrics][-1] == 1
    predicted = run_workload(config).predictions
    assert [line["plan_digest"] for line in metrics] == [each.digest for each in predicted], "as flowtrain pack shows"
    check_ledger(config, [CORRUPT_ROW])


SEARCHED = (
    "backbone.pipeline_parallel_size=2",
    "encoders.vision.trainable=true",
    "pipeline.encoder_layers=mixed",
    "pipeline.partition=balanced",
    "backbone.activation_checkpointing=adaptive",
)


def test_a_searched_partition_and_adaptive_recomputation_train_as_the_plain_loop_does(
    directory: Path, ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(directory, "monolithic", "searched", *SEARCHED, "data.eval=null")
    searched = prepare(config)
    assert searched.config.pipeline.counts is not None and len(searched.config.pipeline.counts) == 2
    peaks = [
        predicted_peak_nbytes(
            override_config(searched.config, [f"backbone.activation_checkpointing={word}"]),
            searched.model_spec,
            Degrees(pp=2),
            0,
            shard_size=1,
            on_cpu=True,
        )
        for word in ("full", "none")
    ]
    usable = f"backbone.usable_memory_nbytes={sum(peaks) // 2}"
    assert run_training(override_config(config, [usable])).step == NUM_STEPS
    loop = PlainLoop(config, {CORRUPT_ROW}, trains_encoder=True)
    metrics = json_lines(run_dir(config).metrics)
    assert [line["loss"] for line in metrics] == pytest.approx([loop.step().loss for _ in metrics], rel=1e-5)
    told = re.search(r"adaptive: recomputed are on (pp0: .*; pp1: .*)", capfd.readouterr().err)
    assert told is not None and " 0 of " not in told[1].partition(" and ")[0]


def test_without_images_a_run_has_the_same_tokens(whole: Run) -> None:
    config = whole("llm_only")
    check_ledger(config, [])
    ours, seeing = (json_lines(run_dir(each).metrics) for each in (config, whole("decoupled")))
    for key in ("num_samples", "num_tokens", "num_target_tokens"):
        same = [a[key] == b[key] for a, b in zip(ours, seeing, strict=True)]
        assert same == [False, True, True, True], f"{key}: only the image of step 1 that is corrupt differs"
    assert [line["plan_digest"] for line in ours] == [each.digest for each in run_workload(config).predictions]
    assert ours[TEXT_STEP - 1]["loss"] != seeing[TEXT_STEP - 1]["loss"], "steps before saw no image"


class DyingRank(BackboneRank):
    """The last rank dies in the step after the checkpoint."""

    signal = signal.SIGKILL

    def _ran(self, plan: StepPlan, fetched: Fetched) -> None:
        if self._rank == self._degrees.world_size - 1 and plan.unit.step > CHECKPOINT_STEP:
            os.kill(os.getpid(), self.signal)
        super()._ran(plan, fetched)


@pytest.fixture(scope="module")
def broken(directory: Path, ray_cluster: None) -> Callable[[str, str], RunDir]:
    """A copy, under a name of its own, of the run of a mode that lost a rank."""
    done: dict[str, RunDir] = {}

    def run(mode: str, name: str) -> RunDir:
        if mode not in done:
            config = config_of(directory, mode, f"broken-{mode}", "limits.max_backbone_restarts=0")
            with pytest.raises(WorkerLostError, match=r"^backbone-dp\d-pp\d-tp0 died .* --resume"):
                run_training(config, classes=ActorClasses(backbone=DyingRank))
            done[mode] = run_dir(config)
        return RunDir(shutil.copytree(done[mode].root, done[mode].root.with_name(name)))

    return run


def nightly_but(mode: str) -> list[Any]:
    """Parameters for all modes, of which each run tries one."""
    return [mode, *(pytest.param(other, marks=pytest.mark.nightly) for other in MODES if other != mode)]


# Others disturb runs of mode decoupled in many ways (test_resume.py, test_shapes.py).
@pytest.mark.parametrize("mode", nightly_but("colocated"))
def test_a_run_that_lost_a_rank_goes_on_to_the_bit(
    directory: Path, whole: Run, broken: Callable[[str, str], RunDir], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = broken(mode, f"again-{mode}")
    assert [path.name for path in files.checkpoints.glob("step-*")] == [f"step-{CHECKPOINT_STEP:08d}"]
    config = config_of(directory, mode, f"again-{mode}")
    assert run_training(config, resume=True).step == NUM_STEPS
    assert exact_metrics(files) == exact_metrics(run_dir(whole(mode)))
    assert answers(files) == answers(run_dir(whole(mode))) != {}
    assert "losses agree only closely" not in caplog.text
    check_ledger(config, [] if mode == "llm_only" else [CORRUPT_ROW])


class DyingOnceRank(DyingRank):
    """So does this one, once."""

    def _ran(self, plan: StepPlan, fetched: Fetched) -> None:
        mark = Path(self._config.runs_dir) / f"{self._config.name}.died"
        if mark.exists():
            BackboneRank._ran(self, plan, fetched)
            return
        if self._rank == self._degrees.world_size - 1 and plan.unit.step > CHECKPOINT_STEP:
            mark.touch()
        super()._ran(plan, fetched)


@pytest.mark.parametrize("mode", nightly_but("decoupled"))
def test_a_run_that_lost_a_rank_starts_the_backbone_again_to_the_bit(directory: Path, whole: Run, mode: str) -> None:
    config = config_of(directory, mode, f"gang-{mode}")
    assert run_training(config, classes=ActorClasses(backbone=DyingOnceRank)).step == NUM_STEPS
    files = run_dir(config)
    assert exact_metrics(files) == exact_metrics(run_dir(whole(mode)))
    assert answers(files) == answers(run_dir(whole(mode))) != {}
    check_ledger(config, [] if mode == "llm_only" else [CORRUPT_ROW])
    told = [line for line in json_lines(files.events) if line["event"] == "restart"]
    assert [line["role"] for line in told] == ["backbone"] and told[0]["down_s"] > 0


def test_a_lost_rank_costs_no_step_that_a_snapshot_has(
    directory: Path, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        *(directory, "colocated", "snapshots", "checkpoint.every_steps=100", "checkpoint.snapshot_every_steps=2"),
        "checkpoint.background=false",  # so the snapshot is complete before the next step
    )
    assert run_training(config, classes=ActorClasses(backbone=DyingOnceRank)).step == NUM_STEPS
    files = run_dir(config)
    assert exact_metrics(files) == exact_metrics(run_dir(whole("colocated")))
    assert answers(files) == answers(run_dir(whole("colocated"))) != {}
    check_ledger(config, [CORRUPT_ROW])
    told = [line for line in json_lines(files.events) if line["event"] == "restart"]
    assert [(line["role"], line["steps_again"]) for line in told] == [("backbone", 0)]
    assert "from the snapshot of step 2 in its nodes' memory: step 3 is next" in capfd.readouterr().err
    assert [path.name for path in files.checkpoints.glob("step-*")] == [f"step-{NUM_STEPS:08d}"]
    assert not [each for each in list_named_actors(all_namespaces=True) if each["namespace"] == "flowtrain-snapshots"]


class HangingOnceRank(DyingOnceRank):
    """The last rank is stopped instead; it answers nobody."""

    signal = signal.SIGSTOP


def test_a_rank_that_hangs_is_named_and_costs_no_step(
    directory: Path, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(directory, "colocated", "hanging-rank", "limits.collective_timeout_s=20")
    assert run_training(config, classes=ActorClasses(backbone=HangingOnceRank)).step == NUM_STEPS
    files = run_dir(config)
    assert exact_metrics(files) == exact_metrics(run_dir(whole("colocated")))
    said = capfd.readouterr().err
    assert "backbone-dp1-pp0-tp0 hangs (it has not answered for" in said
    (stacks,) = files.stacks.glob("*/*.txt")
    assert stacks.name == "backbone-dp0-pp0-tp0.txt" and "Thread" in stacks.read_text()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("decoupled", "monolithic", "with mode decoupled, now monolithic: losses agree only closely"),
        pytest.param(
            *("monolithic", "colocated", "with mode monolithic, now colocated: losses agree only closely"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("colocated", "disaggregated", "in mode colocated, now disaggregated: losses stay the same"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_resume_in_another_mode_goes_on_with_a_warning(
    directory: Path,
    broken: Callable[[str, str], RunDir],
    oracle: list[tuple[float, float]],
    before: str,
    after: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = broken(before, f"{before}-{after}")
    config = config_of(directory, after, f"{before}-{after}")
    assert run_training(config, resume=True).step == NUM_STEPS
    assert said in caplog.text
    assert [line["loss"] for line in json_lines(files.metrics)] == pytest.approx([loss for loss, _ in oracle], rel=1e-5)
    check_ledger(config, [CORRUPT_ROW])


class DyingEncoder(Encoder):
    """The first process of encoder-0 dies when it has encoded something."""

    def _finish(self, member: PoolMember, work: Work) -> None:
        mark = Path(self._config.runs_dir) / f"{self._config.name}.died"
        if self._name == "encoder-0" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super()._finish(member, work)


def test_an_encoder_that_dies_beside_its_rank_costs_no_sample(
    directory: Path, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(directory, "colocated", "dying-encoder")
    assert run_training(config, classes=ActorClasses(encoder=DyingEncoder)).step == NUM_STEPS
    assert "encoder-0 died (its process was killed, or crashed); it is started again" in capfd.readouterr().err
    assert exact_metrics(run_dir(config)) == exact_metrics(run_dir(whole("colocated")))
    check_ledger(config, [CORRUPT_ROW])


TOWER = "model.vision_tower."


@pytest.fixture(scope="module")
def trained(directory: Path, ray_cluster: None) -> RunConfig:
    """A run that trains the encoder too."""
    # Without clipping, since torch sums norms in float32, which would scale all of the plain loop's updates.
    overrides = ("encoders.vision.trainable=true", "training.max_grad_norm=0")
    config = config_of(directory, "monolithic", "trained", *overrides)
    run_training(config)
    return config


def test_a_trained_encoder_is_that_of_the_plain_loop_and_is_exported(trained: RunConfig) -> None:
    loop = PlainLoop(trained, {CORRUPT_ROW}, trains_encoder=True)
    first = {name: tensor.clone() for name, tensor in loop.model.state_dict().items() if name.startswith(TOWER)}
    steps = [loop.step() for _ in range(NUM_STEPS)]
    metrics = json_lines(run_dir(trained).metrics)
    assert [line["loss"] for line in metrics] == pytest.approx([step.loss for step in steps], rel=1e-5)
    norms = [step.gradient_norm() for step in steps]
    assert [line["grad_norm"] for line in metrics] == pytest.approx(norms, rel=1e-4)
    exported = export_run(run_dir(trained).root).directory
    model, info = LlavaForConditionalGeneration.from_pretrained(exported, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, theirs = model.state_dict(), loop.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        # Biases begin at zero, so that they show the gradients; that of a key projection is noise around zero.
        assert float((ours[name] - expected).norm()) < 1e-5 * max(float(expected.norm()), 1e-6), name
    changed = [name for name in first if not torch.equal(ours[name], first[name])]
    layers = {name.split(".layers.")[1].split(".")[0] for name in changed if ".layers." in name}
    assert layers == {"0", "1"}, "the last layer computes no feature"


@pytest.mark.parametrize("overrides", [("encoders.vision.trainable=false",), ("mode=colocated",)])
def test_a_trained_encoder_is_not_frozen_by_a_resume(trained: RunConfig, overrides: tuple[str, ...]) -> None:
    changes = ["training.max_steps=8", "encoders.vision.trainable=false", "pipeline.encoder_layers=first", *overrides]
    changes += ["backbone.pipeline_parallel_size=1"]
    with pytest.raises(ConfigError, match="encoders.vision.trainable was True, is now False"):
        api.train(trained, changes, resume=True)


def test_metrics_and_trace_speak_of_no_encoder_where_there_is_none(whole: Run) -> None:
    for mode in ("monolithic", "llm_only"):
        files = run_dir(whole(mode))
        events = json.loads(files.trace.read_text())
        records = events["traceEvents"] if isinstance(events, dict) else events
        names = {record["args"]["name"] for record in records if record.get("name") == "process_name"}
        assert names and not any(name.startswith("encoder") for name in names), names
        assert "encoder-" not in files.plan.read_text()
        assert all(line["blocked_s"] == 0.0 for line in json_lines(files.metrics))
