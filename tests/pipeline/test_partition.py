"""Which layers lie on which stage: all of them, once, in order, as evenly as they can."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.partition import EncoderSplit, balanced_counts, build_partition, split_layers
from tests.pipeline.partitions import PLACES

ENCODER, BACKBONE = StageModule.ENCODER, StageModule.BACKBONE
SPLIT = st.none() | st.builds(
    EncoderSplit, st.integers(1, 9), st.sampled_from(PLACES), st.sampled_from([0.1, 1.0, 2.5]), st.booleans()
)


@given(st.integers(1, 12), st.integers(0, 60))
def test_stages_cover_the_layers_evenly_and_the_ends_are_not_the_longest(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert max(lengths) - min(lengths) <= 1
    if num_layers % num_stages and num_stages - num_layers % num_stages >= 2:
        assert lengths[0] == lengths[-1] == min(lengths)


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 3), SPLIT)
def test_a_partition_has_every_layer_once_and_in_order(
    more: int, pp_size: int, chunks: int, encoder: EncoderSplit | None
) -> None:
    assume(encoder is None or encoder.place != "own" or encoder.num_layers >= pp_size)
    num_layers = pp_size * chunks + more
    partition = build_partition(num_layers, pp_size, chunks, encoder=encoder)
    sizes = {ENCODER: 0 if encoder is None else encoder.num_layers, BACKBONE: num_layers}
    for module, size in sizes.items():
        stages = partition.of_module(module)
        assert [stage.index for stage in stages] == list(range(len(stages)))
        assert [layer for stage in stages for layer in stage.layers] == list(range(size))
    assert partition.stages == (*partition.of_module(ENCODER), *partition.of_module(BACKBONE))
    visits = list(dict.fromkeys((stage.segment, stage.rank) for stage in partition.stages))
    assert visits == [(segment, rank) for segment in range(partition.num_segments) for rank in range(pp_size)]
    assert partition.num_segments == chunks + (encoder is not None and encoder.place == "own")
    assert partition.frozen == ({ENCODER} if encoder is not None and not encoder.is_trained else set())
    assert partition.entry_rank == 0 and partition.token_rank == partition.of_module(BACKBONE)[0].rank


@given(st.lists(st.sampled_from([0.25, 1.0, 2.0, 3.5]), min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 1))
def test_the_costliest_stage_costs_as_little_as_possible(costs: list[float], num_stages: int, least: int) -> None:
    assume(num_stages * least <= len(costs))
    counts = balanced_counts(costs, num_stages, least)
    assert len(counts) == num_stages and sum(counts) == len(costs) and min(counts) >= least
    total = [0.0, *accumulate(costs)]

    def worst(ends: tuple[int, ...]) -> float:
        return max(total[end] - total[start] for start, end in pairwise((0, *ends, len(costs))))

    cuts = combinations(sorted([*range(len(costs) + 1)] * num_stages), num_stages - 1)
    every = (ends for ends in set(cuts) if all(b - a >= least for a, b in pairwise((0, *ends, len(costs)))))
    assert worst(tuple(accumulate(counts))[:-1]) == min(map(worst, every))


def test_counts_of_the_configuration_are_kept_and_mixed_ones_include_the_encoder() -> None:
    plain = build_partition(6, 2, counts=(2, 4))
    assert [len(stage.layers) for stage in plain.stages] == [2, 4]
    mixed = build_partition(6, 2, counts=(7, 3), encoder=EncoderSplit(4, "mixed", 1.0))
    assert [(stage.module, len(stage.layers), stage.rank) for stage in mixed.stages] == [
        *((ENCODER, 4, 0), (BACKBONE, 3, 0), (BACKBONE, 3, 1))
    ]
    for counts, encoder in (((3, 4), None), ((6,), None), ((6, 0), None), ((2, 4), EncoderSplit(4, "mixed", 1.0))):
        with pytest.raises(ConfigError, match=r"pipeline.partition .* layers"):
            build_partition(6, 2, counts=counts, encoder=encoder)
    with pytest.raises(ConfigError, match=r"pipeline.encoder_layers \('own'\) needs an encoder layer for each of"):
        build_partition(6, 3, encoder=EncoderSplit(2, "own", 1.0))


def test_a_costly_encoder_in_the_first_stage_leaves_it_fewer_decoder_layers() -> None:
    partition = build_partition(12, 3, encoder=EncoderSplit(8, "first", 0.5))
    assert [len(stage.layers) for stage in partition.of_module(BACKBONE)] == [2, 5, 5]


@pytest.mark.parametrize("place", [None, "first", "mixed"])
def test_more_stages_than_layers_are_refused(place: str | None) -> None:
    encoder = None if place is None else EncoderSplit(3, place, 1.0)  # type: ignore[arg-type]
    num_layers = 6 if place == "mixed" else 3
    with pytest.raises(
        ConfigError, match=rf"_size \(4\) times pipeline.chunks \(2\) is more than the {num_layers} lay"
    ):
        build_partition(3, 4, 2, encoder=encoder)


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 3), SPLIT, st.integers(1, 4))
def test_the_first_layers_stay_in_one_stage(
    more: int, pp_size: int, chunks: int, encoder: EncoderSplit | None, first_layers: int
) -> None:
    assume(encoder is None or encoder.place != "own" or encoder.num_layers >= pp_size)
    num_layers = pp_size * chunks + first_layers - 1 + more
    partition = build_partition(num_layers, pp_size, chunks, encoder=encoder, first_layers=first_layers)
    stages = partition.of_module(BACKBONE)
    assert len(stages[0].layers) >= first_layers
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    if first_layers == 1:
        assert partition == build_partition(num_layers, pp_size, chunks, encoder=encoder)


def test_too_few_layers_in_the_first_stage_are_refused() -> None:
    assert [len(stage.layers) for stage in build_partition(6, 3, first_layers=3).stages] == [3, 2, 1]
    assert [len(stage.layers) for stage in build_partition(12, 3, first_layers=3).stages] == [4, 4, 4]
    with pytest.raises(ConfigError, match=r"puts 2 decoder layers .* each of the first 3; give that"):
        build_partition(6, 3, counts=(2, 2, 2), first_layers=3)
    with pytest.raises(ConfigError, match=r"the 6 layers .* the first 3 decoder layers must lie in one stage"):
        build_partition(6, 5, first_layers=3)
    mixed = EncoderSplit(4, "mixed", 1.0)
    assert len(build_partition(6, 2, counts=(5, 5), encoder=mixed).of_module(BACKBONE)[0].layers) == 1
    with pytest.raises(ConfigError, match="puts 1 decoder layers"):
        build_partition(6, 2, counts=(5, 5), encoder=mixed, first_layers=3)
