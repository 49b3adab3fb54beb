"""Adaptive recomputation: the least that fits, by brute force; what a layer saves; one more step up."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.costs.training_setup import MicrobatchSize, TrainingSetup
from flowtrain.pipeline.actions import MemoryStrategy, StageModule
from flowtrain.pipeline.partition import EncoderSplit, build_partition
from flowtrain.pipeline.rank_chunks import memory_of_rank, rank_chunks
from flowtrain.pipeline.recompute import Recomputable, adaptive_recomputation, least_recomputed, stepped_up
from tests.allocator.worlds import MODEL

ENCODER, BACKBONE = StageModule.ENCODER, StageModule.BACKBONE
SIZE = MicrobatchSize(4096, 2048, 2048, 2048)
SMALL = replace(
    MODEL,
    backbone=replace(MODEL.backbone, num_layers=4),
    encoders={"vision": replace(MODEL.encoders["vision"], num_layers=3)},
)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1.0, 2.0, 3.5])), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.integers(0, 60),
)
def test_the_cheapest_choice_that_fits_and_the_fewest_layers_of_equal_ones(
    modules: list[tuple[int, float]], saved: list[int], usable: int
) -> None:
    layers = [Recomputable(*each) for each in modules]

    def peak(counts: tuple[int, ...]) -> int:
        working = 3 if any(counts) else 0  # the first recomputed layer takes something in addition
        return 60 + working - sum(count * each for count, each in zip(counts, saved, strict=False))

    def cost(counts: tuple[int, ...]) -> float:
        return sum(count * each.layer_cost for count, each in zip(counts, layers, strict=True))

    fitting = [each for each in product(*(range(num + 1) for num, _ in modules)) if peak(each) <= usable]
    found = least_recomputed(layers, peak, usable)
    if not fitting:
        assert found is None
        return
    assert found is not None and peak(found) <= usable
    assert cost(found) == min(map(cost, fitting))
    assert sum(found) == min(sum(each) for each in fitting if cost(each) == cost(found))


@pytest.mark.parametrize("place", ["first", "mixed", "own"])
@given(share=st.floats(0.0, 1.1), setup=st.builds(TrainingSetup, gradient_reduction=st.just("microbatch")))
def test_every_rank_recomputes_the_fewest_layers_that_fit(place: str, share: float, setup: TrainingSetup) -> None:
    """Brute force over every set of a rank's layers: no smaller set fits, whichever layers it has."""
    partition = build_partition(4, 2, encoder=EncoderSplit(3, place, 1.0, is_trained=True))  # type: ignore[arg-type]
    helds = [rank_chunks(partition, rank, 4) for rank in range(2)]

    def peak(rank: int, encoder: tuple[str, ...], backbone: tuple[str, ...]) -> int:
        words = replace(setup, encoder_checkpointing=encoder, activation_checkpointing=backbone)
        return memory_of_rank(SMALL, helds[rank], words, SIZE).peak

    limits = [(peak(rank, ("full",) * 3, ("full",) * 4), peak(rank, ("none",) * 3, ("none",) * 4)) for rank in range(2)]
    usable = [int(low + share * (high - low)) for low, high in limits]
    chosen = adaptive_recomputation(
        partition, SMALL, setup, SIZE, usable, adaptive={ENCODER, BACKBONE}, num_microbatches=4
    )
    assert chosen.encoder is not None and chosen.backbone is not None
    encoder_cost = SIZE.num_tower_tokens * SMALL.encoders["vision"].layer_matmul_parameters
    backbone_cost = SIZE.num_tokens * SMALL.backbone.layer_matmul_parameters
    for rank, found in enumerate(chosen.ranks):
        assert found.peak_nbytes == peak(rank, chosen.encoder, chosen.backbone)
        own = {
            module: [layer for stage in partition.of_rank(rank) if stage.module is module for layer in stage.layers]
            for module in (ENCODER, BACKBONE)
        }
        if not found.fits:
            continue

        def cost(encoder: tuple[str, ...], backbone: tuple[str, ...], own: dict = own) -> int:
            counted = sum(encoder[layer] == "full" for layer in own[ENCODER]) * encoder_cost
            return counted + sum(backbone[layer] == "full" for layer in own[BACKBONE]) * backbone_cost

        least = cost(chosen.encoder, chosen.backbone)
        for words in product(("none", "full"), repeat=len(own[ENCODER]) + len(own[BACKBONE])):
            encoder, backbone = ["none"] * 3, ["none"] * 4
            for layer, word in zip(own[ENCODER], words, strict=False):
                encoder[layer] = word
            for layer, word in zip(own[BACKBONE], words[len(own[ENCODER]) :], strict=True):
                backbone[layer] = word
            if cost(tuple(encoder), tuple(backbone)) < least:
                assert peak(rank, tuple(encoder), tuple(backbone)) > usable[rank]


