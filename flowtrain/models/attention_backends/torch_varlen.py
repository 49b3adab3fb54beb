"""Packed attention by torch's own variable-length kernel, ``torch.nn.attention.varlen`` (FlashAttention-2 on CUDA).

The signature of ``varlen_attn`` differs between torch's releases: older ones have ``is_causal`` instead of
``window_size``, and only newer ones let key and value have fewer heads. This file alone handles that.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flowtrain.models.attention_backends.base import Backend, Segments, check_request, tokens_first, why_no_flash_kernel


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
    _, known = _kernel()
    options: dict[str, Any] = {}
    if "window_size" in known:
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
    kernel, known = _kernel()
    query, key, value = (tokens_first(tensor) for tensor in (query, key, value))
    if scaling is not None:
        options["scale"] = scaling
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    output: Tensor = kernel(query, key, value, offsets, offsets, max_length, max_length, **options)
    return output[None]


@cache
def _kernel() -> tuple[Any, frozenset[str]]:
    """The function, and the names of its parameters."""
    kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return kernel, frozenset(inspect.signature(kernel).parameters)


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    reason = why_no_flash_kernel(device, dtype)
    if reason is not None:
        return reason
    try:
        _kernel()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} does not have it ({error}); install torch 2.11 or newer"
    return None


BACKEND = Backend(packed_torch_varlen, bidirectional_torch_varlen, _why_not)
