"""Weighted cross-entropy fused with the output head, in chunks of tokens: full logits never exist.

The same code serves a head on one device and a head whose vocabulary is split over tensor parallel ranks. Loss and
gradients of a chunk are computed together while its logits exist, so nothing is recomputed; the backward pass only
scales. With a split vocabulary each rank has the logits of its own rows. The ranks then reduce three numbers a token
(maximum, sum of exponentials, logit of the target) and the gradient of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from flowtrain.models.parallel_layers import local_shard, shard_bounds

IGNORE_INDEX = -100
"""Target of a token without loss."""

CHUNK_TOKENS = 2048
"""Rows of logits that exist at once."""

CPU_BLOCK_NUMBERS = 2**19
"""Logits that a CPU turns into probabilities at once: 2 MiB in float32 fit its cache, and malloc reuses the memory."""


def weighted_nll_sum(
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    head: nn.Linear,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    rows: Tensor | None = None,
    row_losses: Tensor | None = None,
) -> Tensor:
    """Sum of ``weights[t] * nll[t]`` over the tokens that have a target, as a float32 scalar.

    hidden: ``[T, H]``, the same on every tensor parallel rank.
    targets: int64 ``[T]``, ``IGNORE_INDEX`` for none.
    weights: float32 ``[T]``, without gradient.
    head: its weight is a plain ``[V, H]``, or a DTensor ``Shard(0)`` on a mesh of one axis; the same for a bias. Ranks
        may have different numbers of rows.
    rows: int64 ``[n]``, the rows that have a target. If None, the host waits for the device to find them.
    row_losses: float32 ``[n]``, filled with ``weights * nll`` of each of these rows; n must not be 0.

    Only rows with a target pass the head. At least one row always passes: so the head's gradient is zero instead of
    missing, and every rank runs the collectives. Softmax and sums are in float32 (in float64 if hidden is).
    """
    has_target = targets != IGNORE_INDEX
    rows = has_target.nonzero().squeeze(1) if rows is None else rows
    if rows.numel() == 0:
        rows = rows.new_zeros(1)
    hidden = hidden.index_select(0, rows)
    weights = torch.where(has_target, weights, 0.0).index_select(0, rows)
    targets = targets.clamp(min=0).index_select(0, rows)
    weight, vocabulary = _local_vocabulary(head.weight)
    bias = None if head.bias is None else _local_vocabulary(head.bias)[0]
    wants_gradients = torch.is_grad_enabled()
    loss: Tensor = _FusedHeadLoss.apply(
        hidden, weight, bias, targets, weights, vocabulary, chunk_tokens, wants_gradients, row_losses
    )
    return loss


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """start: first row of the head that this rank has. group: the ranks that share the rows (None: it has all)."""

    start: int
    group: dist.ProcessGroup | None

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine a tensor over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, operation, self.group)

    def combine(self, log_sum: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the sums of exponentials, and logits of the targets, over all columns; ``[n]`` each."""
        if self.group is None:
            return log_sum, target_logit
        maximum = log_sum.clone()
        self.reduce(maximum, dist.ReduceOp.MAX)
        sums = torch.stack([(log_sum - maximum).exp(), target_logit])
        self.reduce(sums)
        return maximum + sums[0].log(), sums[1]


def _local_vocabulary(parameter: Tensor) -> tuple[Tensor, _Vocabulary]:
    """This rank's rows of a head parameter (gradients flow through them), and which rows they are."""
    if not isinstance(parameter, DTensor):
        return parameter, _Vocabulary(0, None)
    mesh = parameter.device_mesh
    assert mesh.ndim == 1 and parameter.placements == (Shard(0),), f"a head on {mesh} as {parameter.placements}"
    local, (start, stop) = local_shard(parameter), shard_bounds(len(parameter), mesh)
    assert len(local) == stop - start, f"{len(local)} rows of a head on {mesh}, not {start} to {stop}"
    return local, _Vocabulary(start, mesh.get_group())


