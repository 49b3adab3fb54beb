"""Every policy of a pipeline trains what a plain loop trains, as predicted, and goes on after a kill to the bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.prefetch import Fetched
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.predict import planner_of, run_workload, sized_units
from flowtrain.controller.prepare import prepare
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.errors import WorkerLostError
from flowtrain.observability.run_dir import run_dir
from flowtrain.types.plan import StepPlan
from tests.e2e.disturbed import exact_metrics, json_lines
from tests.e2e.oracle import PlainLoop
from tests.e2e.worlds import World, tiny_config
from tests.profiles import write_cpu_profile

pytestmark = pytest.mark.e2e

BATCH, NUM_STEPS, CHECKPOINT_STEP = 12, 4, 2
POLICIES = ("none", "balanced", "pipetune")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policies")
    world = World(seed=5)
    world.add_mixed(BATCH * NUM_STEPS)
    world.write(directory / "data.parquet")
    write_cpu_profile(directory / "profile.json", config_of(directory, "none"), image_s=1e-4)
    return directory


def config_of(directory: Path, policy: str, name: str = "", *overrides: str) -> RunConfig:
    config = tiny_config(
        directory,
        directory / "data.parquet",
        name or policy,
        data={"shuffle": False},
        training={"global_batch_size": BATCH, "max_steps": NUM_STEPS, "optimizer": "sgd"},
        checkpoint={"every_steps": CHECKPOINT_STEP, "background": False},
    )
    # Both ranks take about as long, and the first one encodes.
    given = ["backbone.config.num_hidden_layers=3", "pipeline.partition=[2,1]", "backbone.pipeline_parallel_size=2"]
    given += ["mode=monolithic", f"pipeline.policy={policy}"]
    profile = [f"allocator.profile={directory / 'profile.json'}"] if policy == "pipetune" else []
    return override_config(config, [*given, *profile, *overrides])


class DyingRank(BackboneRank):
    """The last rank dies in the step after the checkpoint."""

    def _ran(self, plan: StepPlan, fetched: Fetched) -> None:
        if self._rank == self._degrees.world_size - 1 and plan.unit.step > CHECKPOINT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._ran(plan, fetched)


def test_policies_train_the_same_and_go_on_to_the_bit(directory: Path, ray_cluster: None) -> None:
    loop = PlainLoop(config_of(directory, "none", "plain"), set())
    expected = [(step.loss, step.gradient_norm()) for step in (loop.step() for _ in range(NUM_STEPS))]
    digests = {}
    for policy in POLICIES:
        config = config_of(directory, policy)
        assert run_training(config).step == NUM_STEPS
        metrics = json_lines(run_dir(config).metrics)
        assert [line["loss"] for line in metrics] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
        assert [line["grad_norm"] for line in metrics] == pytest.approx([norm for _, norm in expected], rel=1e-4)
        digests[policy] = [line["plan_digest"] for line in metrics]
        assert digests[policy] == [each.digest for each in run_workload(config).predictions], "as flowtrain pack shows"
    assert len({tuple(each) for each in digests.values()}) == len(POLICIES), "each plans otherwise"
    spec = prepare(config, check_pool=False)
    planner = planner_of(spec)
    plans = [planner.plan(sized.unit, sized.samples) for sized in sized_units(spec, NUM_STEPS)]
    assert any(plan.schedules for plan in plans), "images are encoded ahead"

    broken = config_of(directory, "pipetune", "broken", "limits.max_backbone_restarts=0")
    with pytest.raises(WorkerLostError, match=r"died .* --resume"):
        run_training(broken, classes=ActorClasses(backbone=DyingRank))
    assert run_training(config_of(directory, "pipetune", "broken"), resume=True).step == NUM_STEPS
    assert exact_metrics(run_dir(broken)) == exact_metrics(run_dir(config))
