"""Enumeration: nothing feasible is lost, nothing infeasible kept, everything left out is counted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.candidates import (
    CandidateColumns,
    PruneReason,
    backbone_columns,
    counted,
    data_degrees,
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


def degrees_of(columns: CandidateColumns) -> list[Degrees]:
    triples = zip(columns.dp.tolist(), columns.pp.tolist(), columns.tp.tolist(), strict=True)
    return [Degrees(*each) for each in triples]


def reason_against(
    degrees: Degrees, kind: DeviceType, spec: TransformerSpec, batch: int, chunks: int
) -> PruneReason | None:
    """The same rules, checked for one configuration at a time."""
    if kind.devices_per_node % degrees.tp:
        return PruneReason.CROSSES_NODES
    if degree_faults(Degrees(tp=degrees.tp), spec):
        return PruneReason.HEADS
    if degrees.pp * chunks > spec.num_layers:
        return PruneReason.LAYERS
    if chunks > 1 and degrees.pp == 1:
        return PruneReason.CHUNKS
    if degree_faults(Degrees(degrees.dp, tp=degrees.tp), spec):
        return PruneReason.HEADS
    if degrees.dp > batch:
        return PruneReason.BATCH
    return None


@given(
    count=st.integers(1, 40),
    devices_per_node=st.sampled_from([1, 2, 4, 6, 8]),
    batch=st.integers(1, 64),
    num_layers=st.integers(1, 12),
    num_heads=st.sampled_from([2, 4, 12]),
    vocab_size=st.sampled_from([1000, 1001]),
    chunks=st.integers(1, 3),
)
def test_the_backbones_configurations_are_all_that_keep_the_rules(
    count: int, devices_per_node: int, batch: int, num_layers: int, num_heads: int, vocab_size: int, chunks: int
) -> None:
    kind = device_type(count, devices_per_node)
    spec = replace(BACKBONE, num_layers=num_layers, num_heads=num_heads, num_kv_heads=2, vocab_size=vocab_size)
    columns, left_out = backbone_columns(kind, spec, global_batch_size=batch, chunks_per_rank=chunks)
    feasible, pruned = [], Counter[PruneReason]()
    for tp in range(1, min(num_heads, count) + 1):
        for pp in range(1, count // tp + 1):
            for dp in range(1, count // (tp * pp) + 1):
                if reason := reason_against(Degrees(dp, pp, tp), kind, spec, batch, chunks):
                    pruned[reason] += 1
                else:
                    feasible.append(Degrees(dp, pp, tp))
    assert sorted(map(str, degrees_of(columns))) == sorted(map(str, feasible))
    assert counted(left_out) == pruned


def test_an_encoder_has_any_number_of_replicas_and_its_tp_divides_heads_and_node() -> None:
    found = enumerate_encoder(device_type(12), VISION, module="vision", peak_nbytes=lambda _: 1, memory_nbytes=1)
    expected = [Degrees(dp, 1, tp) for tp in (1, 2, 4, 8) for dp in range(1, 12 // tp + 1)]
    assert degrees_of(found.columns) == expected
    assert found.pruned == {PruneReason.CROSSES_NODES: sum(12 // tp for tp in (3, 5, 6, 7, 9, 10, 11, 12))}


def test_a_module_that_nothing_splits_stays_whole() -> None:
    encoder = enumerate_encoder(
        device_type(8), VISION, module="vision", peak_nbytes=lambda _: 1, memory_nbytes=1, splits_tensors=False
    )
    assert degrees_of(encoder.columns) == [Degrees(n) for n in range(1, 9)]
    assert encoder.pruned[PruneReason.WHOLE] == sum(8 // tp for tp in (2, 4, 8))
    backbone, _ = backbone_columns(device_type(8), BACKBONE, global_batch_size=64, splits_tensors=False)
    assert {each.tp for each in degrees_of(backbone)} == {1}
    assert {each.pp for each in degrees_of(backbone)} == set(range(1, 9))


def test_an_encoder_that_does_not_fit_says_by_how_much() -> None:
    found = enumerate_encoder(
        device_type(4), VISION, module="vision", peak_nbytes=lambda d: 100 // d.tp, memory_nbytes=30
    )
    assert {each.tp for each in degrees_of(found.columns)} == {4} and found.least_peak_nbytes is None
    none = enumerate_encoder(
        device_type(4), VISION, module="vision", peak_nbytes=lambda d: 100 // d.tp, memory_nbytes=20
    )
    assert len(none) == 0 and none.least_peak_nbytes == 25
    assert none.pruned[PruneReason.MEMORY] == 4 + 2 + 1


@given(st.integers(1, 20_000))
def test_numbers_of_replicas_are_at_most_a_64th_apart_and_few(most: int) -> None:
    found = data_degrees(most)
    assert found[0] == 1 and found[-1] <= most and len(found) <= 700
    after = np.append(found, most + 1)
    assert (np.diff(after) >= 1).all() and (np.diff(found) <= np.maximum(1, found[:-1] / 64)).all()
    assert most - found[-1] <= most / 64
    assert set(range(1, min(most, 128) + 1)) <= set(found.tolist())
    assert {8 * node for node in range(1, min(most, 1024) // 8 + 1)} <= set(found.tolist()), "whole nodes are there"


def test_a_module_need_not_fill_its_last_node() -> None:
    columns, _ = backbone_columns(device_type(251), BACKBONE, global_batch_size=256)
    assert {251, 250, 249} & set(columns.devices.tolist()) and 28 * 8 in columns.devices
    encoder = enumerate_encoder(device_type(99), VISION, module="vision", peak_nbytes=lambda _: 1, memory_nbytes=1)
    assert degrees_of(encoder.columns)[98] == Degrees(99)


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
