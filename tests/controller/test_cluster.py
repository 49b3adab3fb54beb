"""What is said of a cluster that lacks something, with fakes in place of Ray's functions."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.cluster import check_resources, connected, place, placed
from flowtrain.errors import ResourceError
from tests.training.ranks import make_config


def set_cluster(
    monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, float], dead: dict[str, float] | None = None
) -> None:
    """A cluster of these nodes."""
    total: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.items():
            total[name] = total.get(name, 0.0) + amount
    described = [{"Alive": True, "NodeID": f"node-{index}", "Resources": node} for index, node in enumerate(nodes)]
    if dead is not None:
        described.append({"Alive": False, "NodeID": "node-dead", "Resources": dead})
    monkeypatch.setattr(ray, "cluster_resources", lambda: total)
    monkeypatch.setattr(ray, "available_resources", lambda: {name: amount / 2 for name, amount in total.items()})
    monkeypatch.setattr(ray, "nodes", lambda: described)


def refusal(bundles: list[dict[str, float]], pool_nbytes: int = 0) -> str:
    with pytest.raises(ResourceError) as caught:
        check_resources(bundles, pool_nbytes)
    return str(caught.value)


def test_a_cluster_that_has_all_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cluster(monkeypatch, {"CPU": 2.0, "GPU": 1.0, "memory": 1e9})
    check_resources([{"CPU": 0.7}, {"CPU": 0.6}, {"CPU": 0.7, "GPU": 1.0}], 10**9)


def test_everything_that_lacks_is_said_at_once_with_both_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cluster(monkeypatch, {"CPU": 2.0, "memory": 1e6})
    message = refusal([{"CPU": 1.5}, {"CPU": 1.5, "GPU": 1.0}], 5_000_000)
    assert "CPU: 3 needed, 2 in the cluster" in message
    assert "GPU: 1 needed, 0 in the cluster" in message
    assert "5000000 bytes needed, 1000000 in the cluster" in message
    assert "data_parallel_size" in message


def test_a_machine_alone_is_told_how_to_use_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cluster(monkeypatch, {"CPU": 2.0, "memory": 1e6})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "RAY_ADDRESS is not set, so only this machine is used" in refusal([{"CPU": 9.0}])
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "RAY_ADDRESS" not in refusal([{"CPU": 9.0}])


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=12),
    st.lists(st.integers(1, 8), max_size=30),
)
def test_placed_bundles_fit_their_nodes(nodes: list[int], bundles: list[int]) -> None:
    has = {str(number): {"GPU": float(count)} for number, count in enumerate(nodes)}
    asked = [{"GPU": float(count)} for count in bundles]
    found, left = place(asked, has)
    assert (left is None) == (sum(found.values()) == len(bundles))
    assert sum(bundles) > sum(nodes) or left is None or max(bundles) > 1, "single devices always fit"
    if left is not None and set(bundles) == {left["GPU"]}:
        assert sum(found.values()) == sum(int(count // left["GPU"]) for count in nodes), "no room is wasted"
    assert place(asked, has) == (found, left) and all(node["GPU"] == nodes[int(name)] for name, node in has.items())


def test_segments_must_fit_one_node_unless_a_network_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cluster(monkeypatch, {"CPU": 2.0, "memory": 1e6}, {"CPU": 2.0, "memory": 2e6})
    message = refusal([{"CPU": 1.0}], 2_000_001)
    assert "2000001 bytes needed, 2000000 on the largest node" in message
    assert "lower data.max_image_nbytes, data.shuffle_blocks" in message
    check_resources([{"CPU": 1.0}], 2_000_000)
    FakeProbe({"node-0": "nixl_cu12", "node-1": "nixl_cu12"}).install(monkeypatch)
    assert check_resources([{"CPU": 1.0}], 3_000_000, "auto") == "PACK"


def test_actors_that_fit_on_no_one_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cluster(monkeypatch, {"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}, dead={"CPU": 64.0, "GPU": 8.0})
    assert "no single node has 6 CPU" in refusal([{"CPU": 3.0}, {"CPU": 3.0}])
    check_resources([{"CPU": 1.0}, {"CPU": 3.0, "GPU": 1.0}], 0)


class FakeProbe:
    """In the place of the remote function that looks for NIXL: an answer by node, and one that never comes."""

    def __init__(self, answers: dict[str, str | None], silent: str | None = None) -> None:
        self.answers, self.silent = answers, silent
        self.asked: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "remote", lambda function: self)
        monkeypatch.setattr(cluster, "NodeAffinitySchedulingStrategy", lambda node_id, soft: node_id)
        monkeypatch.setattr(ray, "get", self.answers.__getitem__)
        monkeypatch.setattr(
            ray, "wait", lambda refs, num_returns, timeout: ([ref for ref in refs if ref != self.silent], [])
        )

    def options(self, num_cpus: int, scheduling_strategy: str) -> FakeProbe:
        self.asked.append(scheduling_strategy)
        return self

    def remote(self) -> str:
        return self.asked[-1]


TWO_NODES = ({"CPU": 4.0, "memory": 1e9}, {"CPU": 4.0, "memory": 1e9})
APART = [{"CPU": 3.0}, {"CPU": 3.0}]


def test_a_network_joins_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cluster(monkeypatch, *TWO_NODES, dead={"CPU": 64.0})
    probe = FakeProbe({"node-0": "nixl_cu12", "node-1": "nixl_cu12"})
    probe.install(monkeypatch)
    assert check_resources(APART, 0, "auto") == "PACK"
    assert probe.asked == ["node-0", "node-1"]
    assert check_resources(APART, 0, "nixl") == "PACK"
    with pytest.raises(ResourceError, match=r"no single node has 5 CPU\. "):
        check_resources([{"CPU": 5.0}, {"CPU": 1.0}], 0, "auto")


@pytest.mark.parametrize("silent", [None, "node-1"])
def test_nodes_without_nixl_are_named(monkeypatch: pytest.MonkeyPatch, silent: str | None) -> None:
    set_cluster(monkeypatch, *TWO_NODES)
    FakeProbe({"node-0": "nixl_cu12", "node-1": None if silent is None else "nixl_cu12"}, silent).install(monkeypatch)
    silence = r"1 of 2 nodes did not answer within .* whether they have NIXL .*: node-1"
    reason = "missing on 1 of 2 nodes: node-1" if silent is None else silence
    with pytest.raises(ResourceError, match=f"no single node has 6 CPU, and all actors must share one: .*{reason}"):
        check_resources(APART, 0, "auto")
    assert check_resources([{"CPU": 2.0}, {"CPU": 1.0}], 0, "auto") == "STRICT_PACK"
    with pytest.raises(ResourceError, match=f"pool.network is nixl, but .*{reason}"):
        check_resources([{"CPU": 2.0}, {"CPU": 1.0}], 0, "nixl")


@pytest.mark.parametrize("silent", [None, "node-1"])
def test_a_node_that_dies_while_it_is_asked_does_not_count(monkeypatch: pytest.MonkeyPatch, silent: str | None) -> None:
    set_cluster(monkeypatch, *TWO_NODES, {"CPU": 4.0, "memory": 1e9})
    FakeProbe({"node-0": "nixl_cu12", "node-1": None, "node-2": "nixl_cu12"}, silent).install(monkeypatch)
    before, asked = ray.nodes(), []

    def nodes() -> list[dict[str, Any]]:
        asked.append(True)
        return before if len(asked) == 1 else [{**node, "Alive": node["NodeID"] != "node-1"} for node in before]

    monkeypatch.setattr(ray, "nodes", nodes)
    assert check_resources(APART, 0, "auto") == "PACK"


def test_one_node_needs_no_network_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cluster(monkeypatch, {"CPU": 4.0})
    probe = FakeProbe({})
    probe.install(monkeypatch)
    assert check_resources([{"CPU": 3.0}, {"CPU": 1.0}], 0, "auto") == "STRICT_PACK"
    assert probe.asked == []


@pytest.mark.parametrize(
    ("wanted", "nodes", "network"),
    [("auto", ["a", "b", "a"], "nixl"), ("auto", ["a", "a"], "none"), ("none", ["a"], "none"), ("nixl", ["a"], "nixl")],
)
def test_auto_comes_down_to_where_the_actors_are(
    monkeypatch: pytest.MonkeyPatch, wanted: str, nodes: list[str], network: str
) -> None:
    config = make_config(pool={"network": wanted})
    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    monkeypatch.setattr(cluster, "placement_group_table", lambda group: table)
    resolved = cluster.with_network(config, FakeGroup(comes=True))
    assert resolved.pool.network == network
    assert config.pool.network == wanted and resolved.pool.alignment == config.pool.alignment
    assert cluster.with_network(config, None).pool.network == ("none" if wanted == "auto" else wanted)


class FakeGroup:
    def __init__(self, comes: bool) -> None:
        self.comes = comes
        self.waited_s: float | None = None

    def wait(self, timeout_s: float) -> bool:
        self.waited_s = timeout_s
        return self.comes


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    groups: list[Any] = []
    monkeypatch.setattr(cluster, "remove_placement_group", groups.append)
    return groups


def test_a_reservation_lasts_as_long_as_the_block(monkeypatch: pytest.MonkeyPatch, removed: list[Any]) -> None:
    group = FakeGroup(comes=True)
    monkeypatch.setattr(cluster, "placement_group", lambda bundles, strategy: group)
    with pytest.raises(KeyError), placed([{"CPU": 1.0}], 7.0) as found:
        assert found is group and not removed and group.waited_s == 7.0
        raise KeyError
    assert removed == [group]


def test_a_reservation_that_does_not_come_says_what_is_free(
    monkeypatch: pytest.MonkeyPatch, removed: list[Any]
) -> None:
    set_cluster(monkeypatch, {"CPU": 4.0, "GPU": 2.0, "node:10.0.0.1": 1.0})
    group = FakeGroup(comes=False)
    monkeypatch.setattr(cluster, "placement_group", lambda bundles, strategy: group)
    with pytest.raises(ResourceError) as caught, placed([{"CPU": 1.5}, {"CPU": 1.5, "GPU": 2.0}], 3.0):
        pass
    message = str(caught.value)
    assert "3 CPU, 2 GPU needed, 2 CPU, 1 GPU free now" in message and "limits.placement_timeout_s (3 s)" in message
    assert removed == [group]


@pytest.fixture
def config() -> RunConfig:
    return make_config(name="kite")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Arguments of ``ray.init``, and None for each ``ray.shutdown``."""
    noted: list[Any] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    session = tmp_path / "session_2026_1"
    session.mkdir()

    def init(**arguments: Any) -> SimpleNamespace:
        noted.append(arguments)
        return SimpleNamespace(address_info={"session_dir": str(session), "webui_url": "127.0.0.1:8265"})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "shutdown", lambda: noted.append(None))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return noted


