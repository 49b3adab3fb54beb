"""Packed attention by torch's own variable-length kernel, ``torch.nn.attention.varlen`` (FlashAttention-2 on CUDA).

The signature of ``varlen_attn`` differs between torch's releases: older ones have ``is_causal`` instead of
``window_size``, and only newer ones let key and value have fewer heads. This file alone handles that.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from flowtrain.models.attention_backends.base import Backend, Segments, check_request, tokens_first, why_no_flash_kernel

# Constants, so that torch.compile finds them without leaving its graph.
_KERNEL: Any = varlen_attn
_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)


def packed_torch_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within all sequences in one call."""
    check_request(module, attention_mask, kwargs)
    if dropout:
        raise NotImplementedError(
            "torch_varlen has no dropout; set attention_dropout to 0 or backbone.attention to sdpa"
        )
    options: dict[str, Any] = {}
    if "window_size" in _PARAMETERS:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    elif sliding_window is None:
        options["is_causal"] = True
    else:
        raise NotImplementedError("this torch's varlen_attn has no sliding window; set backbone.attention to sdpa")
    return _attend(query, key, value, cu_seqlens, max_seqlen, scaling, options), None


def bidirectional_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, dropout: float
) -> Tensor:
    """Attend within all images in one call."""
    assert not dropout, "torch_varlen has no dropout"
    # Not causal and without a window is the default of every release.
    return _attend(query, key, value, segments.offsets_on(query.device), segments.max_length, scaling, {})


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    max_length: int,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    """Call the kernel. query ``[1, H, T, D]``; returns ``[1, T, H, D]``."""
    query, key, value = (tokens_first(tensor) for tensor in (query, key, value))
    if scaling is not None:
        options["scale"] = scaling
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in _PARAMETERS:
            options["enable_gqa"] = True
        else:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    output: Tensor = _KERNEL(query, key, value, offsets, offsets, max_length, max_length, **options)
    return output[None]


BACKEND = Backend(packed_torch_varlen, bidirectional_torch_varlen, why_no_flash_kernel)
