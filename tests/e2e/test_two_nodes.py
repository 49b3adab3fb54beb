"""Encoder on one node, backbone on another, embeddings over the network: the same losses as on one node."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shared.hosts import NoHosts
from shared.node_pair import NODE_CPUS, NodePair, node_pair

from flowtrain.allocator.plan import read_plan
from flowtrain.config.load import dump_resolved
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import dump_yaml
from flowtrain.observability.run_dir import RunDir, run_dir
from tests.e2e.clusters import BIN, json_lines, wait_until
from tests.e2e.disturbed import exact_metrics, run_undisturbed
from tests.e2e.worlds import World, tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]  # every wait has a limit of its own

NUM_STEPS = 16
RUN_LIMIT_S = 600.0
"""Cold processes start on two nodes that share the machine's cores."""
MOST_OF_A_NODE = 0.75 * NODE_CPUS


@pytest.fixture(scope="module")
def pair() -> Iterator[NodePair]:
    try:
        with node_pair() as started:
            yield started
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same run on one node."""
    directory = tmp_path_factory.mktemp("together")
    return run_undisturbed(spread_config(directory, "together", num_cpus=0.1), directory / "together.log")


def spread_config(directory: Path, name: str, *overrides: str, num_cpus: float = MOST_OF_A_NODE) -> RunConfig:
    """One encoder and one rank, which share no node of the pair unless they need less."""
    world = World(seed=5)
    world.add_mixed(32)
    return tiny_config(
        directory,
        world.write(directory / f"{name}.parquet"),
        name,
        "encoders.vision.data_parallel_size=1",
        f"encoders.vision.num_cpus={num_cpus}",
        f"backbone.num_cpus={num_cpus}",
        "pool.network=auto",
        *overrides,
        training={"max_steps": NUM_STEPS},
    )


def train(pair: NodePair, config: RunConfig) -> tuple[int, str]:
    """Run ``flowtrain train`` on the first node; returns its exit code and what it said."""
    file = pair.directory / f"{config.name}.yaml"
    file.write_text(dump_resolved(config))
    return pair.run([sys.executable, "-m", "flowtrain.cli.app", "train", str(file)], config.name, RUN_LIMIT_S)


def test_two_nodes_train_as_one(pair: NodePair, tmp_path: Path, together: RunDir) -> None:
    config = spread_config(tmp_path, "apart")
    code, said = train(pair, config)
    assert code == 0, said
    apart = exact_metrics(run_dir(config))
    assert len(apart) == NUM_STEPS
    assert apart == exact_metrics(together)


def test_an_encoder_killed_on_the_other_node_costs_no_sample(pair: NodePair, tmp_path: Path, together: RunDir) -> None:
    config = spread_config(tmp_path, "killed", "data.num_feeders=2")
    run = run_dir(config)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, pair, config)
        wait_until(lambda: training.done() or len(json_lines(run.metrics)) >= 2, RUN_LIMIT_S, lambda: "no step is done")
        feeders = [["ray::Feeder" in title_of(pid) for pid in host.pids()].count(True) for host in pair.hosts]
        killed = [pid for host in pair.hosts for pid in host.pids() if "ray::Encoder" in title_of(pid)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        code, said = training.result(RUN_LIMIT_S)
    assert code == 0, said
    assert len(killed) == 1
    assert feeders == [1, 1], "encoders and ranks read what the feeder of the other node has put"
    assert exact_metrics(run) == exact_metrics(together)


@pytest.mark.nightly
def test_a_plan_for_two_nodes_starts_by_the_printed_command(pair: NodePair, tmp_path: Path) -> None:
    """Two nodes of two devices each; on a CPU a device is a core."""
    world = World(seed=6)
    world.add_mixed(32)
    source = world.write(tmp_path / "planned.parquet")
    # As a user has it: nothing in it is about nodes.
    config = tiny_config(
        tmp_path, source, "planned", "backbone.num_cpus=1", "encoders.vision.num_cpus=1", training={"max_steps": 3}
    )
    file, profile, saved = tmp_path / "planned.yaml", tmp_path / "profile.json", tmp_path / "plan.yaml"
    file.write_text(dump_yaml(config.model_dump(mode="json", exclude_unset=True)))
    for name, command in (
        ("profile", ["profile", str(file), "--save", str(profile), "--devices", "1"]),
        (
            "plan",
            ["plan", str(file), "--profile", str(profile), "--devices", "4", "--nodes", "2", "--save", str(saved)],
        ),
    ):
        code, said = pair.run([str(BIN / "flowtrain"), *command], name, RUN_LIMIT_S)
        assert code == 0, said
    plan, printed = read_plan(saved), said.rstrip().splitlines()[-1]
    assert plan.network == "auto" and plan.backbone.num_actors + plan.encoders["vision"].num_actors > NODE_CPUS
    doctor = [str(BIN / "flowtrain"), "doctor", str(file), "--plan", str(saved), "--json"]
    code, said = pair.run(doctor, "doctor", RUN_LIMIT_S)
    assert code == 0, said
    whole = (pair.directory / "doctor.log").read_text()
    report = json.loads(whole[whole.index('{"schema"') :])
    found = {check["name"]: check["detail"] for check in report["checks"]}
    assert report["fits"] and found["the network joins all nodes"].startswith("2 directions; slowest: ")
    assert "on 2 of 2 nodes" in found["actors fit the nodes"]
    assert "seen and writable on 2 nodes" in found["nodes share runs_dir"]
    code, said = pair.run(["sh", "-c", f'PATH="{BIN}:$PATH"; {printed}'], "planned", RUN_LIMIT_S)
    assert code == 0, said
    assert "the pool joins these by NIXL" in " ".join(said.split())
    run = run_dir(config)
    assert [record["step"] for record in json_lines(run.metrics)] == [1, 2, 3]
    assert read_plan(run.plan).backbone == plan.backbone


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it ended in between


def test_without_a_network_they_are_refused(pair: NodePair, tmp_path: Path) -> None:
    code, said = train(pair, spread_config(tmp_path, "refused", "pool.network=none"))
    said = " ".join(said.split())
    assert code != 0
    assert f"no single node has {2 * MOST_OF_A_NODE:g} CPU, and all actors must share one: pool.network is none" in said