def test_alone_a_local_cluster_starts_and_ends(
    config: RunConfig, calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(config) as dashboard:
        assert dashboard == "127.0.0.1:8265"
        with monkeypatch.context() as inside:
            inside.setattr(ray, "is_initialized", lambda: True)
            with connected(config) as same:
                assert same == dashboard
        assert calls[0]["address"] == "local" and calls[0]["dashboard_host"] == "127.0.0.1"
        assert calls[0]["namespace"] == "flowtrain-kite"
        assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "session_2026_1").is_dir()
    assert calls[1:] == [None]
    assert not (tmp_path / "session_2026_1").exists(), "Ray's temporary directory goes with the run"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_actors_print_is_coloured_on_a_terminal_alone(
    config: RunConfig, calls: list[Any], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setenv("RAY_COLOR_PREFIX", "kept")
    with connected(config):
        assert os.environ["RAY_COLOR_PREFIX"] == "kept"
    monkeypatch.delenv("RAY_COLOR_PREFIX")
    with connected(config):
        assert os.environ.get("RAY_COLOR_PREFIX") == (None if is_terminal else "0")
    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)


def test_a_named_cluster_is_connected_to(config: RunConfig, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with connected(config):
        assert "address" not in calls[0] and "num_cpus" not in calls[0]


def test_a_named_cluster_that_is_not_there_is_said(
    config: RunConfig, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**arguments: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS \(10\.0\.0\.1:6379\).*nobody answers"), connected(config):
        pass


def test_a_start_that_ray_gives_up_is_said_with_what_to_look_at(
    config: RunConfig, calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(**arguments: Any) -> None:
        session.mkdir(parents=True)
        raise Exception("The current node timed out during startup.")  # as Ray does on a machine without memory

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    session = tmp_path / "ray" / f"session_2026_{os.getpid()}"
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ResourceError, match=r"timed out during startup.*free memory"), connected(config):
        pass
    assert [path.name for path in session.iterdir()] == [".started_by_flowtrain"], "the next start removes it"


def test_a_cluster_of_the_caller_is_used_and_left(
    config: RunConfig, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with connected(config):
        pass
    assert calls == []


def test_accelerators_of_a_type_are_counted_by_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H200": 1.0}
    slow = {"CPU": 8.0, "GPU": 8.0, "accelerator_type:L4": 1.0}
    dead = {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H200": 1.0}
    set_cluster(monkeypatch, fast, slow, dead=dead)
    FakeProbe({"node-0": "nixl_cu12", "node-1": "nixl_cu12"}).install(monkeypatch)
    bundle = {"GPU": 1.0, "accelerator_type:H200": 0.001}
    assert check_resources([bundle] * 8 + [{"GPU": 1.0, "accelerator_type:L4": 0.001}], 0, "auto") == "PACK"
    assert "GPU of accelerator_type:H200: 9 needed, 8 in the cluster" in refusal([bundle] * 9)
    absent = {"GPU": 1.0, "accelerator_type:Ascend910B": 0.001}
    message = "GPU of accelerator_type:Ascend910B: 1 needed, 0 in the cluster (accelerator_type can be H200 or L4 here)"
    assert message in refusal([absent])
