"""What a profile measures: exact packed lengths, from the data's samples, and batches of images."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.costs.profile_shapes import (
    NUM_MIXES,
    attention_mixes,
    batch_sizes,
    image_sizes,
    packed_lengths,
    packed_mix,
    packed_mixes,
    target_counts,
)
from flowtrain.costs.workload import Workload
from flowtrain.types.plan import PlannedSample

SAMPLES = st.lists(
    st.tuples(st.integers(2, 60), st.floats(0, 1), st.floats(0, 1)).map(
        lambda drawn: (drawn[0], int(drawn[1] * drawn[0]), int(drawn[2] * (drawn[0] - 1)))
    ),
    min_size=1,
    max_size=20,
)


def workload_of(samples: list[tuple[int, int, int]], microbatch_tokens: int = 64) -> Workload:
    lengths, vision, targets = (np.array(column) for column in zip(*samples, strict=True))
    return Workload(8, microbatch_tokens, lengths, vision, targets, {})


@given(SAMPLES, st.integers(2, 500), st.integers(0, 40))
def test_a_mix_is_full_and_can_be_trained_on(samples: list[tuple[int, int, int]], num_tokens: int, first: int) -> None:
    mix = packed_mix(workload_of(samples), num_tokens, first)
    assert sum(sample.num_tokens for sample in mix) == num_tokens
    assert any(sample.num_target_tokens for sample in mix) or max(sample.num_tokens for sample in mix) < 2
    for number, sample in enumerate(mix):
        whole = samples[(first + number) % len(samples)]
        assert sample.num_vision_tokens <= sample.num_tokens
        assert sample.num_target_tokens < sample.num_tokens or sample.num_tokens == 1
        if number < len(mix) - 1:
            assert (sample.num_tokens, sample.num_vision_tokens) == whole[:2]
        else:
            assert sample.num_tokens <= whole[0] and sample.num_vision_tokens <= whole[1]


@given(SAMPLES, st.integers(60, 5000))
def test_lengths_ascend_to_the_full_microbatch(samples: list[tuple[int, int, int]], microbatch_tokens: int) -> None:
    lengths = packed_lengths(microbatch_tokens)
    assert list(lengths) == sorted(set(lengths)) and lengths[-1] == microbatch_tokens
    mixes = packed_mixes(workload_of(samples, microbatch_tokens))
    assert len(mixes) == NUM_MIXES
    for by_length in mixes:
        assert [sum(sample.num_tokens for sample in mix) for mix in by_length] == list(lengths)


@given(st.integers(1, 10**5), st.integers(1, 10**4))
def test_batches_ascend_to_the_largest_that_a_run_forwards(max_batch_patches: int, patches: int) -> None:
    batches = batch_sizes(max_batch_patches, patches)
    assert list(batches) == sorted(set(batches)) and batches[0] == 1
    assert batches[-1] == max(1, max_batch_patches // patches)


@given(st.integers(1, 10**5))
def test_numbers_of_tokens_with_loss_ascend_to_all_of_them(most: int) -> None:
    counts = target_counts(most)
    assert list(counts) == sorted(set(counts)) and (counts[0], counts[-1]) == (1, most)
    assert all(later <= 2 * earlier for earlier, later in pairwise(counts))


def test_numbers_of_tokens_with_loss_are_close_to_each_other_while_they_are_few() -> None:
    assert target_counts(500) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 500)
    assert [target_counts(most) for most in (1, 2, 13)] == [(1,), (1, 2), (1, 2, 3, 4, 6, 8, 12, 13)]


@given(st.lists(st.lists(st.integers(2, 900), min_size=1, max_size=8), min_size=1, max_size=3))
def test_pairs_that_tell_attention_differ_in_nothing_else(lengths: list[list[int]]) -> None:
    pairs = attention_mixes([[PlannedSample(0, length, 0, 1) for length in mix] for mix in lengths])
    if max(map(sum, lengths)) < 64:
        assert not pairs
        return
    quarters, long, even, uneven = pairs
    for one, other in ((quarters, long), (even, uneven)):
        for name in ("num_tokens", "num_target_tokens", "num_vision_tokens"):
            assert sum(getattr(each, name) for each in one) == sum(getattr(each, name) for each in other)
    assert all(each.num_tokens % 16 == 0 for each in (*quarters, *long, *even)), "aligned"
    assert all(each.num_tokens % 16 for each in uneven), "ragged"
    assert all(each.num_target_tokens < each.num_tokens for mix in pairs for each in mix)


@given(st.lists(st.integers(1, 50)))
def test_image_sizes_span_those_that_there_are(patches: list[int]) -> None:
    sizes = image_sizes(patches)
    assert list(sizes) == sorted(set(sizes)) and set(sizes) <= set(patches) and len(sizes) <= 4
    assert not patches or (sizes[0], sizes[-1]) == (min(patches), max(patches))


def test_lengths_go_on_to_the_largest_microbatch_that_a_plan_may_choose() -> None:
    assert packed_lengths(512, 2048) == (128, 256, 384, 512, 1024, 1536, 2048)
    assert packed_lengths(512, 256) == packed_lengths(512) == (128, 256, 384, 512)
