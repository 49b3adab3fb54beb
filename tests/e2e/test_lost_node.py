"""A node that is lost with all its processes: the run goes on with the rest of them, and takes a node that joins."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from shared.hosts import NoHosts
from shared.node_pair import NODE_CPUS, NodePair, node_pair

from flowtrain.config.run import RunConfig
from flowtrain.observability.run_dir import RunDir, run_dir
from tests.e2e.clusters import json_lines, wait_until
from tests.e2e.disturbed import exact_metrics, run_undisturbed
from tests.e2e.test_two_nodes import MOST_OF_A_NODE, RUN_LIMIT_S, spread_config, title_of, train

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]  # every wait has a limit of its own

NUM_STEPS = 40
LIMITS = ("limits.stop_timeout_s=30", "limits.coordinator_timeout_s=30")


@contextmanager
def nodes(count: int, head_cpus: int = NODE_CPUS) -> Iterator[NodePair]:
    try:
        with node_pair(count, head_cpus) as started:
            yield started
    except NoHosts as reason:
        pytest.skip(str(reason))


def lasting_config(directory: Path, name: str, *overrides: str) -> RunConfig:
    lasting = ("checkpoint.every_steps=10", f"training.max_steps={NUM_STEPS}")
    return spread_config(directory, name, *lasting, *LIMITS, *overrides)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same run on one node, with nothing lost."""
    directory = tmp_path_factory.mktemp("together")
    few = ("encoders.vision.num_cpus=0.1", "backbone.num_cpus=0.1")
    return run_undisturbed(lasting_config(directory, "together", *few), directory / "together.log")


def on_host(cluster: NodePair, number: int, role: str) -> list[int]:
    """Processes of a role on a host."""
    return [pid for pid in cluster.hosts[number].pids() if f"ray::{role}" in title_of(pid)]


def steps_done(run: RunDir, count: int, training: Future[tuple[int, str]]) -> None:
    wait_until(
        lambda: training.done() or len(json_lines(run.metrics)) >= count,
        RUN_LIMIT_S,
        lambda: f"step {count} is not done",
    )
    assert not training.done(), training.result()[1]


@contextmanager
def paused(cluster: NodePair, number: int, role: str) -> Iterator[None]:
    """Stop a role's processes on a host, so that the run does not end meanwhile."""
    pids = on_host(cluster, number, role)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def keeps_a_copy(cluster: NodePair, number: int) -> bool:
    """Whether a keeper on a host holds a snapshot."""
    opened = (os.readlink(fd) for pid in on_host(cluster, number, "SnapshotKeeper") for fd in open_files(pid))
    return any(name.startswith("/memfd:flowtrain-") for name in opened)


def open_files(pid: int) -> list[Path]:
    return [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]


def test_a_run_goes_on_without_a_node_of_encoders_and_takes_it_back(tmp_path: Path, together: RunDir) -> None:
    # Only the head has room for the rank, and beside it for one encoder.
    sizes = ("encoders.vision.num_cpus=1.5", "backbone.num_cpus=2.5")
    config = lasting_config(tmp_path, "encoders", "encoders.vision.data_parallel_size=2", *sizes)
    run = run_dir(config)
    with nodes(2, head_cpus=4) as cluster, ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, cluster, config)
        steps_done(run, 4, training)
        assert on_host(cluster, 0, "BackboneRank") and on_host(cluster, 1, "Encoder")
        cluster.lose(1)
        steps_done(run, 12, training)
        with paused(cluster, 0, "BackboneRank"):
            cluster.join(1, 2)
            wait_until(lambda: bool(on_host(cluster, 1, "Encoder")), RUN_LIMIT_S, lambda: "no encoder came back")
        code, said = training.result(RUN_LIMIT_S)
    assert code == 0, said
    assert exact_metrics(run) == exact_metrics(together)


@pytest.mark.parametrize("snapshots", [False, True])
def test_a_backbone_goes_on_when_a_node_takes_the_lost_ones_place(
    tmp_path: Path, together: RunDir, snapshots: bool
) -> None:
    # The head has room for neither.
    config = lasting_config(
        tmp_path,
        "rank",
        "encoders.vision.data_parallel_size=1",
        f"encoders.vision.num_cpus={MOST_OF_A_NODE}",
        f"backbone.num_cpus={MOST_OF_A_NODE}",
        *(["checkpoint.every_steps=100", "checkpoint.snapshot_every_steps=2"] if snapshots else []),
    )
    run = run_dir(config)
    with nodes(3, head_cpus=0) as cluster, ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, cluster, config)
        steps_done(run, 14, training)
        if not snapshots:  # its files are written while the steps after it go on
            wait_until(
                lambda: training.done() or bool(list(run.checkpoints.glob("step-*/meta.json"))),
                RUN_LIMIT_S,
                lambda: "no checkpoint is complete",
            )
        (lost,) = [number for number in (1, 2) if on_host(cluster, number, "BackboneRank")]
        with paused(cluster, lost, "BackboneRank"):
            if snapshots:
                others = {0, 1, 2} - {lost}
                wait_until(
                    lambda: any(keeps_a_copy(cluster, other) for other in others),
                    RUN_LIMIT_S,
                    lambda: "no snapshot is copied",
                )
            cluster.lose(lost)
        cluster.join(lost, 3)
        code, said = training.result(RUN_LIMIT_S)
    assert code == 0, said
    origin = r"the snapshot of step \d+ in its nodes' memory" if snapshots else r"the checkpoint of step \d+"
    assert re.search(f"runs? (again|goes on|on) after [0-9.]+ s, from {origin}", " ".join(said.split())), said
    assert exact_metrics(run) == exact_metrics(together)


def test_a_run_goes_on_with_fewer_replicas_and_with_all_of_them_again(tmp_path: Path, together: RunDir) -> None:
    # Each node has room for one rank, the head for the encoder beside it.
    config = lasting_config(
        tmp_path,
        "fewer",
        "backbone.data_parallel_size=2",
        "encoders.vision.data_parallel_size=1",
        "backbone.num_cpus=1.5",
        "encoders.vision.num_cpus=0.5",
        "limits.elastic_after_s=5",
    )
    run = run_dir(config)
    with nodes(2) as cluster, ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, cluster, config)

        def said_so_far() -> str:
            return " ".join((cluster.directory / f"{config.name}.log").read_text(errors="replace").split())

        steps_done(run, 12, training)
        cluster.lose(1)
        wait_until(lambda: training.done() or "backbone 1, vision 1" in said_so_far(), RUN_LIMIT_S, said_so_far)
        steps_done(run, 14, training)
        with paused(cluster, 0, "BackboneRank"):
            cluster.join(1, 2)
            wait_until(lambda: training.done() or "room for all" in said_so_far(), RUN_LIMIT_S, said_so_far)
        code, said = training.result(RUN_LIMIT_S)
    assert code == 0, said
    assert "backbone 2, vision 1" in " ".join(said.split()), said
    both, alone = (json_lines(each.metrics) for each in (run, together))
    assert [line["step"] for line in both] == [line["step"] for line in alone]
    # Sums of other degrees round otherwise.
    assert [line["loss"] for line in both] == pytest.approx([line["loss"] for line in alone], rel=1e-4)
    assert [line["num_samples"] for line in both] == [line["num_samples"] for line in alone]
