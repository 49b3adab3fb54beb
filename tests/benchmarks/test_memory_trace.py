"""Peaks of living tensors."""

from __future__ import annotations

import torch
from shared.memory_trace import LivePeak

NBYTES = 4 * 1000


def test_a_sum_of_gradients_is_in_place_of_the_first_one() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with LivePeak() as live:
        loss = (2.0 * weight).sum() + (3.0 * weight).sum()
        live.peak_nbytes = 0
        loss.backward()
        torch.zeros(())
    assert weight.grad is not None and weight.grad[0] == 5.0
    assert 2 * NBYTES <= live.peak_nbytes < 3 * NBYTES, "two gradients, and never their sum beside them"


def test_other_sums_count_at_once() -> None:
    first, second = torch.ones(1000), torch.ones(1000)
    with LivePeak() as live:
        third = first + second
        del third
        torch.zeros(())
    assert live.peak_nbytes == NBYTES
