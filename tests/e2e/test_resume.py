"""Killed, stopped and resumed runs end as the undisturbed run does, to the bit, and leave nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder, Work
from flowtrain.actors.feeder import NAME as FEEDER
from flowtrain.actors.feeder import Feeder
from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.pooling import PoolMember
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.config.run import RunConfig
from flowtrain.controller.crew import ActorClasses
from flowtrain.controller.run import run_training
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.types import EVAL_POSITION_BASE, FeedReport, PartReady, Rejection, SampleRef, Unit
from tests.e2e.processes import Driver, driver
from tests.e2e.worlds import World, tiny_config

pytestmark = pytest.mark.e2e

NUM_STEPS = 24
BF16_STEPS = 10
BATCH = 8
NUM_ROWS = 120  # so that the run begins a second epoch
TRUNCATED_ROWS = (7, 50, 93)
OVERSIZED_ROWS = (12, 71)
NUM_EVAL = 6
EVERY_EVAL, EVERY_CHECKPOINT = 3, 2
EXIT_STOPPED = 130

EXACT = ("step", "loss", "grad_norm", "lr", "eval_loss", "num_samples", "num_tokens", "num_target_tokens")
"""What must be equal to the last bit; the other keys tell times."""


# --- worlds and runs -----------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the data that the runs of this file train on."""
    directory = tmp_path_factory.mktemp("resume")
    spoiled_world().write(directory / "train.parquet")
    eval_world().write(directory / "eval.parquet")
    return directory


def config_of(world: Path, name: str, *overrides: str) -> RunConfig:
    """The run that is disturbed in many ways, under a name of its own."""
    evaluation = {"path": str(world / "eval.parquet"), "every_steps": EVERY_EVAL, "max_samples": NUM_EVAL}
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


@pytest.fixture(scope="module")
def undisturbed(world: Path) -> RunDir:
    """The run as it goes when nothing happens."""
    return run_undisturbed(config_of(world, "undisturbed"), world / "undisturbed.log")


# --- what is compared ----------------------------------------------------------------------------------------------


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def exact_metrics(run: RunDir) -> list[dict[str, Any]]:
    """What a run computed, step by step."""
    return [{key: line[key] for key in EXACT} for line in json_lines(run.metrics)]


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


def test_the_undisturbed_run_meets_what_the_others_are_compared_in(undisturbed: RunDir) -> None:
    check_same_end(undisturbed, undisturbed)
    ledger = read_ledger(undisturbed.ledger).to_pylist()
    assert {row["row"] for row in ledger if row["state"] == "rejected"} == {*TRUNCATED_ROWS, *OVERSIZED_ROWS}
    assert {row["epoch"] for row in ledger} == {0, 1}
    losses = [line["loss"] for line in exact_metrics(undisturbed)]
    assert losses[-1] < losses[0] and len(set(losses)) == NUM_STEPS


# --- disturbances --------------------------------------------------------------------------------------------------


