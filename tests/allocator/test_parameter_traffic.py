"""Gathers and reductions by hand: who shares which link, what is hidden, what a step does once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.candidates import CandidateColumns
from flowtrain.allocator.parameter_traffic import group_link
from flowtrain.allocator.surrogate import StepTime, Surrogate
from flowtrain.costs.cluster import Cluster, DeviceType, Links, data_sheet_device_type
from flowtrain.costs.profiled_times import CPU
from flowtrain.costs.roofline import Roofline
from flowtrain.costs.training_setup import TrainingSetup
from tests.allocator.test_surrogate import PERFECT
from tests.allocator.worlds import MODEL, SETUP, workload

NODE, NETWORK = 400e9, 50e9
PARAMETERS = MODEL.backbone.num_parameters + MODEL.connector.num_parameters
LAYER = MODEL.backbone.layer_parameters
OUTER = PARAMETERS - 32 * LAYER


def device(name: str = "h200", flops: float = 989.5e12, node: float = NODE, network: float = NETWORK) -> DeviceType:
    kind = data_sheet_device_type("h200", 1024)
    return replace(kind, name=name, flops=flops, links=Links(node, network, "test", host=32e9))


def step(
    kind: DeviceType, setup: TrainingSetup, dp: int, pp: int = 1, each: bool = False, batch: int = 256
) -> StepTime:
    data, devices = workload(global_batch_size=batch), Cluster((kind,))
    times = {kind.name: Roofline(kind, MODEL, data, setup, PERFECT)}
    found = Surrogate(devices, MODEL, data, setup, times, link_efficiency=1.0)
    degrees = (np.array([degree]) for degree in (dp, pp, 1))
    return found.step_times(CandidateColumns("backbone", kind.name, *degrees, np.array([each])))


@pytest.mark.parametrize(
    ("members", "apart", "expected"),
    [
        (8, 1, NODE),
        (2, 4, NODE),
        (16, 1, NODE),  # eight network links at once are as fast as the node's
        (16, 2, 4 * NETWORK),
        (16, 8, NETWORK),
        (4, 16, NETWORK),
    ],
)
def test_members_on_a_node_share_its_network_links(members: int, apart: int, expected: float) -> None:
    assert group_link(device(), np.array([members]), np.array([apart]))[0] == expected


@given(st.integers(1, 64), st.integers(1, 32))
def test_a_link_is_never_slower_than_one_devices_network_nor_faster_than_the_node(members: int, apart: int) -> None:
    assert NETWORK <= group_link(device(), np.array([members]), np.array([apart]))[0] <= NODE


def test_the_first_gather_is_never_hidden() -> None:
    """Endless computing hides the others: those of the later layers, and of the backward."""
    found = step(device(flops=1e12), SETUP, 8)
    first = 2 * 7 / 8 * (LAYER + OUTER) / NODE
    assert found.gathering[0] / found.num_microbatches[0] == pytest.approx(first)
    assert found.reducing[0] == pytest.approx(2 * first), "float32, of the last layer and the embedding"


def test_what_takes_longer_than_computing_is_not_hidden() -> None:
    fast, slow = step(device(), SETUP, 8), step(device(node=1e9), SETUP, 8)
    bytes_a_microbatch = 2 * 7 / 8 * (2 * 32 * LAYER + OUTER)
    exposed = slow.gathering[0] / slow.num_microbatches[0]
    assert exposed == pytest.approx(
        bytes_a_microbatch / 1e9 - slow.computing[0] / slow.num_microbatches[0] + 2 * 7 / 8 * (LAYER + OUTER) / 1e9
    )
    assert fast.computing == pytest.approx(slow.computing)


@pytest.mark.parametrize("pp", [1, 4])
def test_whole_parameters_are_gathered_once_a_step(pp: int) -> None:
    """Each pipeline rank waits for the one before with the first microbatch."""
    setup = replace(SETUP, sharding="gradients")
    few, many = (step(device(), setup, 8, pp, batch=size) for size in (64, 1024))
    assert many.num_microbatches[0] > few.num_microbatches[0]
    assert 0.0 < many.gathering[0] <= few.gathering[0]
    assert step(device(), SETUP, 8, pp, batch=1024).gathering[0] > many.gathering[0]


def test_reductions_with_each_microbatch_cost_as_many_times_as_much() -> None:
    once, each = (step(device(), SETUP, 8, each=every) for every in (False, True))
    assert each.reducing == pytest.approx(once.num_microbatches * once.reducing)


def test_groups_of_shards_sum_over_the_network_once() -> None:
    """Each device has another shard, so it has its network link for itself."""
    setup = replace(SETUP, sharding="hybrid")
    slow = step(replace(device(flops=989e20, network=1e9), bandwidth=1e20), setup, 32)
    between = 2 * 3 / 4 * 4 * PARAMETERS / 8 / 1e9
    inside = 4 * 7 / 8 * (PARAMETERS + LAYER + OUTER) / NODE
    assert slow.reducing[0] == pytest.approx(between + inside, rel=1e-3)


def test_a_cpu_hides_nothing() -> None:
    setup = replace(SETUP, activation_checkpointing="offload")
    found = step(device(CPU), setup, 8)
    count = found.num_microbatches[0]
    assert found.gathering[0] / count == pytest.approx(2 * 7 / 8 * (2 * 32 * LAYER + OUTER) / NODE)
    assert found.reducing[0] == pytest.approx(4 * 7 / 8 * PARAMETERS / NODE)
    assert found.offloading[0] > step(device(flops=1e12), setup, 8).offloading[0] == 0.0


@given(st.sampled_from([1, 2, 8, 16, 64]), st.sampled_from([1, 2, 4]), st.sampled_from(["full", "gradients"]))
def test_parts_add_up_and_none_is_negative(dp: int, pp: int, sharding: str) -> None:
    found = step(device(), replace(SETUP, sharding=sharding), dp, pp)
    parts = (found.computing, found.transfers, found.gathering, found.fill, found.reducing, found.optimizer)
    assert all(each[0] >= 0.0 for each in parts)
    assert found.total[0] == pytest.approx(sum(float(each[0]) for each in parts) + found.offloading[0])
