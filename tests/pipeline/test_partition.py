"""The layers of stages and ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pipeline.partition import split_layers


@given(st.integers(1, 12), st.integers(0, 60))
def test_stages_cover_the_layers_evenly_and_the_ends_are_not_the_longest(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert max(lengths) - min(lengths) <= 1
    if num_layers % num_stages and num_stages - num_layers % num_stages >= 2:
        assert lengths[0] == lengths[-1] == min(lengths)
