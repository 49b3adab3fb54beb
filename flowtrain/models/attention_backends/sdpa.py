"""Packed attention by torch's SDPA, one call per sequence or run of equal images: works everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flowtrain.models.attention_backends.base import Backend, SegmentOffsets, Segments, check_request, tokens_first
from flowtrain.models.cpu_products import attend_in_blocks, attends_in_blocks


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


@torch.compiler.disable
def bidirectional_sdpa(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, dropout: float
) -> Tensor:
    """Attend within each image; neighbours of equal length are a batch, as a view."""
    num_tokens = [count * length for count, length in segments.runs]
    own = zip(*(tokens_first(tensor).split(num_tokens) for tensor in (query, key, value)), strict=True)
    outputs = []
    for run, tensors in zip(segments.runs, own, strict=True):
        own_query, own_key, own_value = (tensor.unflatten(0, run).transpose(1, 2) for tensor in tensors)
        if not dropout and attends_in_blocks(own_query):
            output = attend_in_blocks(own_query, own_key, own_value, scaling)
        else:
            output = scaled_dot_product_attention(
                own_query,
                own_key,
                own_value,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


BACKEND = Backend(packed_sdpa, bidirectional_sdpa, why_not=lambda device, dtype: None)
