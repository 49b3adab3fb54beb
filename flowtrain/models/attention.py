"""Attention over packed sequences, registered with transformers under one name per backend.

A microbatch is one row of tokens that holds several sequences back to back; a token attends only within its own
sequence. The model passes ``cu_seqlens`` (int32 ``[S + 1]``, on the device), ``max_seqlen`` and ``segment_offsets``
(the same offsets as Python integers, so that a backend that loops need not synchronise with the device) through its
keyword arguments. No mask is ever built. Head counts are read from the tensors: under tensor parallelism they are the
local ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

logger = logging.getLogger(__name__)

AttentionFunction = Callable[..., tuple[Tensor, None]]

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_offsets: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run torch's SDPA once per segment; the fallback that works everywhere.

    query: ``[1, H, T, D]``; key, value: ``[1, H_kv, T, D]`` with ``H_kv`` dividing ``H``. Returns ``[1, T, H, D]``.
    """
    assert attention_mask is None, "packed attention takes no mask"
    assert getattr(module, "is_causal", True), "packed attention is causal"
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} asks for {name}, which packed attention does not have")
    enable_gqa = query.shape[1] != key.shape[1]
    outputs = []
    for start, stop in pairwise(segment_offsets):
        mask = _window_mask(stop - start, sliding_window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, start:stop],
                value[:, :, start:stop],
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=enable_gqa,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Causal mask ``[length, length]`` of a sliding window, or None where plain causality says the same."""
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)


BACKENDS: dict[str, AttentionFunction] = {"sdpa": packed_sdpa}
"""Kernels for packed sequences, by the value of ``backbone.attention``."""


def implementation_name(backend: str) -> str:
    """Name under which transformers knows a backend (its ``attn_implementation``)."""
    return f"flowtrain_packed_{backend}"


def resolve_attention(requested: str) -> str:
    """Turn ``backbone.attention`` into a key of ``BACKENDS``, and log the choice when it was left to us."""
    if requested != "auto":
        return requested
    logger.info("backbone.attention: auto -> sdpa, one call per packed sequence: the only backend so far")
    return "sdpa"


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Stand in for transformers' mask builders: packed attention needs no mask."""


for _backend, _function in BACKENDS.items():
    AttentionInterface.register(implementation_name(_backend), _function)
    AttentionMaskInterface.register(implementation_name(_backend), _no_mask)
