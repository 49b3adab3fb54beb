"""On a cluster with token authentication: submitted, watched, stopped, resumed; and refused where it cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import ray
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus
from ray.util.placement_group import placement_group, remove_placement_group

from flowtrain.config.run import RunConfig
from flowtrain.controller import worker_group
from flowtrain.controller.run import run_training
from flowtrain.errors import ResourceError
from flowtrain.flow.flow import Flow
from flowtrain.observability.ledger import read_ledger
from flowtrain.observability.run_dir import RunDir
from tests.e2e.clusters import BIN, Cluster, cluster, fetch, json_lines, wait_until
from tests.e2e.worlds import ROOT, World, tiny_config

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
BATCH = 8
ACTORS = {"coordinator", "feeder-0", "encoder-0", "encoder-1", "backbone-dp0-pp0-tp0"}
METRICS = {
    "ray_flowtrain_num_steps",
    "ray_flowtrain_step",
    "ray_flowtrain_loss",
    "ray_flowtrain_tokens_per_second",
    "ray_flowtrain_starved_seconds",
    "ray_flowtrain_blocked_seconds",
    "ray_flowtrain_pool_used_bytes",
    "ray_flowtrain_last_step_timestamp_seconds",
    "ray_flowtrain_restarts_total",
}
START_LIMIT_S = 600.0


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


def quickstart(runs_dir: Path, name: str, max_steps: int, *more: str) -> list[str]:
    """The command that trains the quickstart for a few steps."""
    overrides = [f"name={name}", f"runs_dir={runs_dir}", f"training.max_steps={max_steps}"]
    overrides += [f"training.global_batch_size={BATCH}", "checkpoint.every_steps=15", *more]
    return [str(BIN / "flowtrain"), "train", str(QUICKSTART), *overrides]


def steps_of(run: RunDir) -> list[int]:
    return [line["step"] for line in json_lines(run.metrics)]


def check_complete(run: RunDir, num_steps: int) -> None:
    """Every step and every position once, and a checkpoint of the end."""
    assert steps_of(run) == list(range(1, num_steps + 1))
    ledger = read_ledger(run.ledger).to_pylist()
    assert [row["position"] for row in ledger] == list(range(num_steps * BATCH))
    assert max(path.name for path in run.checkpoints.iterdir()) == f"step-{num_steps:08d}"


# --- on a cluster of its own ---------------------------------------------------------------------------------------


def test_a_submitted_job_is_followed_and_seen_and_succeeds(own_cluster: Cluster, tmp_path: Path) -> None:
    num_steps = 40
    run = RunDir(tmp_path / "seen")
    seen: set[str | None] = set()
    gauges: dict[str, float] = {}
    with own_cluster.following("seen", quickstart(tmp_path, "seen", num_steps)) as job:

        def has_ended() -> bool:
            if not seen >= ACTORS:
                seen.update(own_cluster.actor_names("flowtrain-seen"))
            gauges.update(own_cluster.metrics())
            return not job.is_running

        wait_until(has_ended, START_LIMIT_S, lambda: job.report("the job does not end"))
        assert job.wait() == 0, job.report("the job failed")
        assert f"step 1/{num_steps} " in job.said and f"step {num_steps}/{num_steps} " in job.said, job.said
    assert own_cluster.jobs().get_job_status("seen") is JobStatus.SUCCEEDED
    assert seen >= ACTORS
    assert gauges.keys() >= METRICS
    # A gauge is read at some moment of the run.
    assert 0 < gauges["ray_flowtrain_step"] <= num_steps
    assert gauges["ray_flowtrain_loss"] > 0 and gauges["ray_flowtrain_tokens_per_second"] > 0
    check_complete(run, num_steps)
    assert all(path.is_file() for path in (run.config, run.plan, run.trace))
    assert not own_cluster.actor_names("flowtrain-seen") and not own_cluster.pool_segments()


def test_a_job_stopped_half_way_leaves_nothing_behind_and_resumes(own_cluster: Cluster, tmp_path: Path) -> None:
    num_steps = 24
    command = quickstart(tmp_path, "stopped", num_steps)
    run = RunDir(tmp_path / "stopped")
    # By default Ray kills after 3 s, in which a step and its checkpoint need not fit.
    with own_cluster.following("half-way", command, RAY_JOB_STOP_WAIT_TIME_S="60") as job:

        def trains() -> bool:
            assert job.is_running, job.report("the job ended early")
            return len(steps_of(run)) >= 3

        wait_until(trains, START_LIMIT_S, lambda: job.report("the job does not train"))
        assert own_cluster.pool_segments()
        own_cluster.jobs().stop_job("half-way")
        assert job.wait() == 0, job.report("to have stopped is no failure of ray job submit")
        assert "stopping after this step" in job.said
        stopped_at = len(steps_of(run))
        assert 3 <= stopped_at < num_steps, job.report("it was to be stopped on its way")
    assert own_cluster.jobs().get_job_status("half-way") is JobStatus.STOPPED
    check_complete(run, stopped_at)
    wait_until(
        lambda: not own_cluster.actor_names("flowtrain-stopped") and not own_cluster.pool_segments(),
        limit_s=20,
        problem=lambda: f"left behind: {own_cluster.actors()}, {own_cluster.pool_segments()}",
    )

    with own_cluster.following("resumed", [*command, "--resume"]) as job:
        assert job.wait() == 0, job.report("the job failed")
        assert f"after step {stopped_at} of {num_steps}" in job.said
    assert own_cluster.jobs().get_job_status("resumed") is JobStatus.SUCCEEDED
    check_complete(run, num_steps)


def test_a_refused_job_fails_with_its_exit_code_and_its_files_came_along(own_cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("nonsense: 1\n")
    command = [str(BIN / "flowtrain"), "train", "mine.yaml"]
    with own_cluster.following("nonsense", command, working_dir=tmp_path) as job:
        assert job.wait() == 1, job.report("exit code of ray job submit")
        assert "mine.yaml" in job.said and "nonsense" in job.said, job.said
    info = own_cluster.jobs().get_job_info("nonsense")
    assert info.status is JobStatus.FAILED and info.driver_exit_code == 2


def test_drivers_are_refused_that_ask_too_much_or_have_no_token(own_cluster: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    refused = {
        "too-large": (None, "CPU: 65 needed, 4 in the cluster"),
        "wrong-token": (wrong, "or it refuses this process's token"),
        "no-token": (tmp_path / "absent", "RAY_AUTH_TOKEN_PATH is set but file cannot be opened"),
    }
    with ExitStack() as stack:
        drivers = {}
        for name, (token_file, _) in refused.items():
            command = quickstart(tmp_path, name, 1, "backbone.num_cpus=64")
            environment = own_cluster.environment(token_file) | {"RAY_ADDRESS": own_cluster.address}
            drivers[name] = stack.enter_context(own_cluster.started(name, command, environment))
        for name, (_, reason) in refused.items():
            driver = drivers[name]
            assert driver.wait() == 1, driver.report(f"{name}: exit code")
            last = driver.said.splitlines()[-1]
            assert last.startswith("flowtrain: ") and reason in last, driver.report(f"{name}: message")
            assert not (tmp_path / name).exists(), f"{name}: a run was begun"


def test_the_dashboard_tells_nothing_without_the_token(own_cluster: Cluster) -> None:
    with pytest.raises(AuthenticationError, match="invalid or incorrect"):
        own_cluster.actors(token="0" * 64)
    for path in ("/api/jobs/", "/api/v0/actors", "/nodes?view=summary"):
        with pytest.raises(HTTPError) as refusal:
            fetch(own_cluster.url + path)
        assert refusal.value.code == 401


# --- on the Ray that the other tests share --------------------------------------------------------------------------


def small_run(tmp_path: Path, *overrides: str) -> RunConfig:
    world = World()
    world.add_mixed(8)
    return tiny_config(tmp_path, world.write(tmp_path / "data.parquet"), "refused", *overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["backbone.num_cpus=64"], r"CPU: 64\.2 needed, 4 in the cluster"),
        (
            ["backbone.num_cpus=3", "backbone.data_parallel_size=2", "encoders.vision.num_cpus=2"],
            r"CPU: 10 needed, 4 in the cluster",
        ),
        (
            ["encoders.vision.segment_nbytes=1000000000000", "pool.max_segment_nbytes=1000000000000"],
            r"segments: 2000\d{9} bytes needed, \d+ on the largest node",
        ),
    ],
)
def test_what_the_cluster_lacks_is_said_before_anything_starts(
    tmp_path: Path, ray_cluster: None, overrides: list[str], reason: str
) -> None:
    with pytest.raises(ResourceError, match=reason):
        run_training(small_run(tmp_path, *overrides))
    assert not (tmp_path / "runs").exists()


def test_a_placement_that_does_not_come_ends_with_the_reason(tmp_path: Path, ray_cluster: None) -> None:
    other_job = placement_group([{"CPU": 3}])
    assert other_job.wait(30)
    reason = r"within limits\.placement_timeout_s \(1 s\): 2\.2 CPU needed, 1 CPU free now; another job"
    try:
        with pytest.raises(ResourceError, match=reason):
            run_training(small_run(tmp_path, "backbone.num_cpus=2", "limits.placement_timeout_s=1"))
    finally:
        remove_placement_group(other_job)
    assert not (tmp_path / "runs").exists()
    wait_until(lambda: ray.available_resources().get("CPU") == 4, 20, lambda: f"held: {ray.available_resources()}")


class Namesake:
    """An actor with a coordinator's name."""


def test_a_second_run_of_the_same_name_is_refused(tmp_path: Path, ray_cluster: None) -> None:
    config = small_run(tmp_path)
    options = {"name": worker_group.COORDINATOR, "namespace": worker_group.namespace_of(config), "num_cpus": 0}
    remote: Any = ray.remote(Namesake)
    first = remote.options(**options).remote()

    def never() -> Flow:
        raise AssertionError

    try:
        with pytest.raises(ResourceError, match="'refused' is already running in this cluster"):
            worker_group.start_coordinator(config, worker_group.ActorClasses(), never)
    finally:
        ray.kill(first)
