"""Programs of named schedules: long lists made of short ones are those that are built as a whole."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.build import ScheduleName, build_schedule
from flowtrain.simulator.lists import program_of
from flowtrain.simulator.named import named_program, repeated_ops
from flowtrain.simulator.program import Meets
from tests.pipeline.partitions import ANY_PARTITION, even, with_encoder

MEETS = st.none() | st.builds(Meets, st.sampled_from(["each", "once", "never"]), st.booleans())


def schedule_of(partition: Partition) -> ScheduleName:
    ranks = [stage.rank for stage in partition.of_module(StageModule.BACKBONE)]
    return "1f1b" if len(set(ranks)) == len(ranks) else "interleaved_1f1b"


def assert_equal(one: Any, other: Any) -> None:
    for each in fields(one):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if is_dataclass(mine):
            assert_equal(mine, theirs)
        else:
            np.testing.assert_array_equal(mine, theirs, each.name)


@given(partition=ANY_PARTITION, num_microbatches=st.integers(1, 90), meets=MEETS)
@settings(max_examples=60)
def test_a_program_is_that_of_its_lists(partition, num_microbatches, meets):
    schedule = schedule_of(partition)
    lists = build_schedule(schedule, partition, num_microbatches=num_microbatches, training=True)
    assert_equal(
        named_program(schedule, partition, num_microbatches, meets),
        program_of(lists, partition, meets),
    )


@pytest.mark.parametrize("remainder", range(4))
@pytest.mark.parametrize(
    "partition",
    [
        even(1),
        even(4),
        even(4, chunks=2),
        even(4, chunks=3),
        with_encoder(4, "first"),
        with_encoder(4, "mixed", is_trained=True),
        with_encoder(4, "own", chunks=2),
    ],
    ids=["alone", "plain", "chunks2", "chunks3", "first", "mixed", "own"],
)
def test_long_lists_come_from_short_ones(partition, remainder):
    schedule, count = schedule_of(partition), 160 + remainder
    repeated = repeated_ops(schedule, partition, count, None)
    assert repeated is not None
    lists = build_schedule(schedule, partition, num_microbatches=count, training=True)
    assert_equal(repeated.program(), program_of(lists, partition))


def test_lists_that_never_repeat_are_built_as_a_whole():
    partition = with_encoder(2, "mixed", cost=3.0)
    assert repeated_ops("1f1b", partition, 60, None) is None
