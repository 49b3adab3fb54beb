"""When gradients are reduced, and over which ranks: chosen per configuration, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.candidates import Candidate, PruneReason
from flowtrain.allocator.request import Request, enumerate_all
from flowtrain.allocator.shards import num_shards
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster, request, roofline_surrogate, with_memory, workload

HYBRID = replace(SETUP, sharding="hybrid")


def choosing(asked: Request) -> Request:
    return replace(asked, chooses_reduction=True)


def peak(asked: Request, degrees: Degrees, reduction: str) -> int:
    return asked.peak_nbytes(Candidate(BACKBONE, "h200", degrees, gradient_reduction=reduction))  # type: ignore[arg-type]


def candidates(asked: Request) -> dict[Degrees, str]:
    """The backbone's feasible configurations, with their reduction."""
    columns = enumerate_all(asked)[BACKBONE, "h200"].columns
    every = [columns.candidate(index, 1.0) for index in range(len(columns))]
    return {each.degrees: each.gradient_reduction for each in every}


@pytest.mark.parametrize("gibibytes", [14, 24, 40, 80])
def test_each_configuration_reduces_once_a_step_where_that_fits(gibibytes: int) -> None:
    memory = gibibytes << 30
    asked = with_memory(choosing(request(cluster(h200=16))), memory)
    found, everything = candidates(asked), candidates(with_memory(asked, 1 << 50))
    assert set(everything.values()) == {"step"}
    for degrees in everything:
        once = peak(asked, degrees, "step") <= memory
        each = degrees.dp > 1 and peak(asked, degrees, "microbatch") <= memory
        assert found.get(degrees) == ("step" if once else "microbatch" if each else None), degrees


def test_a_reduction_once_a_step_may_fit_where_one_with_each_microbatch_does_not() -> None:
    """A layer's gradient and the buffer of the one before take more than whole gradients of few layers."""
    small = replace(MODEL, backbone=replace(MODEL.backbone, num_layers=2, vocab_size=1024))
    asked = choosing(request(cluster(h200=2), small, setup=replace(SETUP, dtype="float32")))
    once, each = (peak(asked, Degrees(2), reduction) for reduction in ("step", "microbatch"))
    assert once < each
    found = candidates(with_memory(replace(asked, max_batch_patches={"vision": 256}), once))
    assert found[Degrees(2)] == "step"


