"""Attention of vision towers over images of any sizes, registered with transformers under one name.

A forward has one row of tokens that holds all images back to back; a token attends to all tokens of its own image. What
else is a mask is here ``Segments``, the images' lengths: layers of all towers hand their mask on to their attention,
untouched, while some drop keyword arguments. No mask is ever built. The kernel is the first of ``attention.BACKENDS``
that runs on the device in the tensors' type.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from flowtrain.models.attention import BACKENDS, first_that_runs, no_mask
from flowtrain.models.attention_backends.base import Segments, check_options

IMPLEMENTATION = "flowtrain_tower"
"""Name under which transformers knows it (``attn_implementation``)."""


def packed_bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend within each image.

    query: ``[1, H, T, D]``. key, value: ``[1, H_kv, T, D]``. segments: tokens of each image, T in all. scaling: of the
    scores; None: ``D ** -0.5``. Returns ``[1, T, H, D]``.
    """
    assert query.shape[0] == 1 and query.shape[2] == segments.num_tokens, (query.shape, segments.lengths)
    segments.were_used = True
    # Not all kernels know dropout, or heads of any width.
    name = "sdpa" if dropout or query.shape[-1] % 8 else _kernel_for(query.device, query.dtype)
    return BACKENDS[name].bidirectional(query, key, value, segments, scaling=scaling, dropout=dropout)


@torch.compiler.disable  # the choice of a kernel is no part of a graph
def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Segments | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks it: within each image of a row, or without segments within each row of a batch."""
    assert not getattr(module, "is_causal", False), "towers are not causal"
    check_options(module, kwargs)
    if attention_mask is None:
        is_grouped = query.shape[1] != key.shape[1]
        output = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=is_grouped
        )
        return output.transpose(1, 2), None
    return packed_bidirectional(query, key, value, attention_mask, scaling=scaling, dropout=dropout), None


@cache
def _kernel_for(device: torch.device, dtype: torch.dtype) -> str:
    return first_that_runs("attention of towers", device, dtype)


AttentionInterface.register(IMPLEMENTATION, tower_attention)
AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