class _FusedHeadLoss(torch.autograd.Function):
    """Loss and gradients in one pass; ``backward`` scales what ``forward`` computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        vocabulary: _Vocabulary,
        chunk_tokens: int,
        wants_gradients: bool,
        row_losses: Tensor | None,
    ) -> Tensor:
        needed = [wants_gradients and needs for needs in ctx.needs_input_grad[:3]]
        gradients = _Gradients(hidden, weight, needed, num_chunks=-(-len(hidden) // chunk_tokens))
        loss = torch.zeros((), dtype=_sum_dtype(hidden), device=hidden.device)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = nn.functional.linear(hidden[rows], weight, bias)
            size = _block_rows(logits, vocabulary)
            blocks = zip(logits.split(size), targets[rows].split(size), weights[rows].split(size), strict=True)
            losses = [_block_losses(*block, vocabulary) for block in blocks]
            loss += sum(each.sum() for each in losses)
            if row_losses is not None:
                row_losses[rows] = torch.cat(losses)
            if any(needed):
                gradients.add(rows, of_logits=logits)
            del logits
        ctx.gradients = gradients.finish(vocabulary)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("backward ran on this loss before and used up its gradients; compute the loss again")
        return *(None if gradient is None else gradient.mul_(grad_output) for gradient in gradients), *[None] * 6


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _block_rows(logits: Tensor, vocabulary: _Vocabulary) -> int:
    """Rows of a chunk that pass the softmax at once: all of them, but on a CPU only what fits its cache.

    All of them on a CPU too if the vocabulary is split, because the ranks communicate once for each block.
    """
    if logits.device.type != "cpu" or vocabulary.group is not None:
        return len(logits)
    return max(1, CPU_BLOCK_NUMBERS // logits.shape[1])


def _block_losses(logits: Tensor, targets: Tensor, weights: Tensor, vocabulary: _Vocabulary) -> Tensor:
    """Weighted losses ``[n]`` of some rows, from this rank's logits ``[n, V_local]``, which become their gradient.

    Memory traffic is the cost here, so there are few passes over the logits: torch's fused softmax of this rank's
    columns, and one product that turns it into the gradient.
    """
    dtype = _sum_dtype(logits)
    columns = targets - vocabulary.start
    is_here = (columns >= 0) & (columns < logits.shape[1])
    columns = torch.where(is_here, columns, 0)[:, None]
    target_logit = torch.where(is_here, logits.gather(1, columns).squeeze(1), 0.0).to(dtype)
    maximum, at_maximum = logits.max(dim=1, keepdim=True)
    probabilities = torch.softmax(logits, dim=1, dtype=dtype)
    local_log_sum = (maximum.to(dtype) - probabilities.gather(1, at_maximum).log()).squeeze(1)
    log_sum, target_logit = vocabulary.combine(local_log_sum, target_logit)

    torch.mul(probabilities, (weights * (local_log_sum - log_sum).exp())[:, None], out=logits)
    # Written, not subtracted: a subtraction would cancel in bf16 when the target is nearly certain.
    of_target = (weights * torch.expm1(target_logit - log_sum)).to(logits.dtype)
    logits.scatter_(1, columns, torch.where(is_here, of_target, logits.gather(1, columns).squeeze(1))[:, None])
    return (log_sum - target_logit) * weights


class _Gradients:
    """Gradients of hidden states, head weight and bias, added up chunk by chunk; None where none is needed.

    Gradients of the parameters are summed in float32 if there are several chunks.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, needed: list[bool], *, num_chunks: int) -> None:
        self._hidden, self._weight = hidden, weight
        needs_hidden, self._needs_weight, self._needs_bias = needed
        self._of_hidden = torch.empty_like(hidden) if needs_hidden else None
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None
        self._parameter_dtype = weight.dtype if num_chunks == 1 else _sum_dtype(weight)

    def add(self, rows: slice, of_logits: Tensor) -> None:
        """Add a chunk, given the gradient of its logits, ``[n, V_local]``."""
        if self._of_hidden is not None:
            torch.mm(of_logits, self._weight, out=self._of_hidden[rows])
        if self._needs_weight:
            self._of_weight = self._plus(self._of_weight, of_logits.t() @ self._hidden[rows])
        if self._needs_bias:
            self._of_bias = self._plus(self._of_bias, of_logits.sum(dim=0))

    def _plus(self, total: Tensor | None, addend: Tensor) -> Tensor:
        return addend.to(self._parameter_dtype) if total is None else total.add_(addend)

    def finish(self, vocabulary: _Vocabulary) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients in the types of their tensors; the gradient of the hidden states is summed over the vocabulary."""
        if self._of_hidden is not None:
            vocabulary.reduce(self._of_hidden)
        of_weight, of_bias = (
            None if total is None else total.to(self._weight.dtype) for total in (self._of_weight, self._of_bias)
        )
        return self._of_hidden, of_weight, of_bias