def kill_at_a_random_moment(victim: Driver, rng: random.Random) -> None:
    """SIGKILL some time after a few more steps."""
    enough = victim.num_steps + rng.randint(2, 4)
    victim.wait_until(lambda: victim.num_steps >= enough, "a few steps")
    time.sleep(rng.uniform(0.0, 0.2))
    victim.signal_group(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, victim.report("it had ended before it was killed")


def kill_in_a_checkpoint(victim: Driver) -> None:
    """SIGKILL while a checkpoint is written, which then stays unfinished."""
    victim.wait_until(lambda: bool(victim.unfinished_checkpoints()), "a checkpoint")
    victim.signal_group(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, victim.report("it had ended before it was killed")
    assert victim.unfinished_checkpoints(), victim.report("the checkpoint was complete before the kill")


def interrupt(victim: Driver) -> None:
    """Ctrl-C; the run ends by itself with a checkpoint of its last step."""
    first = victim.num_steps
    victim.wait_until(lambda: victim.num_steps >= first + 1, "a step")
    victim.signal_group(signal.SIGINT)
    assert victim.wait() == EXIT_STOPPED, victim.report("an interrupted run ends with 130")
    assert 0 < victim.num_steps < NUM_STEPS, victim.report("it was to be stopped on its way")
    assert victim.unfinished_checkpoints() == []
    last = max(path.name for path in victim.run.checkpoints.iterdir())
    assert last == f"step-{victim.num_steps:08d}", victim.report("no checkpoint of the last step")


def test_killed_and_stopped_runs_end_as_the_undisturbed_one(world: Path, undisturbed: RunDir) -> None:
    config = config_of(world, "disturbed")
    rng = random.Random(11)
    with driver(config, world / "killed.log") as first:
        kill_at_a_random_moment(first, rng)
        # Resumed at once, while actors of the killed run may still be on their way out.
        with driver(config, world / "killed-in-checkpoint.log", "--resume") as second:
            kill_in_a_checkpoint(second)
            first.check_nothing_is_left()
            with driver(config, world / "interrupted.log", "--resume") as third:
                interrupt(third)
                second.check_nothing_is_left()
                third.check_nothing_is_left()
    with driver(config, world / "resumed.log", "--resume") as last:
        assert last.wait() == 0, last.report("the resumed run failed")
        last.check_nothing_is_left()
    check_same_end(last.run, undisturbed)


def test_a_run_is_interrupted_while_it_starts(world: Path) -> None:
    config = config_of(world, "early")
    with driver(config, world / "early.log") as early:
        early.wait_until(lambda: len(early.session()) > 1, "the start of Ray")
        early.signal_group(signal.SIGINT)
        assert early.wait() == EXIT_STOPPED, early.report("an interrupted run ends with 130")
        early.check_nothing_is_left()
        assert early.num_steps == 0


def test_a_killed_bf16_run_ends_as_the_undisturbed_one(world: Path, ray_cluster: None) -> None:
    undisturbed = bf16_config(world, "bf16-undisturbed")
    run_training(undisturbed)
    config = bf16_config(world, "bf16")
    with driver(config, world / "bf16-killed.log") as killed:
        kill_at_a_random_moment(killed, random.Random(5))
        with driver(config, world / "bf16-resumed.log", "--resume") as resumed:
            assert resumed.wait() == 0, resumed.report("the resumed run failed")
        killed.check_nothing_is_left()
    check_same_end(run_dir(config), run_dir(undisturbed), BF16_STEPS)


# --- producers that die --------------------------------------------------------------------------------------------

FIRST_GATE, SECOND_GATE, THIRD_GATE = 4, 5, 12
"""Units that the backbone does not begin before certain things have happened to the producers."""
LATER = 4 * BATCH
"""First position of unit 5 (there is an evaluation behind step 3): no rank has begun it at the first gate."""
PATIENCE_S = 150.0


def note(config: RunConfig, name: str, deed: str, positions: Sequence[int] = ()) -> None:
    """Write down what this process did."""
    record = {"name": name, "pid": os.getpid(), "deed": deed, "positions": list(positions)}
    with (Path(config.runs_dir) / f"{config.name}.deeds").open("a") as file:
        file.write(json.dumps(record) + "\n")


def deeds(config: RunConfig, name: str, deed: str) -> list[dict[str, Any]]:
    """What the processes of a name did, in order."""
    path = Path(config.runs_dir) / f"{config.name}.deeds"
    records = json_lines(path) if path.exists() else []
    return [record for record in records if (record["name"], record["deed"]) == (name, deed)]


def positions_of(records: Iterable[dict[str, Any]]) -> set[int]:
    return {position for record in records for position in record["positions"]}


def die(config: RunConfig, name: str, holding: Sequence[int] = ()) -> None:
    note(config, name, "die", holding)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE_S:g} s"
        time.sleep(0.02)


def ready_for_later(config: RunConfig, pid: int) -> set[int]:
    """Positions behind the first gate whose images an encoder-0 has handed in."""
    mine = positions_of(record for record in deeds(config, "encoder-0", "hand in") if record["pid"] == pid)
    return {position for position in mine if LATER <= position < EVAL_POSITION_BASE}


def is_made_again(config: RunConfig) -> bool:
    """Whether all that encoder-0 lost at its first death was encoded by somebody else, and lost text was made again."""
    death = deeds(config, "encoder-0", "die")[0]
    by_others = positions_of(
        record
        for name in ("encoder-0", "encoder-1")
        for record in deeds(config, name, "encode")
        if record["pid"] != death["pid"]
    )
    text = positions_of(deeds(config, FEEDER, "remake"))
    return {*death["positions"], *ready_for_later(config, death["pid"])} <= by_others and max(text, default=0) >= LATER


class DyingEncoder(Encoder):
    """encoder-0 dies with parts in its segment and a batch on its hands, then as it starts again; its third life lasts.

    encoder-1 stands back until the first death, so that there is work for encoder-0.
    """

    def run(self, link: CoordinatorLink) -> None:
        note(self._config, self._name, "live")
        if self._name == "encoder-0" and len(deeds(self._config, self._name, "live")) == 2:
            die(self._config, self._name)
        super().run(link)

    def encode(self, work: Work) -> dict[int, torch.Tensor]:
        if work.lease.batch.unit > FIRST_GATE:
            if self._name == "encoder-1":
                wait_for(lambda: bool(deeds(self._config, "encoder-0", "die")), "the death of encoder-0")
            elif not deeds(self._config, self._name, "die") and ready_for_later(self._config, os.getpid()):
                die(self._config, self._name, work.lease.needed)
        note(self._config, self._name, "encode", work.lease.needed)
        return super().encode(work)

    def _hand_in(self, member: PoolMember, ready: Sequence[PartReady], rejections: tuple[Rejection, ...]) -> None:
        super()._hand_in(member, ready, rejections)
        note(self._config, self._name, "hand in", [part.position for part in ready])


class DyingFeeder(Feeder):
    """Dies once with a unit sized and put, but not reported; the text of those before lies in its segment."""

    def _size(self, member: PoolMember, unit: Unit, remade: tuple[PartReady, ...]) -> FeedReport:
        report = super()._size(member, unit, remade)
        if unit.index > SECOND_GATE and not deeds(self._config, FEEDER, "die"):
            die(self._config, FEEDER)
        return report

    def _remake(self, member: PoolMember, ref: SampleRef) -> PartReady:
        note(self._config, FEEDER, "remake", [ref.position])
        return super()._remake(member, ref)


class WaitingRank(BackboneRank):
    """Holds units back until the producers have died as they are to, and what they lost is there again."""

    _num_begun = 0

    def _run_unit(self, prefetcher: Prefetcher, checkpoint_dir: str) -> int:
        gates: dict[int, tuple[Callable[[], bool], str]] = {
            FIRST_GATE: (lambda: bool(deeds(self._config, "encoder-0", "die")), "the death of encoder-0"),
            SECOND_GATE: (lambda: is_made_again(self._config), "making the lost parts again"),
            THIRD_GATE: (lambda: len(deeds(self._config, "encoder-0", "live")) == 3, "the third life of encoder-0"),
        }
        if self._num_begun in gates:
            wait_for(*gates[self._num_begun])
        self._num_begun += 1
        return super()._run_unit(prefetcher, checkpoint_dir)


def test_a_run_outlives_its_producers(world: Path, undisturbed: RunDir, ray_cluster: None) -> None:
    config = config_of(
        world, "bereaved", "limits.max_encoder_restarts=2"
    )  # so a death that counts twice is one too many
    run_training(config, classes=ActorClasses(feeder=DyingFeeder, encoder=DyingEncoder, backbone=WaitingRank))
    check_same_end(run_dir(config), undisturbed)

    assert len({deed["pid"] for deed in deeds(config, "encoder-0", "live")}) == 3
    first_death = deeds(config, "encoder-0", "die")[0]
    assert first_death["positions"], "it died with a batch on its hands"
    assert ready_for_later(config, first_death["pid"]), "it died with finished parts that nobody had read"
    assert len(deeds(config, FEEDER, "die")) == 1
