"""Which replicas share shards, by the nodes on which their ranks are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.model import BackboneConfig
from flowtrain.controller.shard_groups import shard_size_of
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees


def hybrid(degrees: Degrees, **changes: Any) -> BackboneConfig:
    sizes = {"data": degrees.dp, "pipeline": degrees.pp, "tensor": degrees.tp}
    values = {f"{name}_parallel_size": size for name, size in sizes.items()}
    return BackboneConfig(**{"sharding": "hybrid", **values, **changes})


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 3), st.integers(1, 2))
def test_replicas_on_a_node_share_shards(num_nodes: int, per_node: int, pp: int, tp: int) -> None:
    degrees = Degrees(num_nodes * per_node, pp, tp)
    addresses = [f"node {degrees.coordinates(rank)[0] // per_node}" for rank in range(degrees.world_size)]
    assert shard_size_of(hybrid(degrees), addresses) == per_node


def test_a_given_size_holds_wherever_the_ranks_are() -> None:
    assert shard_size_of(hybrid(Degrees(dp=4), hybrid_shard_size=2), ["a", "a", "a", "b"]) == 2
    assert shard_size_of(hybrid(Degrees(dp=2), sharding="full"), ["a", "b"]) is None
    assert shard_size_of(hybrid(Degrees(pp=2)), ["a", "b"]) is None, "a single replica"


def test_only_ranks_of_the_same_stage_share_shards() -> None:
    """A pipeline over two nodes: of each stage all replicas are on one node."""
    assert shard_size_of(hybrid(Degrees(dp=2, pp=2)), ["a", "b", "a", "b"]) == 2


@pytest.mark.parametrize(
    ("degrees", "addresses", "reason"),
    [
        (Degrees(dp=4), "aaab", "neighbouring replicas share a node in groups of 1 and 3, which must be equal"),
        (Degrees(dp=6), "aaabbc", "neighbouring replicas share a node in groups of 1 and 2 and 3, which must be equal"),
        (Degrees(dp=4), "abab", "no two neighbouring replicas share a node, so that nothing would be sharded"),
        (Degrees(dp=2, tp=2), "aabb", "no two neighbouring replicas share a node, so that nothing would be sharded"),
    ],
)
def test_nodes_that_allow_no_equal_groups_are_refused(degrees: Degrees, addresses: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shard_size_of(hybrid(degrees), list(addresses))
    sizes = {4: "2, 4", 6: "2, 3, 6", 2: "2"}[degrees.dp]
    assert str(caught.value) == (
        "backbone.hybrid_shard_size (not given) stands for the replicas on one node; of "
        f"backbone.data_parallel_size ({degrees.dp}) {reason}; set backbone.hybrid_shard_size to one of {sizes}, or "
        "backbone.sharding (now 'hybrid') to 'full'"
    )