def test_what_is_configured_is_not_chosen() -> None:
    asked = request(cluster(h200=16))
    assert set(candidates(asked).values()) == {"step"}
    always = replace(asked, setup=replace(SETUP, gradient_reduction="microbatch"))
    found = candidates(always)
    assert {found[degrees] for degrees in found if degrees.dp > 1} == {"microbatch"}
    assert {found[degrees] for degrees in found if degrees.dp == 1} == {"step"}, "there is nothing to reduce"


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24, 64]),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 2, 4]),
)
def test_groups_of_shards_are_equal_and_inside_nodes(dp: int, replica: int, per_node: int, size: int | None) -> None:
    setup = TrainingSetup(sharding="hybrid", shard_size=size)
    found = int(num_shards(setup, np.array([dp]), np.array([replica]), per_node)[0])
    assert found == 0 or dp % found == 0
    if size is not None:
        assert found == (size if dp % size == 0 else 0)
    elif dp == 1:
        assert found == 1
    else:
        # By the nodes themselves: replicas that lie on each, which must be equal numbers of at least two.
        nodes = [{rank // per_node for rank in range(at * replica, (at + 1) * replica)} for at in range(dp)]
        groups = [sum(each == {node} for each in nodes) for node in range(-(-dp * replica // per_node))]
        is_even = len(set(groups)) == 1 and groups[0] > 1 and sum(groups) == dp
        assert found == (groups[0] if is_even else 0)
    full = num_shards(TrainingSetup(shard_size=size), np.array([dp]), np.array([replica]), per_node)
    assert full.tolist() == [dp]


def test_hybrid_groups_stay_in_a_node_and_are_counted_out_otherwise() -> None:
    asked = request(cluster(h200=16), setup=HYBRID)
    every = enumerate_all(asked)[BACKBONE, "h200"]
    assert every.pruned[PruneReason.SHARDS] > 0
    for degrees in candidates(asked):
        shards = asked.num_shards(Candidate(BACKBONE, "h200", degrees))
        assert shards * degrees.pp * degrees.tp <= 8 or degrees.dp == 1
    wide, narrow = (
        replace(asked, setup=setup).backbone_memory(Candidate(BACKBONE, "h200", Degrees(16)))
        for setup in (HYBRID, SETUP)
    )
    assert wide.optimizer_state == pytest.approx(2 * narrow.optimizer_state, rel=1e-6) and wide.peak > narrow.peak


def test_reducing_each_microbatch_is_never_faster() -> None:
    found = roofline_surrogate(request(cluster(h200=64)))
    for degrees in (Degrees(8), Degrees(16), Degrees(64), Degrees(8, 2, 4)):
        once, each = (
            found.step_time(Candidate(BACKBONE, "h200", degrees, gradient_reduction=reduction))  # type: ignore[arg-type]
            for reduction in ("step", "microbatch")
        )
        assert each.total[0] >= once.total[0] and each.computing[0] == once.computing[0]


def test_hybrid_shards_spare_the_network() -> None:
    asked = request(cluster(h200=64))
    slow = tuple(
        replace(each, links=replace(each.links, network=each.links.network / 50)) for each in asked.cluster.device_types
    )
    asked = replace(asked, cluster=replace(asked.cluster, device_types=slow))
    full, hybrid = (
        roofline_surrogate(replace(asked, setup=setup)).step_time(Candidate(BACKBONE, "h200", Degrees(64)))
        for setup in (SETUP, HYBRID)
    )
    assert 0.0 < 100 * hybrid.gathering[0] < full.gathering[0], "nothing hides the first gather"
    # Groups sum their shards by an all-reduce, which moves up to twice the bytes of the one reduce-scatter.
    assert hybrid.reducing[0] < 2 * full.reducing[0] and hybrid.total[0] < full.total[0]


def test_offloading_takes_the_time_that_the_host_link_needs() -> None:
    asked = request(cluster(h200=8), setup=replace(SETUP, activation_checkpointing="offload"))
    types = asked.cluster.device_types

    def offloading(speed: float) -> float:
        links = replace(types[0].links, host=speed)
        changed = replace(asked, cluster=replace(asked.cluster, device_types=(replace(types[0], links=links),)))
        return float(roofline_surrogate(changed).step_time(Candidate(BACKBONE, "h200", Degrees(8))).offloading[0])

    assert offloading(1e15) == 0.0 and offloading(1e9) == pytest.approx(10 * offloading(1e10), rel=0.2)
    kept = roofline_surrogate(request(cluster(h200=8))).step_time(Candidate(BACKBONE, "h200", Degrees(8)))
    assert kept.offloading[0] == 0.0


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({"gradient_reduction": "step"}, "backbone.gradient_reduction=microbatch"),
        ({"gradient_reduction": "microbatch", "sequence_parallel": False}, "backbone.sequence_parallel=true"),
        ({"gradient_reduction": "microbatch", "sharding": "hybrid"}, "backbone.sharding=full"),
    ],
)
def test_what_takes_less_memory_is_suggested_and_helps(settings: dict[str, str], way: str) -> None:
    setup = replace(SETUP, **settings)  # type: ignore[arg-type]
    # At most 16 devices can share it: 2 stages, 2 heads, 4 replicas.
    small = replace(MODEL, backbone=replace(MODEL.backbone, num_layers=2, num_heads=2, num_kv_heads=2))
    asked = with_memory(request(cluster(h200=24), small, workload(global_batch_size=4 * 61), setup), 1 << 50)
    asked = replace(asked, max_batch_patches={"vision": 256})
    key, value = way.removeprefix("backbone.").split("=")
    better = replace(asked, setup=replace(setup, **{key: True if value == "true" else value}))  # type: ignore[arg-type]
    least = [
        min(peak(each, degrees, each.reduction("step", degrees)) for degrees in candidates(each))
        for each in (asked, better)
    ]
    assert least[1] < least[0]
    short = with_memory(asked, least[0] - 1)
    with pytest.raises(ConfigError, match=way):
        allocate(short, roofline_surrogate)
    helped = with_memory(better, least[0] - 1)
    assert allocate(helped, roofline_surrogate).devices <= 24
