"""Numbers of ranks, slices of layers, and degrees that a model does not allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.degrees import degree_faults, encoder_degree_faults
from flowtrain.costs.model_spec import TransformerSpec, VisionSpec
from flowtrain.errors import FaultCode
from flowtrain.types.plan import Degrees

SPEC = TransformerSpec(
    num_layers=4, hidden_size=16, intermediate_size=24, num_heads=8, num_kv_heads=4, head_dim=8, vocab_size=64
)
degrees = st.builds(Degrees, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


@given(degrees)
def test_every_rank_has_its_coordinates_and_tensor_groups_are_neighbours(degrees: Degrees) -> None:
    places = [degrees.coordinates(rank) for rank in range(degrees.world_size)]
    assert places == sorted(set(places)) and [degrees.rank(*place) for place in places] == list(range(len(places)))
    assert all(place[:2] == places[k - k % degrees.tp][:2] for k, place in enumerate(places))


@pytest.mark.parametrize(
    ("degrees", "chunks", "spec", "said"),
    [
        (Degrees(tp=3), 1, SPEC, "attention heads (8)"),
        (Degrees(tp=8), 1, SPEC, "key-value heads (4)"),
        (Degrees(tp=4), 1, replace(SPEC, intermediate_size=26), "intermediate_size (26)"),
        (Degrees(dp=2, tp=2), 1, replace(SPEC, vocab_size=65), "vocab_size (65)"),
        (Degrees(dp=2, tp=4), 1, replace(SPEC, hidden_size=18), "hidden_size (18)"),
        (Degrees(), 2, SPEC, "pipeline.chunks (2) needs"),
        (Degrees(pp=3), 2, SPEC, "layers (4)"),
    ],
)
def test_what_does_not_fit_is_said(degrees: Degrees, chunks: int, spec: TransformerSpec, said: str) -> None:
    assert any(said in fault.text for fault in degree_faults(degrees, spec, chunks_per_rank=chunks))


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(dp=7), Degrees(pp=4), Degrees(2, 2, 4), Degrees(1, 1, 4)])
def test_what_fits_has_no_faults(degrees: Degrees) -> None:
    assert degree_faults(degrees, SPEC) == []


def test_a_single_replica_may_share_a_vocabulary_unevenly() -> None:
    assert degree_faults(Degrees(tp=2), replace(SPEC, vocab_size=65)) == []


TOWER = VisionSpec(
    num_layers=2,
    hidden_size=32,
    intermediate_size=47,
    num_heads=6,
    patch_size=14,
    num_channels=3,
    num_prefix_tokens=0,
    outside_parameters=0,
)


def test_a_tower_is_split_by_its_heads_alone() -> None:
    assert [tp for tp in range(1, 8) if not encoder_degree_faults("vit", tp, TOWER, "vit", ("vit",))] == [1, 2, 3, 6]
    (fault,) = encoder_degree_faults("vit", 4, TOWER)
    assert (fault.key, fault.code) == ("encoders.vit.tensor_parallel_size", FaultCode.DEGREES)
    assert fault.text == "encoders.vit.tensor_parallel_size (4) does not divide the tower's attention heads (6)"


def test_a_tower_without_a_plan_is_not_split() -> None:
    assert encoder_degree_faults("vit", 1, TOWER, "beit", ("vit",)) == []
    (fault,) = encoder_degree_faults("vit", 2, TOWER, "beit", ("clip", "vit"))
    assert fault.text == (
        "encoders.vit.tensor_parallel_size (2) above 1 has no plan for a tower of type 'beit'; set it to 1, or use one "
        "of clip, vit"
    )