def test_a_module_that_is_not_adaptive_keeps_its_word() -> None:
    partition = build_partition(4, 1, encoder=EncoderSplit(3, "first", 1.0, is_trained=True))
    full = TrainingSetup(activation_checkpointing="full")
    chosen = adaptive_recomputation(partition, SMALL, full, SIZE, [1 << 40], adaptive={BACKBONE}, num_microbatches=1)
    assert (chosen.encoder, chosen.backbone) == (None, ("none",) * 4)
    assert list(chosen.ranks[0].recomputed) == [BACKBONE] and chosen.ranks[0].fits
    chosen = adaptive_recomputation(partition, SMALL, full, SIZE, [1], adaptive={ENCODER}, num_microbatches=1)
    assert (chosen.encoder, chosen.backbone) == (("full",) * 3, None) and not chosen.ranks[0].fits
    assert "3 of 3 encoder layers" in chosen.text


def test_a_frozen_encoder_recomputes_nothing() -> None:
    partition = build_partition(4, 2, encoder=EncoderSplit(3, "first", 1.0))
    chosen = adaptive_recomputation(
        partition, SMALL, TrainingSetup(), SIZE, [1, 1], adaptive={ENCODER, BACKBONE}, num_microbatches=2
    )
    assert chosen.encoder == ("none",) * 3 and chosen.backbone == ("full",) * 4


def test_a_layer_saves_what_it_keeps_less_its_input_in_every_microbatch_in_flight() -> None:
    partition = build_partition(4, 2)
    chosen = adaptive_recomputation(
        partition, SMALL, TrainingSetup(), SIZE, [1 << 40] * 2, adaptive={BACKBONE}, num_microbatches=4
    )
    first, last = (rank.saved_nbytes[BACKBONE] for rank in chosen.ranks)
    assert first == 2 * last > 0


@given(st.integers(1, 50), st.integers(0, 3))
def test_a_step_up_covers_what_was_missing_with_no_layer_more(excess: int, recomputed: int) -> None:
    stages = [(ENCODER, 0, 3), (BACKBONE, 0, 4)]
    saved = {ENCODER: 5, BACKBONE: 7}
    memory = {(ENCODER, 0): MemoryStrategy.KEEP, (BACKBONE, 0): MemoryStrategy.KEEP, (BACKBONE, 1): MemoryStrategy.KEEP}
    changed = stepped_up(memory, stages, saved, excess)
    assert changed is not None and changed[BACKBONE, 1] is MemoryStrategy.KEEP
    kinds = {module: changed[module, 0].of_layers(count) for module, _, count in stages}
    counts = {module: each.count("recompute") for module, each in kinds.items()}
    assert all(list(each) == sorted(each, reverse=True) for each in kinds.values()), "the first layers"
    gained = sum(saved[module] * count for module, count in counts.items())
    assert gained >= min(excess, 3 * 5 + 4 * 7)
    assert gained - saved[BACKBONE if counts[BACKBONE] else ENCODER] < excess


def test_no_step_up_is_left_where_all_is_recomputed() -> None:
    assert stepped_up({(BACKBONE, 0): MemoryStrategy.RECOMPUTE}, [(BACKBONE, 0, 4)], {BACKBONE: 5}, 1) is None
