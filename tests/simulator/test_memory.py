"""Memory over a step: it ends where it began, and its peak is what the schedule keeps in flight."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pipeline.actions import ActionKind
from flowtrain.pipeline.schedules.build import build_schedule
from flowtrain.pipeline.schedules.one_f_one_b import in_flight_by_chunk, one_f_one_b
from flowtrain.simulator.lists import program_of
from flowtrain.simulator.memory import held_nbytes, peak_nbytes
from flowtrain.simulator.program import Op, side_by_side
from tests.pipeline.partitions import even
from tests.simulator.test_engine import any_schedule


@given(drawn=any_schedule(), seed=st.integers(0, 2**32 - 1), dp=st.integers(1, 2))
def test_it_is_what_forwards_keep_until_their_backwards(drawn, seed, dp):
    lists, partition = drawn
    random, one = Random(seed), program_of(lists, partition)
    program = one if dp == 1 else side_by_side([one] * dp)
    columns = program.computations
    kept = np.array([random.randint(0, 1000) for _ in range(len(columns))])
    held = held_nbytes(program, kept)
    assert (held >= 0).all()
    frozen = {(stage.module, stage.index) for stage in partition.stages if not stage.has_backward}
    for rank in range(program.num_ranks):
        actions = lists[rank % len(lists)]
        numbers = iter(np.flatnonzero(columns.rank == rank).tolist())
        open_nbytes = {}
        for action in actions:
            if not action.kind.is_compute:
                continue
            number = next(numbers)
            key = action.module, action.stage, action.microbatch, action.sub_microbatch
            if action.kind is ActionKind.FORWARD_STAGE and key[:2] not in frozen:
                open_nbytes[key] = int(kept[number])
            assert held[columns.op[number]] == sum(open_nbytes.values())
            if action.kind is ActionKind.BACKWARD_STAGE:
                del open_nbytes[key]
        assert not open_nbytes


@given(pp=st.integers(1, 4), chunks=st.integers(1, 3), num_microbatches=st.integers(1, 12))
def test_the_peak_of_even_microbatches_is_what_is_in_flight(pp, chunks, num_microbatches):
    if chunks > 1 and num_microbatches < pp:
        num_microbatches += pp
    partition = even(pp, chunks)
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    lists = build_schedule(name, partition, num_microbatches=num_microbatches, training=True)
    program = program_of(lists, partition)
    ones = np.ones(len(program.computations), dtype=np.int64)
    peaks = peak_nbytes(program, ones, 0 * ones)
    expected = [sum(in_flight_by_chunk(partition, rank, num_microbatches)) for rank in range(pp)]
    assert peaks.tolist() == expected


def test_what_a_computation_needs_while_it_runs_is_added():
    partition = even(1)
    program = program_of(one_f_one_b(partition, 1), partition)
    assert (program.op[program.computations.op] == Op.COMPUTE).all()
    peak = peak_nbytes(program, np.array([10, 0]), np.array([3, 5]))
    assert peak.tolist() == [pytest.approx(15)]
