"""Packed attention by the variable-length kernel of the ``flash-attn`` package (Dao, 2023, FlashAttention-2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowtrain.models.attention_backends.base import Backend, Segments, check_request, tokens_first, why_no_flash_kernel

# Its build imports torch, so it must see the torch that is installed.
_INSTALL = "pip install --no-build-isolation 'flowtrain[flash-attn]', or a wheel built for this torch (docs/running.md)"


def packed_flash_attn(
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
    output = _kernel()(
        *(tokens_first(tensor) for tensor in (query, key, value)),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
    )
    return output[None], None


def bidirectional_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, dropout: float
) -> Tensor:
    """Attend within all images in one call."""
    offsets = segments.offsets_on(query.device)
    output: Tensor = _kernel()(
        *(tokens_first(tensor) for tensor in (query, key, value)),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=segments.max_length,
        max_seqlen_k=segments.max_length,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=False,
        window_size=(-1, -1),
    )
    return output[None]


def _kernel() -> Any:
    # Optional, and slow to import: only when this backend is used. A statement, which torch.compile follows.
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    reason = why_no_flash_kernel(device, dtype)
    if reason is not None:
        return reason
    try:
        _kernel()
    except (ImportError, AttributeError) as error:
        return f"the package flash-attn cannot be imported ({error}); install it: {_INSTALL}"
    return None


BACKEND = Backend(packed_flash_attn, bidirectional_flash_attn, _why_not)
