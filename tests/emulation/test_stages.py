"""Stages of an emulated rank: what its actions wait for."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest

from flowtrain.emulation.stages import EmulatedStages
from flowtrain.pipeline.actions import parse_action
from flowtrain.types.plan import Degrees
from tests.pipeline.partitions import even


def stages_of(times: Mock, clock: Mock, pp: int) -> EmulatedStages:
    return EmulatedStages(
        0,
        Degrees(pp=pp),
        even(pp),
        times,
        Mock(),
        clock,
        encoder="",
        tower=None,
        gathers_each=False,
        reduces_each=False,
        recomputed={},
        record=None,
    )


@pytest.mark.parametrize("launch_s", [0.0, 0.25])
def test_a_rank_is_busy_while_it_starts_transfers(launch_s: float) -> None:
    times = Mock(shard_size=1, launch_s=launch_s, transfer_s=lambda work: 1.0)
    clock = Mock(now=lambda: 10.0, scaled=lambda seconds: seconds)
    stages = stages_of(times, clock, pp=2)
    batch = Mock(sequence_lengths=(3,), feature_index=(), num_target_tokens=1)
    actions = [parse_action(line) for line in ("isend s0 m1 activation ->1", "irecv s0 m0 gradient <-1")]
    stages.start_transfers([(action, batch) for action in actions])
    assert clock.compute.mock_calls == ([call(2 * launch_s, 10.0)] if launch_s else [])


def test_a_units_first_backward_takes_less() -> None:
    times = Mock(
        shard_size=1,
        gathers=False,
        backward_s=lambda stage, work: 2.0,
        first_backward_s=lambda stage, backward: 0.25 * backward,
        ends_s=lambda stage: (0.0, 0.0),
    )
    clock = Mock(now=lambda: 10.0, scaled=lambda seconds: seconds)
    stages = stages_of(times, clock, pp=1)
    batch = Mock(sequence_lengths=(3,), feature_index=(), num_target_tokens=1, images=None)
    for _ in range(2):
        stages.begin([])
        for line in ("B s0 m0", "B s0 m1"):
            stages.backward_stage(parse_action(line), batch, is_last=False)
    assert clock.compute.mock_calls == [call(1.5, 10.0), call(2.0, 10.0)] * 2
