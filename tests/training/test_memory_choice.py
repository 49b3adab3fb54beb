"""When gradients are summed and what is sharded, if nobody configured it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.memory import backbone_memory
from flowtrain.allocator.slices import Slices
from flowtrain.config.run import RunConfig
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.training.memory_choice import (
    RankNeed,
    _tower_tokens_per_row,
    choose_reduction,
    choose_sharding,
    decide_reduction,
    decide_sharding,
    predicted_peak_nbytes,
    with_choices,
)
from flowtrain.training.mesh import init_backbone_group
from flowtrain.types.plan import Degrees, GradientReduction, Sharding
from flowtrain.types.samples import ImageLayout
from tests.allocator.worlds import MODEL, workload
from tests.training.ranks import CPU, Job, TinyFamily, make_config, run_jobs_on_ranks, run_ranks
from tests.training.test_trainer import STEPS_DP2

GIB = 2**30


@given(st.lists(st.builds(RankNeed, st.integers(0, 99), st.integers(0, 99)), min_size=1))
def test_once_a_step_if_every_rank_has_room(ranks: list[RankNeed]) -> None:
    fits = all(rank.peak_nbytes <= rank.usable_nbytes for rank in ranks)
    assert choose_reduction(ranks).name == ("step" if fits else "microbatch")
    assert choose_sharding(ranks).name == ("gradients" if fits else "full")


def test_the_fullest_rank_is_named() -> None:
    ranks = [RankNeed(60 * GIB, 73 * GIB), RankNeed(50 * GIB, 36 * GIB), RankNeed(80 * GIB, 73 * GIB)]
    reason = "auto: once a step would take 50.0 GiB on the fullest rank, of 36.0 GiB usable"
    assert choose_reduction(ranks) == GradientReduction("microbatch", reason)
    assert choose_sharding(ranks) == Sharding("full", reason.replace("once a step", "whole parameters"))


@pytest.mark.parametrize(
    ("configured", "decided"),
    [
        ("auto", GradientReduction("step", "auto: there is one replica")),
        ("microbatch", GradientReduction("microbatch", "as set in config.yaml")),
    ],
)
def test_where_there_is_nothing_to_decide(configured: str, decided: GradientReduction) -> None:
    group = init_backbone_group(0, Degrees(), CPU)
    config = make_config(backbone={"path": "unused", "gradient_reduction": configured})
    assert decide_reduction(config, None, group) == decided  # type: ignore[arg-type]  # nobody looks at the model
    group.close()


@pytest.mark.parametrize(
    ("configured", "decided"),
    [
        ("auto", Sharding("full", "auto: there is one replica, which has no shards")),
        ("gradients", Sharding("gradients", "as set in config.yaml")),
        ("hybrid", Sharding("hybrid", "as set in config.yaml")),
    ],
)
def test_where_there_is_no_sharding_to_decide(configured: str, decided: Sharding) -> None:
    group = init_backbone_group(0, Degrees(), CPU)
    config = make_config(backbone={"path": "unused", "sharding": configured})
    assert decide_sharding(config, None, group) == decided  # type: ignore[arg-type]  # nobody looks at the model
    group.close()


def peak(reduction: str, sharding: str, dtype: str, degrees: Degrees, microbatch_tokens: int = 4096) -> int:
    """Of the first pipeline rank."""
    config = make_config(
        backbone={"path": "unused", "sharding": sharding, "gradient_reduction": reduction},
        model={"dtype": dtype},
        scheduler={"microbatch_tokens": microbatch_tokens},
    )
    return predicted_peak_nbytes(config, MODEL, degrees, 0, shard_size=degrees.dp, on_cpu=False)


@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.builds(Degrees, dp=st.sampled_from([2, 8]), pp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2])),
    st.sampled_from([4096, 65536]),
)
def test_whole_parameters_are_given_up_before_whole_gradients(dtype: str, degrees: Degrees, tokens: int) -> None:
    """Each choice takes less than the one before it, so that the two decisions follow one order of preference."""
    first, second, third = (
        peak(reduction, sharding, dtype, degrees, tokens)
        for reduction, sharding in (("step", "gradients"), ("step", "full"), ("microbatch", "full"))
    )
    assert first > second > third
    assert (peak("auto", "gradients", dtype, degrees, tokens), peak("auto", "auto", dtype, degrees, tokens)) == (
        first,
        second,
    )
    if degrees.dp == 8:
        assert third < peak("microbatch", "gradients", dtype, degrees, tokens) < first, "a configured reduction counts"


def decide(
    rank: int, degrees: Degrees, host: str, port: int, listener: Any, config: RunConfig
) -> tuple[GradientReduction, Sharding]:
    """Body of one rank's process."""
    group = init_backbone_group(
        rank, degrees, CPU, host=host, port=port, listener=listener, start_timeout_s=300, collective_timeout_s=300
    )
    family: Any = TinyFamily()
    found = decide_reduction(config, family, group), decide_sharding(config, family, group)
    group.close()
    return found


@pytest.mark.processes
def test_ranks_with_room_keep_parameters_whole_for_the_same_bits() -> None:
    config = make_config(scheduler={"microbatch_tokens": 4096})
    (found, other) = run_ranks(2, config, decide)
    assert found == other and [each.name for each in found] == ["step", "gradients"]
    assert all(each.reason.startswith("auto: ") for each in found)
    for dtype in ("float32", "bfloat16"):
        jobs = [
            Job(
                with_choices(make_config(model={"dtype": dtype}), reduction, sharding),
                STEPS_DP2,
                eval_slots=STEPS_DP2[0],
            )
            for reduction in ("step", "microbatch")
            for sharding in ("full", "gradients")
        ]
        step_full, step_whole, each_full, each_whole = (outcomes[0] for outcomes in run_jobs_on_ranks(2, jobs))
        for full, whole in ((step_full, step_whole), (each_full, each_whole)):
            assert full.results == whole.results
            assert all(np.array_equal(weight, whole.weights[name]) for name, weight in full.weights.items())


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


def test_an_image_without_feature_rows_divides_nothing_by_zero() -> None:
    """SigLIP with ``feature_select: default``: the smallest image has one patch, and that is dropped."""
    encoder = SimpleNamespace(num_prefix_tokens=0)
    family = SimpleNamespace(
        encoder_names=("vision",),
        image_layout=lambda *_: ImageLayout(num_patches=1, num_rows=0, num_tokens=0),
        model_spec=SimpleNamespace(encoders={"vision": encoder}),
    )
    assert _tower_tokens_per_row(make_config(mode="monolithic"), family) == 1.0  # type: ignore[arg-type]
