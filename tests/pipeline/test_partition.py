"""The layers of stages and ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pipeline.partition import layers_by_rank, split_layers


@given(st.integers(1, 12), st.integers(0, 60))
def test_stages_cover_the_layers_evenly_and_the_ends_are_not_the_longest(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert max(lengths) - min(lengths) <= 1
    if num_layers % num_stages and num_stages - num_layers % num_stages >= 2:
        assert lengths[0] == lengths[-1] == min(lengths)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(24, 60))
def test_a_rank_has_the_layers_of_all_its_stages(pp: int, chunks: int, num_layers: int) -> None:
    layers, stages = layers_by_rank(num_layers, pp, chunks), split_layers(num_layers, pp * chunks)
    assert sum(layers) == num_layers and len(layers) == pp
    assert layers[0] == sum(len(stages[stage]) for stage in range(0, pp * chunks, pp))
