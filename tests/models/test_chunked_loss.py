"""The chunked, weighted cross-entropy against torch's own over all rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flowtrain.models.loss import weighted_nll_sum


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_value_and_gradients_equal_the_plain_loss(chunk_tokens):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (20,), generator=generator)
    targets[::3] = -100
    weights = torch.rand(20, generator=generator)
    head = nn.Linear(8, 11, bias=False)

    loss = weighted_nll_sum(hidden, targets, weights, head, chunk_tokens=chunk_tokens)
    gradients = torch.autograd.grad(loss, [hidden, head.weight])
    plain = (cross_entropy(head(hidden), targets, reduction="none", ignore_index=-100) * weights).sum()
    for gradient, expected in zip(gradients, torch.autograd.grad(plain, [hidden, head.weight]), strict=True):
        assert torch.allclose(gradient, expected, atol=1e-6)
    assert torch.allclose(loss, plain)


def test_no_more_logits_than_a_chunk_exist_at_once():
    rows = []
    head = nn.Linear(8, 11)
    head.register_forward_hook(lambda module, args, output: rows.append(output.shape[0]))
    targets = torch.zeros(10, dtype=torch.int64)
    targets[4:6] = -100
    weighted_nll_sum(torch.randn(10, 8, requires_grad=True), targets, torch.ones(10), head, chunk_tokens=3).backward()
    assert rows[:3] == [3, 3, 2], "forward"
    assert sorted(rows[3:]) == [2, 3, 3], "recomputed in the backward pass"


def test_without_targets_one_row_passes_the_head_for_zero_gradients():
    rows = []
    head = nn.Linear(8, 11)
    head.register_forward_hook(lambda module, args, output: rows.append(output.shape[0]))
    hidden = torch.randn(5, 8, requires_grad=True)
    loss = weighted_nll_sum(hidden, torch.full((5,), -100), torch.ones(5), head)
    loss.backward()
    assert rows == [1] and loss.item() == 0.0
    assert head.weight.grad.count_nonzero() == 0 and hidden.grad.count_nonzero() == 0


def test_bf16_logits_are_normalised_in_float32():
    hidden = torch.randn(4, 8, dtype=torch.bfloat16)
    head = nn.Linear(8, 11, bias=False, dtype=torch.bfloat16)
    targets = torch.tensor([1, 2, 3, 4])
    loss = weighted_nll_sum(hidden, targets, torch.ones(4), head)
    assert loss.dtype == torch.float32
    expected = cross_entropy(head(hidden).float(), targets, reduction="sum")
    assert torch.allclose(loss, expected, rtol=1e-6)  # bf16 arithmetic would be off by 1e-3
