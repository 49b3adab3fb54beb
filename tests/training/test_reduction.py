"""When gradients are summed, if nobody configured it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.memory import backbone_memory
from flowtrain.allocator.slices import Slices
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.reduction import (
    RankNeed,
    _tower_tokens_per_row,
    choose_reduction,
    decide_reduction,
    predicted_peak_nbytes,
)
from flowtrain.types.plan import Degrees, GradientReduction
from flowtrain.types.samples import ImageLayout
from tests.allocator.worlds import MODEL, workload
from tests.training.ranks import CPU, make_config

GIB = 2**30


@given(st.lists(st.builds(RankNeed, st.integers(0, 99), st.integers(0, 99)), min_size=1))
def test_once_a_step_if_every_rank_has_room(ranks: list[RankNeed]) -> None:
    fits = all(rank.peak_nbytes <= rank.usable_nbytes for rank in ranks)
    assert choose_reduction(ranks).name == ("step" if fits else "microbatch")


def test_the_fullest_rank_is_named() -> None:
    ranks = [RankNeed(60 * GIB, 73 * GIB), RankNeed(50 * GIB, 36 * GIB), RankNeed(80 * GIB, 73 * GIB)]
    reason = "auto: once a step would take 50.0 GiB on the fullest rank, of 36.0 GiB usable"
    assert choose_reduction(ranks) == GradientReduction("microbatch", reason)


@pytest.mark.parametrize(
    ("configured", "decided"),
    [
        ("auto", GradientReduction("step", "auto: there is one replica")),
        ("microbatch", GradientReduction("microbatch", "as configured")),
    ],
)
def test_where_there_is_nothing_to_decide(configured: str, decided: GradientReduction) -> None:
    group = init_backbone_group(0, Degrees(), CPU)
    config = make_config(backbone={"path": "unused", "gradient_reduction": configured})
    assert decide_reduction(config, None, group) == decided  # type: ignore[arg-type]  # nobody looks at the model
    group.close()


def test_an_image_without_feature_rows_divides_nothing_by_zero() -> None:
    """SigLIP with ``feature_select: default``: the smallest image has one patch, and that is dropped."""
    encoder = SimpleNamespace(num_prefix_tokens=0)
    family = SimpleNamespace(
        encoder_names=("vision",),
        image_layout=lambda *_: ImageLayout(num_patches=1, num_rows=0, num_tokens=0),
        model_spec=SimpleNamespace(encoders={"vision": encoder}),
    )
    assert _tower_tokens_per_row(make_config(mode="monolithic"), family) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("degrees", "chunks"),
    [(Degrees(dp=4), 1), (Degrees(dp=2, tp=2), 1), (Degrees(dp=2, pp=4), 1), (Degrees(dp=2, pp=4), 2)],
)
def test_the_prediction_is_the_planners_for_the_fullest_microbatches(degrees: Degrees, chunks: int) -> None:
    schedule = {"schedule": "1f1b" if chunks == 1 else "interleaved_1f1b", "chunks": chunks}
    config = make_config(
        backbone={"path": "unused", "attention": "flash_attn", "activation_checkpointing": "full"},
        pipeline=schedule,
        model={"dtype": "bfloat16"},
        scheduler={"microbatch_tokens": 8192},
    )
    peaks = [
        predicted_peak_nbytes(config, MODEL, degrees, rank, shard_size=degrees.dp, on_cpu=False)
        for rank in range(degrees.pp)
    ]
    full = workload(
        microbatch_tokens=8192,
        fill=1.0,
        **dict.fromkeys(("lengths", "vision_lengths", "target_lengths"), np.full(2, 8192)),
        # As many microbatches as an interleaved schedule needs to have most of them in flight, and more than one.
        global_batch_size=degrees.dp * max(2, 2 * degrees.pp - 1),
    )
    setup = TrainingSetup(activation_checkpointing="full", gradient_reduction="step", shard_size=degrees.dp)
    assert max(peaks) == backbone_memory(MODEL, full, setup, degrees, Slices(chunks)).peak
