"""Enumeration: nothing feasible is lost, nothing infeasible kept, everything left out is counted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.candidates import (
    CandidateColumns,
    PruneReason,
    device_counts,
    enumerate_backbone,
    enumerate_encoder,
)
from flowtrain.allocator.degrees import degree_faults
from flowtrain.allocator.pareto import pareto_front
from flowtrain.costs.cluster import DeviceType, Links
from flowtrain.costs.model_spec import TransformerSpec
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import BACKBONE, VISION


def device_type(count: int, devices_per_node: int = 8) -> DeviceType:
    return DeviceType("some", count, 1e12, 10**9, 1e12, Links(1e11, 1e10, "test"), devices_per_node)


def peak(degrees: Degrees) -> int:
    """Falls with every degree, as the real one does with dp."""
    return 10_000 // (degrees.tp * degrees.pp) + 20_000 // degrees.world_size


def degrees_of(columns: CandidateColumns) -> list[Degrees]:
    triples = zip(columns.dp.tolist(), columns.pp.tolist(), columns.tp.tolist(), strict=True)
    return [Degrees(*each) for each in triples]


def reason_against(
    degrees: tuple[int, int], count: int, kind: DeviceType, spec: TransformerSpec, batch: int, memory: int
) -> PruneReason | None:
    """The same rules, checked for one configuration at a time."""
    tp, pp = degrees
    if kind.devices_per_node % tp:
        return PruneReason.CROSSES_NODES
    if degree_faults(Degrees(tp=tp), spec):
        return PruneReason.HEADS
    if pp > spec.num_layers:
        return PruneReason.LAYERS
    if count % (tp * pp):
        return PruneReason.FACTORS
    dp = count // (tp * pp)
    if batch % dp:
        return PruneReason.BATCH
    if degree_faults(Degrees(dp, tp=tp), spec):
        return PruneReason.HEADS
    return PruneReason.MEMORY if peak(Degrees(dp, pp, tp)) > memory else None


@given(
    count=st.integers(1, 40),
    devices_per_node=st.sampled_from([1, 2, 4, 6, 8]),
    batch=st.integers(1, 64),
    memory=st.integers(1, 40_000),
    num_layers=st.integers(1, 12),
    num_heads=st.sampled_from([2, 4, 12]),
    vocab_size=st.sampled_from([1000, 1001]),
)
def test_the_backbones_configurations_are_all_that_keep_the_rules(
    count: int, devices_per_node: int, batch: int, memory: int, num_layers: int, num_heads: int, vocab_size: int
) -> None:
    kind = device_type(count, devices_per_node)
    spec = replace(BACKBONE, num_layers=num_layers, num_heads=num_heads, num_kv_heads=2, vocab_size=vocab_size)
    found = enumerate_backbone(kind, spec, global_batch_size=batch, peak_nbytes=peak, memory_nbytes=memory)
    feasible, pruned = [], Counter[PruneReason]()
    for devices in range(1, count + 1):
        for tp in range(1, min(num_heads, count) + 1):
            # Infeasible tensor parallel degrees are left out before pipeline degrees above the number of layers.
            bad = reason_against((tp, 1), tp, kind, spec, 1, 1 << 40) in (PruneReason.CROSSES_NODES, PruneReason.HEADS)
            for pp in range(1, (min(num_layers, count) if bad else count) + 1):
                if reason := reason_against((tp, pp), devices, kind, spec, batch, memory):
                    pruned[reason] += 1
                else:
                    feasible.append(Degrees(devices // (tp * pp), pp, tp))
    assert sorted(map(str, degrees_of(found.columns))) == sorted(map(str, feasible))
    assert found.pruned == pruned
    assert (found.least_peak_nbytes is None) == bool(feasible)


def test_an_encoders_dp_need_not_divide_the_batch_and_its_tp_divides_heads_and_node() -> None:
    found = enumerate_encoder(device_type(12), VISION, module="vision", peak_nbytes=lambda _: 1, memory_nbytes=1)
    expected = [Degrees(n // tp, 1, tp) for n in range(1, 13) for tp in (1, 2, 4, 8) if n % tp == 0]
    assert sorted(map(str, degrees_of(found.columns))) == sorted(map(str, expected))
    assert found.pruned[PruneReason.CROSSES_NODES] == 12 * len({3, 5, 6, 7, 9, 10, 11, 12})
    assert set(found.pruned) == {PruneReason.CROSSES_NODES, PruneReason.FACTORS}


def test_a_module_that_nothing_splits_stays_whole() -> None:
    encoder = enumerate_encoder(
        device_type(8), VISION, module="vision", peak_nbytes=lambda _: 1, memory_nbytes=1, splits_tensors=False
    )
    assert degrees_of(encoder.columns) == [Degrees(n) for n in range(1, 9)]
    assert encoder.pruned[PruneReason.WHOLE] == 8 * len({2, 4, 8})
    backbone = enumerate_backbone(
        device_type(8), BACKBONE, global_batch_size=64, peak_nbytes=peak, memory_nbytes=1 << 30, splits_tensors=False
    )
    assert {each.tp for each in degrees_of(backbone.columns)} == {1}
    assert {each.pp for each in degrees_of(backbone.columns)} == set(range(1, 9))


def test_an_encoder_that_does_not_fit_says_by_how_much() -> None:
    found = enumerate_encoder(
        device_type(4), VISION, module="vision", peak_nbytes=lambda d: 100 // d.tp, memory_nbytes=30
    )
    assert {each.tp for each in degrees_of(found.columns)} == {4} and found.least_peak_nbytes is None
    none = enumerate_encoder(
        device_type(4), VISION, module="vision", peak_nbytes=lambda d: 100 // d.tp, memory_nbytes=20
    )
    assert len(none.columns) == 0 and none.least_peak_nbytes == 25
    assert none.pruned[PruneReason.MEMORY] == 4 + 2 + 1


def test_above_64_devices_whole_nodes_are_the_grain() -> None:
    assert device_counts(device_type(99)).tolist() == [*range(1, 65), 72, 80, 88, 96]
    assert device_counts(device_type(9)).tolist() == list(range(1, 10))
    found = enumerate_encoder(device_type(99), VISION, module="vision", peak_nbytes=lambda _: 1, memory_nbytes=1)
    assert found.pruned[PruneReason.NODE_GRAIN] == (99 - 68) * 4


points = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=30)


@settings(deadline=None)
@given(points)
def test_the_front_dominates_everything_and_itself_not_at_all(points: list[tuple[int, int, int]]) -> None:
    devices, rates, ties = (np.array(column) for column in zip(*points, strict=True))
    front = pareto_front(devices, rates.astype(float), ties)
    kept = [points[index] for index in front]
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(kept))
    for devices_, rate, tie in points:
        better = [each for each in kept if each[0] <= devices_ and each[1] >= rate]
        assert better
        same = [each for each in kept if each[:2] == (devices_, rate)]
        assert all(each[2] <= tie for each in same)


def test_rates_that_differ_by_rounding_are_one() -> None:
    rates = np.array([0.1 + 0.2, 0.3, 0.3 * (1 + 1e-8)])
    assert pareto_front(np.array([2, 2, 3]), rates, np.array([5, 1, 1])).tolist() == [1, 2]
    assert pareto_front(np.array([1, 2]), np.array([0.3, 0.1 + 0.2]), np.array([1, 1])).tolist() == [0]


@pytest.mark.parametrize("count", [1, 7, 8, 64, 65, 256])
def test_every_device_count_is_within_the_cluster(count: int) -> None:
    counts = device_counts(device_type(count))
    assert counts.min() == 1 and counts.max() <= count and (np.diff(counts) > 0).all()
