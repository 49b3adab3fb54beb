"""Assembly of microbatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import DataError
from flowtrain.pipeline.actions import Action, ActionKind
from flowtrain.training.batch import ImageBatch, PackedBatch, SampleArrays, build_batch
from flowtrain.training.stages import span_args

IMAGE_TOKEN, FEATURE_DIM = 9, 3


def build(samples: list[SampleArrays], normalization: str = "token", dtype: torch.dtype = torch.float32) -> PackedBatch:
    return build_batch(
        samples,
        image_token_id=IMAGE_TOKEN,
        feature_dim=FEATURE_DIM,
        dtype=dtype,
        loss_normalization=normalization,
        device=torch.device("cpu"),
    )


def sample(position: int, ids: list[int], labels: list[int], num_rows: int = 0) -> SampleArrays:
    features = torch.full((num_rows, FEATURE_DIM), float(position)) if num_rows else None
    return SampleArrays(position, np.array([ids, labels], dtype=np.int32), features)


def test_two_samples_side_by_side():
    batch = build([sample(4, [1, 9, 9, 2, 3], [-100, -100, -100, 2, 3], 2), sample(5, [6, 7], [-100, 7])], "sample")
    assert batch.input_ids.tolist() == [1, 9, 9, 2, 3, 6, 7]
    assert batch.targets.tolist() == [-100, -100, 2, 3, -100, 7, -100]
    assert batch.weights.tolist() == [0, 0, 0.5, 0.5, 0, 1, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 7] and batch.cu_seqlens.dtype == torch.int32
    assert batch.feature_index.tolist() == [1, 2]
    assert batch.features.tolist() == [[4.0] * 3] * 2
    assert (batch.max_seqlen, batch.sequence_lengths) == (5, (5, 2))
    assert (batch.num_samples, batch.num_tokens, batch.num_target_tokens) == (2, 7, 3)


def test_a_span_counts_images_only_where_ranks_compute_their_features() -> None:
    batch, action = build([sample(4, [1, 2], [-100, 2])]), Action(ActionKind.FORWARD_STAGE, 0, 0)
    args = span_args("forward", action, batch, 0)
    assert "images" not in args and args["num_tokens"] == 2
    for sizes in (((28, 28), (28, 56)), ()):
        assert span_args("forward", action, replace(batch, images=ImageBatch(sizes)), 0)["images"] == len(sizes)


def test_a_stage_behind_the_first_needs_no_features():
    texts = [sample(4, [1, 9, 9, 2, 3], [-100, -100, -100, 2, 3]), sample(5, [6, 7], [-100, 7])]
    batch = build_batch(
        texts,
        image_token_id=IMAGE_TOKEN,
        feature_dim=FEATURE_DIM,
        dtype=torch.float32,
        loss_normalization="token",
        device=torch.device("cpu"),
        with_features=False,
    )
    assert batch.features.shape == (0, FEATURE_DIM) and batch.feature_index.tolist() == []
    whole = build([sample(4, [1, 9, 9, 2, 3], [-100, -100, -100, 2, 3], 2), texts[1]])
    for name in ("input_ids", "targets", "weights", "position_ids", "cu_seqlens", "feature_index"):
        mine, other = getattr(batch, name), getattr(whole, name)
        assert mine.dtype == other.dtype and (name == "feature_index" or torch.equal(mine, other))
    with pytest.raises(DataError, match="2 image tokens in its text but 0 feature rows"):
        build(texts)


@st.composite
def samples(draw: st.DrawFn) -> list[SampleArrays]:
    lengths = draw(st.lists(st.integers(2, 12), min_size=1, max_size=5))
    made = []
    for position, length in enumerate(lengths):
        ids = draw(st.lists(st.integers(0, 10), min_size=length, max_size=length))
        targets = draw(st.sets(st.integers(1, length - 1), min_size=1))
        labels = [token if i in targets else -100 for i, token in enumerate(ids)]
        made.append(sample(position, ids, labels, ids.count(IMAGE_TOKEN)))
    return made


@given(samples(), st.sampled_from(["token", "sample"]))
def test_nothing_crosses_samples_and_nothing_is_lost(made, normalization):
    batch, starts = build(made, normalization), [0]
    for single, length in zip(made, (s.text.shape[1] for s in made), strict=True):
        start = starts[-1]
        here = slice(start, start + length)
        alone = build([single], normalization)
        for name in ("input_ids", "targets", "weights", "position_ids"):
            assert torch.equal(getattr(batch, name)[here], getattr(alone, name)), name
        expected = single.text[1, 1:][single.text[1, 1:] != -100]
        assert batch.targets[here][batch.targets[here] != -100].tolist() == expected.tolist()
        total = len(expected) if normalization == "token" else 1.0
        assert batch.weights[here].sum().item() == pytest.approx(total)
        starts.append(start + length)
    assert batch.cu_seqlens.tolist() == starts
    assert torch.equal(batch.target_index, (batch.targets != -100).nonzero().squeeze(1))
    assert torch.all(batch.input_ids[batch.feature_index] == IMAGE_TOKEN)
    assert batch.features.shape == (int((batch.input_ids == IMAGE_TOKEN).sum()), FEATURE_DIM)


def test_the_weightless_microbatch():
    batch = build([], dtype=torch.bfloat16)
    assert batch.weights.tolist() == [0.0] and batch.targets.tolist() == [-100]
    assert batch.features.shape == (0, FEATURE_DIM) and batch.features.dtype == torch.bfloat16
    assert batch.feature_index.shape == (0,) and batch.feature_index.dtype == torch.int64
    assert (batch.num_samples, batch.num_tokens, batch.num_target_tokens) == (0, 0, 0)
    assert set(batch.forward_kwargs()) == {
        *("input_ids", "targets", "weights", "position_ids", "cu_seqlens", "max_seqlen", "features", "feature_index"),
        *("target_index", "sequence_lengths", "next_index"),
    }
    assert batch.target_index.shape == (0,)


def test_text_without_images_still_has_feature_rows_of_the_right_type():
    batch = build([sample(0, [1, 2], [1, 2])], dtype=torch.bfloat16)
    assert batch.features.shape == (0, FEATURE_DIM) and batch.features.dtype == torch.bfloat16


def test_a_read_only_view_of_the_pool_is_taken_without_a_warning(recwarn):
    single = sample(0, [1, 2], [1, 2])
    single.text.flags.writeable = False
    build([single])
    assert not recwarn.list


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (sample(17, [9, 9, 1], [-100, -100, 1], 1), "position 17: 2 image tokens in its text but 1 feature rows"),
        (sample(17, [1, 1], [-100, 1], 1), "position 17: 0 image tokens in its text but 1 feature rows"),
        (SampleArrays(17, np.array([[9, 1], [-100, 1]]), torch.zeros(1, 5)), "position 17: feature rows of width 5"),
        (sample(17, [1, 2], [1, -100]), "position 17: no token carries loss"),
    ],
)
def test_disagreement_names_the_position_and_both_counts(bad, said):
    with pytest.raises(DataError, match=said):
        build([sample(0, [1, 2], [1, 2]), bad], "sample")


def test_positions_of_three_axes():
    grid = sample(4, [1, 9, 9, 2], [-100, -100, -100, 2], 2)
    grid = SampleArrays(4, np.concatenate([grid.text, [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]]), grid.features)
    batch = build([sample(5, [6, 7], [-100, 7]), grid])
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 1, 3], [0, 1, 0, 1, 1, 3], [0, 1, 0, 1, 2, 3]]
    assert batch.input_ids.tolist() == [6, 7, 1, 9, 9, 2] and batch.feature_index.tolist() == [3, 4]
    assert build([sample(5, [6, 7], [-100, 7])]).position_ids.tolist() == [0, 1]
