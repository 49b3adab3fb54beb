"""Stages of an emulated rank: what its actions wait for."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest

from flowtrain.emulation.stages import EmulatedStages
from flowtrain.pipeline.actions import parse_action
from flowtrain.types.plan import Degrees
from tests.pipeline.partitions import even


@pytest.mark.parametrize("launch_s", [0.0, 0.25])
def test_a_rank_is_busy_while_it_starts_transfers(launch_s: float) -> None:
    times = Mock(shard_size=1, launch_s=launch_s, transfer_s=lambda work: 1.0)
    clock = Mock(now=lambda: 10.0, scaled=lambda seconds: seconds)
    stages = EmulatedStages(
        0,
        Degrees(pp=2),
        even(2),
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
    batch = Mock(sequence_lengths=(3,), feature_index=(), num_target_tokens=1)
    actions = [parse_action(line) for line in ("isend s0 m1 activation ->1", "irecv s0 m0 gradient <-1")]
    stages.start_transfers([(action, batch) for action in actions])
    assert clock.compute.mock_calls == ([call(2 * launch_s, 10.0)] if launch_s else [])
