"""Packed attention by torch's SDPA, one call per sequence: the fallback that works everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flowtrain.models.attention_backends.base import Backend, SegmentOffsets, check_request


@torch.compiler.disable
def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_offsets: SegmentOffsets,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence.

    One split gives all sequences; with one slice each, the backward pass would fill a whole gradient for every
    sequence. Never compiled: torch.compile would unroll the loop for each number of sequences.
    """
    check_request(module, attention_mask, kwargs)
    lengths = segment_offsets.lengths
    outputs = []
    segments = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    for length, (own_query, own_key, own_value) in zip(lengths, segments, strict=True):
        mask = _window_mask(length, sliding_window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                own_query,
                own_key,
                own_value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Causal mask ``[length, length]`` of a sliding window, or None if the plain causal mask is the same."""
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)


BACKEND = Backend(packed_sdpa, why_not=lambda device, dtype: None)
