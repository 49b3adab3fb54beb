"""The chunked, fused, weighted cross-entropy against torch's own over all rows, whole and split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from flowtrain.models import loss as loss_module
from flowtrain.models.loss import weighted_nll_sum
from tests.models.operators import Operators
from tests.models.ranks import run_ranks

HIDDEN = 4


@dataclass(frozen=True)
class Case:
    """A random loss: sizes, share of rows without target, and what needs gradients."""

    seed: int
    num_tokens: int
    vocab_size: int
    chunk_tokens: int
    ignored: float = 0.3
    has_bias: bool = False
    trains_hidden: bool = True
    trains_head: bool = True
    dtype: torch.dtype = torch.float32

    def build(self):
        """Hidden states, targets, weights and head."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden = 3 * torch.randn(self.num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, self.vocab_size, (self.num_tokens,), generator=generator)
        targets[torch.rand(self.num_tokens, generator=generator) < self.ignored] = -100
        weights = torch.rand(self.num_tokens, generator=generator)
        head = nn.Linear(HIDDEN, self.vocab_size, bias=self.has_bias, dtype=self.dtype)
        for parameter in head.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        head.requires_grad_(self.trains_head)
        return hidden.to(self.dtype).requires_grad_(self.trains_hidden), targets, weights, head

    def reference(self):
        """Loss and gradients by torch, in float64."""
        hidden, targets, weights, head = self.build()
        hidden, head = hidden.detach().double().requires_grad_(self.trains_hidden), head.double()
        loss = (cross_entropy(head(hidden), targets, reduction="none", ignore_index=-100) * weights).sum()
        return loss.detach(), gradients_of(loss, hidden, head)


def gradients_of(loss, hidden, head):
    """Arrays by name; what has none is left out."""
    if loss.requires_grad:
        loss.backward()
    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    found = {name: None if tensor is None else tensor.grad for name, tensor in tensors.items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def assert_equal(found, expected, tolerance):
    """Losses and gradients, by the norm of the difference."""
    (loss, gradients), (expected_loss, expected_gradients) = found, expected
    assert float(loss) == pytest.approx(float(expected_loss), rel=tolerance, abs=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, reference in expected_gradients.items():
        difference = float(np.linalg.norm(np.asarray(gradients[name], dtype=np.float64) - reference.numpy()))
        assert difference <= tolerance * max(float(reference.norm()), 1.0), name


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**20),
    num_tokens=st.integers(1, 30),
    vocab_size=st.integers(1, 40),
    chunk_tokens=st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    has_bias=st.booleans(),
    trains_hidden=st.booleans(),
    trains_head=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


@given(CASES, st.integers(1, 400))
def test_value_and_gradients_equal_the_plain_loss(case, block_numbers):
    hidden, targets, weights, head = case.build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CPU_BLOCK_NUMBERS", block_numbers)
        loss = weighted_nll_sum(hidden, targets, weights, head, case.chunk_tokens)
    assert loss.dtype == case.dtype and loss.shape == ()
    found = loss.detach(), gradients_of(loss, hidden, head)
    assert_equal(found, case.reference(), 1e-5 if case.dtype == torch.float32 else 1e-12)


@given(CASES, st.integers(1, 400))
def test_losses_of_rows_come_with_the_same_loss_to_the_bit(case, block_numbers):
    hidden, targets, weights, head = case.build()
    rows = (targets != -100).nonzero().squeeze(1)
    assume(len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CPU_BLOCK_NUMBERS", block_numbers)
        plain = weighted_nll_sum(hidden, targets, weights, head, case.chunk_tokens, rows=rows)
        losses = torch.full((len(rows),), torch.nan)
        found = weighted_nll_sum(hidden, targets, weights, head, case.chunk_tokens, rows=rows, row_losses=losses)
    assert torch.equal(found, plain)
    expected = cross_entropy(head(hidden)[rows].double(), targets[rows], reduction="none") * weights[rows]
    assert torch.allclose(losses.double(), expected, rtol=1e-4, atol=1e-4)


LONG = Case(seed=0, num_tokens=64, vocab_size=97, chunk_tokens=8, ignored=0.0)


def test_full_logits_never_exist_and_nothing_is_recomputed():
    hidden, targets, weights, head = LONG.build()
    with Operators() as watch:
        loss = weighted_nll_sum(hidden, targets, weights, head, LONG.chunk_tokens)
        in_forward = watch.num_products
        loss.backward()
    assert max(watch.sizes) == LONG.chunk_tokens * LONG.vocab_size, "of 64 * 97 logits in all"
    assert in_forward == 3 * 8 and watch.num_products == in_forward, "logits and two gradients for each chunk"


def test_on_a_cpu_few_rows_pass_the_softmax_at_once(monkeypatch):
    monkeypatch.setattr(loss_module, "CPU_BLOCK_NUMBERS", 10 * LONG.vocab_size)
    with Operators() as watch:
        weighted_nll_sum(*LONG.build(), chunk_tokens=64)
    assert watch.counts["aten::_softmax"] == 7 and watch.num_products == 3, "64 rows of logits, by tens"


def test_without_gradients_only_logits_are_computed():
    hidden, targets, weights, head = LONG.build()
    with Operators() as watch, torch.no_grad():
        loss = weighted_nll_sum(hidden, targets, weights, head, LONG.chunk_tokens)
    assert watch.num_products == 8 and not loss.requires_grad


def test_only_rows_with_a_target_pass_the_head_but_at_least_one():
    hidden, targets, weights, head = LONG.build()
    targets[10:] = -100
    with Operators() as watch:
        weighted_nll_sum(hidden, targets, weights, head, chunk_tokens=100)
    assert max(watch.sizes) == 10 * 97
    targets[:] = -100
    loss = weighted_nll_sum(hidden, targets, weights, head)
    loss.backward()
    assert loss.item() == 0.0
    assert head.weight.grad.count_nonzero() == 0 and hidden.grad.count_nonzero() == 0


def test_loss_cannot_be_differentiated_twice():
    hidden, targets, weights, head = LONG.build()
    loss = weighted_nll_sum(hidden, targets, weights, head)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="before"):
        loss.backward()


@pytest.mark.parametrize("chunk_tokens", [8, 1000])
def test_bf16_is_summed_in_float32(chunk_tokens):
    case = Case(seed=1, num_tokens=200, vocab_size=50, chunk_tokens=chunk_tokens, dtype=torch.bfloat16)
    hidden, targets, weights, head = case.build()
    loss = weighted_nll_sum(hidden, targets, weights, head, chunk_tokens)
    assert loss.dtype == torch.float32
    kept = targets != -100
    logits = head(hidden).float()[kept]
    expected = (cross_entropy(logits, targets[kept], reduction="none") * weights[kept]).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6), "bf16 sums would be off by 1e-3"
    gradients = {name: gradient.float() for name, gradient in gradients_of(loss, hidden, head).items()}
    assert_equal((loss.detach(), gradients), case.reference(), 0.01)


