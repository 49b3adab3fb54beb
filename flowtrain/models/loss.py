"""Weighted cross-entropy in chunks of tokens, so that the logits of a long microbatch never exist at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

IGNORE_INDEX = -100
"""Target of a token without loss."""

CHUNK_TOKENS = 1024
"""Rows of logits that exist at once; more are recomputed chunk by chunk in the backward pass."""


def weighted_nll_sum(
    hidden: Tensor, targets: Tensor, weights: Tensor, head: Callable[[Tensor], Tensor], chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Sum of ``weights[t] * nll[t]`` over the tokens that have a target, as a float32 scalar.

    hidden: ``[T, H]``. targets: int64 ``[T]``, ``IGNORE_INDEX`` for none. weights: float32 ``[T]``. head: maps
    ``[n, H]`` to logits ``[n, V]``. Only rows with a target pass the head, but never fewer than one: its gradient then
    is zero, not missing, and collectives inside it run on every rank. The log-softmax is taken in float32.
    """
    has_target = targets != IGNORE_INDEX
    rows = has_target.nonzero().squeeze(1)
    if rows.numel() == 0:
        rows = rows.new_zeros(1)
    hidden = hidden.index_select(0, rows)
    weights = torch.where(has_target, weights.float(), 0.0).index_select(0, rows)
    targets = targets.clamp(min=0).index_select(0, rows)

    def chunk_loss(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (cross_entropy(head(hidden).float(), targets, reduction="none") * weights).sum()

    chunks = list(
        zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), weights.split(chunk_tokens), strict=True)
    )
    if len(chunks) == 1:
        return chunk_loss(*chunks[0])
    losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(losses).sum()
