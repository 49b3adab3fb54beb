"""What the backbone's benchmarks compare is the same work, and their helpers count right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.backbone_data import Mix, draw_lengths, full_step, made_equal, packed_step, padded_step
from shared.device_profile import covered, kind_of
from shared.memory_trace import peak_above_now

from flowtrain.training.batch import IGNORED_LABEL

CAPACITY, VOCAB, CPU = 128, 50, torch.device("cpu")
length_lists = st.lists(st.integers(4, CAPACITY), min_size=1, max_size=12).map(tuple)


@given(length_lists, st.floats(0.05, 1.0))
def test_all_train_on_the_same_samples(lengths: tuple[int, ...], target_share: float) -> None:
    equal = made_equal(lengths, CAPACITY)
    assert 0 <= sum(lengths) - sum(equal) < len(lengths), "rounding alone"
    mix = Mix((equal,), VOCAB, target_share)
    plan, packed = packed_step(mix, 0, CAPACITY, CPU)
    padded, full = padded_step(mix, 0, 3), full_step(mix, 0, CAPACITY)
    assert plan.num_tokens == sum(equal) == sum(batch.num_tokens for batch in packed)
    for batches in (padded, full):
        assert sum(batch.num_tokens for batch in batches) == plan.num_tokens
        assert sum(int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) for batch in batches) == plan.num_target_tokens
    in_packs = [part.tolist() for batch in packed for part in batch.input_ids.split(batch.sequence_lengths)]
    assert sorted(row.tolist() for batch in full for row in batch.input_ids) == sorted(in_packs)
    assert all(batch.attention_mask is None and batch.input_ids.numel() <= CAPACITY for batch in full)


def test_lengths_become_equal_by_batches() -> None:
    equal = made_equal((9, 60, 70, 5, 100, 31), CAPACITY)
    assert equal == (26, 26, 70, 26, 100, 26), "two that leave no room for the next, and four of 105 tokens"
    batches = full_step(Mix((equal,), VOCAB), 0, CAPACITY)
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(4, 26), (1, 70), (1, 100)]


def test_packed_and_padded_hold_the_same_samples() -> None:
    mix = Mix(((9, 5), (7, 30, 12)), VOCAB)
    plan, packed = packed_step(mix, 1, CAPACITY, CPU)
    (rows,) = padded_step(mix, 1, 8)
    assert plan.positions and set(plan.positions) == {2, 3, 4}
    ids = {tuple(part.tolist()) for part in packed[0].input_ids.split(packed[0].sequence_lengths)}
    assert rows.attention_mask is not None
    assert ids == {
        tuple(row[mask.bool()].tolist()) for row, mask in zip(rows.input_ids, rows.attention_mask, strict=True)
    }


def test_lengths_are_drawn_once_and_cut() -> None:
    lengths = draw_lengths(None, 3, 40, 500, 0.5)
    assert lengths == draw_lengths(None, 3, 40, 500, 0.5) and [len(step) for step in lengths] == [40] * 3
    drawn = [length for step in lengths for length in step]
    assert max(drawn) == 500 and min(drawn) >= 4 and 100 < sum(drawn) / len(drawn) < 330


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>", "elementwise"),
        ("something new", "other"),
    ],
)
def test_kernels_by_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_time_under_several_kernels_counts_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0 and covered([]) == 0.0


def test_the_peak_is_of_what_exists_at_once() -> None:
    def run() -> None:
        for _ in range(3):
            torch.ones(1 << 20, dtype=torch.uint8).clone()

    assert 2 << 20 <= peak_above_now(run, CPU) < 3 << 20
