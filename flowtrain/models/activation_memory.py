"""Memory strategies of decoder layers: what a forward pass keeps for the backward pass. Each call can choose anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flowtrain.models.activation_offload import OffloadedCall, store_for
from flowtrain.pipeline.actions import MemoryKind, StageMemory

_COSTLY_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "_c10d_functional::all_reduce",
        "_c10d_functional::reduce_scatter_tensor",
    }
)
"""What ``selective`` keeps: matrix products of linear layers, attention, and sums over tensor parallel ranks.

Gathered tokens (sequence parallelism) are not among them: each rank would keep the tokens of all.
Batched products are not among them: attention without a fused kernel would keep its scores, quadratic in the length.
"""


@contextmanager
def applied(strategy: StageMemory, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let layers that are called inside follow a strategy, each its own kind.

    Only ``forward`` is wrapped, so that a layer's hooks (FSDP2's) stay outside and do not run twice.
    """
    kinds = strategy.of_layers(len(layers))
    wrapped = [(layer, kind) for layer, kind in zip(layers, kinds, strict=True) if kind is not MemoryKind.KEEP]
    if not wrapped or not torch.is_grad_enabled():
        yield
        return
    own_forwards = [vars(layer).get("forward") for layer, _ in wrapped]
    around = {kind: _around_forward(kind, layers) for kind in set(kinds) - {MemoryKind.KEEP}}
    for layer, kind in wrapped:
        layer.forward = around[kind](layer)
    try:
        yield
    finally:
        for (layer, _), own_forward in zip(wrapped, own_forwards, strict=True):
            del layer.forward
            if own_forward is not None:
                layer.forward = own_forward


def _around_forward(kind: MemoryKind, layers: Sequence[nn.Module]) -> Callable[[nn.Module], Callable[..., Any]]:
    """Return the function that gives a layer's new forward."""
    if kind is MemoryKind.OFFLOAD:
        call = OffloadedCall(store_for(next(layers[0].parameters()).device))
        return lambda layer: partial(call.run, layer, layer.forward)
    options: dict[str, Any] = {"context_fn": _selective_contexts} if kind is MemoryKind.SELECTIVE else {}
    return lambda layer: partial(checkpoint, layer.forward, use_reentrant=False, **options)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_costly = operator.name().partition(".")[0] in _COSTLY_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE
