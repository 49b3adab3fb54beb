"""Interleaved 1F1B: the surrogate's fill is that of the action lists that ranks run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.candidates import Candidate, CandidateColumns, PruneReason
from flowtrain.allocator.degrees import degree_faults
from flowtrain.allocator.request import enumerate_module
from flowtrain.allocator.slices import Slices
from flowtrain.allocator.surrogate import Surrogate, fill_slots
from flowtrain.pipeline.partition import build_partition
from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import BACKBONE, cluster, request, roofline_surrogate
from tests.pipeline.test_schedules import makespan

SLOT_S = 3.0
"""Forward 1 and backward 2, as in ``makespan``."""


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 4))
def test_the_fill_is_that_of_the_action_lists(pp: int, num_microbatches: int, chunks: int) -> None:
    chunks = 1 if pp == 1 else chunks
    fill = float(fill_slots(np.array([pp]), np.array([float(num_microbatches)]), chunks)[0])
    lists = one_f_one_b(build_partition(pp * chunks, pp, chunks), num_microbatches)
    assert makespan(lists, num_microbatches, chunks) == pytest.approx(SLOT_S * (num_microbatches + fill))


def surrogate(chunks: int) -> Surrogate:
    asked = request(cluster(h200=64))
    plain = roofline_surrogate(asked)
    return Surrogate(asked.cluster, asked.model, asked.workload, asked.setup, plain.times, 0.8, Slices(chunks))


def test_chunks_divide_the_fill_and_multiply_the_transfers() -> None:
    candidate = Candidate("backbone", "h200", Degrees(4, 4, 1))
    plain, interleaved = (surrogate(chunks).step_time(candidate) for chunks in (1, 2))
    assert interleaved.computing == pytest.approx(plain.computing)
    assert interleaved.transfers == pytest.approx(2 * plain.transfers)
    slots = {1: plain, 2: interleaved}
    for chunks, step in slots.items():
        asked, count = request(cluster(h200=64)), step.num_microbatches
        tokens = asked.workload.fullest_tokens(np.array([4])) / count
        mean = count * surrogate(chunks).stages_s(CandidateColumns.of(candidate), tokens)[1]
        others = (4 * mean - step.computing) / 3 + step.transfers + step.gathering
        assert step.fill == pytest.approx(3 / chunks / step.num_microbatches * others)


def test_only_what_a_run_takes_is_a_candidate() -> None:
    asked = request(cluster(h200=24))
    every, chunked = (
        enumerate_module(replace(asked, slices=Slices(chunks)), "backbone", asked.cluster["h200"]) for chunks in (1, 3)
    )
    degrees = [Degrees(*each) for each in zip(chunked.columns.dp, chunked.columns.pp, chunked.columns.tp, strict=True)]
    assert degrees and all(not degree_faults(each, BACKBONE, chunks_per_rank=3) for each in degrees)
    assert max(each.pp for each in degrees) == 10 and min(each.pp for each in degrees) == 2
    assert chunked.pruned[PruneReason.CHUNKS] > 0 and PruneReason.CHUNKS not in every.pruned
    assert chunked.pruned[PruneReason.LAYERS] > every.pruned.get(PruneReason.LAYERS, 0)


def test_interleaving_keeps_more_in_memory() -> None:
    asked = request(cluster(h200=64))
    plain, interleaved = (
        replace(asked, slices=Slices(chunks)).peak_nbytes(Candidate("backbone", "h200", Degrees(1, 4, 1)))
        for chunks in (1, 2)
    )
    assert interleaved > plain
