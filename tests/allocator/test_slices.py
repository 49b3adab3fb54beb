"""The planner's partition: the configured one for its own pipeline degree, balanced for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator import monolithic
from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.degrees import degree_faults
from flowtrain.allocator.slices import Slices, layers_of_ranks
from flowtrain.errors import ConfigError
from flowtrain.pipeline.partition import split_layers
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import BACKBONE, cluster, request, roofline_surrogate

UNEVEN = Slices(counts=(4, 20, 4, 4))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(24, 60))
def test_a_rank_has_the_layers_of_all_its_stages(pp: int, chunks: int, num_layers: int) -> None:
    ranks, stages = layers_of_ranks(Slices(chunks), num_layers, pp), split_layers(num_layers, pp * chunks)
    assert sorted(layer for layers in ranks for layer in layers) == list(range(num_layers)) and len(ranks) == pp
    assert list(ranks[0]) == [layer for stage in range(0, pp * chunks, pp) for layer in stages[stage]]


def test_a_given_partition_is_for_its_own_degree() -> None:
    assert [len(layers) for layers in layers_of_ranks(UNEVEN, BACKBONE.num_layers, 4)] == [4, 20, 4, 4]
    assert [len(layers) for layers in layers_of_ranks(UNEVEN, BACKBONE.num_layers, 2)] == [16, 16]
    with pytest.raises(ConfigError, match=r"pipeline\.partition \[4, 20, 4, 4\] has 32 layers"):
        UNEVEN.partition(40, 4)


def test_a_partition_with_encoder_layers_is_for_mixed_stages_alone() -> None:
    """As in a run with ``mode: monolithic`` and ``pipeline.encoder_layers: mixed``."""
    mixed = Slices(counts=(20, 36), counts_encoder=True)
    asked = replace(request(cluster(h200=2)), slices=mixed)
    assert roofline_surrogate(asked).rate(Candidate("backbone", "h200", Degrees(1, 2, 1))) > 0.0, "balanced without it"
    assert monolithic.places(asked, 2) == ("mixed",)
    first, last = monolithic.rank_loads(asked, 2, "mixed").layers
    assert (first, last) == (0.0, 32.0)
    decoder = replace(asked, slices=Slices(counts=(20, 12)))
    assert monolithic.places(decoder, 2) == ("first", "own")


def test_rate_and_memory_follow_a_given_partition() -> None:
    even = request(cluster(h200=64))
    uneven = replace(even, slices=UNEVEN)
    at, other = (Candidate("backbone", "h200", Degrees(1, pp, 1)) for pp in (4, 2))
    surrogates = [roofline_surrogate(each) for each in (even, uneven)]
    computing = [float(each.step_time(at).computing[0]) for each in surrogates]
    assert computing[1] == pytest.approx(20 / 8 * computing[0], rel=0.1), "the longest stage sets the pace"
    assert uneven.peak_nbytes(at) > 1.5 * even.peak_nbytes(at), "the fullest rank is in the middle"
    assert uneven.peak_nbytes(other) == even.peak_nbytes(other)
    assert surrogates[1].rate(other) == surrogates[0].rate(other)


def test_words_for_single_layers_count_where_the_layers_are() -> None:
    """The first half of the layers keeps all: the first of two ranks is the fullest."""
    kept, recomputed = ("none",) * 16, ("full",) * 16
    asked = request(cluster(h200=64))
    at = Candidate("backbone", "h200", Degrees(1, 2, 1))
    words = {
        "full": "full",
        "none": "none",
        "first kept": kept + recomputed,
        "second kept": recomputed + kept,
        "all kept": 2 * kept,
    }
    memory = {
        name: replace(asked, setup=replace(asked.setup, activation_checkpointing=word)).backbone_memory(at)
        for name, word in words.items()
    }
    assert memory["all kept"] == memory["none"]
    assert memory["full"].peak < memory["second kept"].peak < memory["first kept"].peak
    assert memory["first kept"].activations == memory["none"].activations, (
        "two microbatches in flight on the first rank"
    )


def test_the_first_layers_are_on_the_first_rank() -> None:
    slices = Slices(first_layers=3)
    assert [len(layers) for layers in layers_of_ranks(slices, 8, 4)] == [3, 2, 2, 1]
    assert slices.most_ranks(8) == 6 and Slices(2, first_layers=3).most_ranks(8) == 3
    spec = replace(BACKBONE, deepstack_layers=3)
    assert not degree_faults(Degrees(pp=spec.most_stages), spec)
    (fault,) = degree_faults(Degrees(pp=spec.most_stages + 1), spec)
    assert "of which the first 3 must lie in one stage" in fault.text