# --- split over ranks ------------------------------------------------------------------------------------------------


def split_losses(cases):
    """Losses and full gradients of cases whose vocabulary is split, and the largest tensor that each needed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results = []
    for case in cases:
        hidden, targets, weights, head = case.build()
        for name, parameter in list(head.named_parameters()):
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            head.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        with Operators() as watch:
            loss = weighted_nll_sum(hidden, targets, weights, head, case.chunk_tokens)
        gradients = gradients_of(loss, hidden, head)
        arrays = {
            name: (gradient if name == "hidden" else gradient.full_tensor()).numpy()
            for name, gradient in gradients.items()
        }
        results.append((loss.item(), arrays, max(watch.sizes)))
    return results


def random_cases(num_ranks):
    """Cases with at least one vocabulary row on each rank, most of them uneven."""
    rng = np.random.default_rng(num_ranks)
    for seed in range(40):
        rows_each = int(rng.integers(2, 12))
        yield Case(
            seed=seed,
            num_tokens=int(rng.integers(1, 30)),
            vocab_size=rows_each * (num_ranks - 1) + int(rng.integers(1, rows_each + 1)),
            chunk_tokens=int(rng.integers(1, 40)),
            ignored=float(rng.choice([0.0, 0.5, 1.0])),
            has_bias=bool(rng.integers(2)),
            trains_hidden=bool(rng.integers(4)),
            trains_head=bool(rng.integers(4)),
        )


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_split_vocabulary_gives_the_same_loss_and_gradients(num_ranks):
    cases = list(random_cases(num_ranks))
    references = [case.reference() for case in cases]
    for results in run_ranks(num_ranks, split_losses, cases):
        for reference, (loss, gradients, _) in zip(references, results, strict=True):
            assert_equal((loss, gradients), reference, 1e-5)


@pytest.mark.processes
def test_ranks_never_hold_more_than_their_share_of_a_chunk():
    for rank, [(_, _, largest)] in enumerate(run_ranks(2, split_losses, [LONG])):
        assert largest == LONG.chunk_tokens * (49, 48)[rank], "of 64 * 97 logits in all"
