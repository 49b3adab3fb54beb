"""Attention over packed sequences, registered with transformers under one name per backend.

A microbatch is one row of tokens that holds several sequences back to back; a token attends only within its own
sequence. The model passes ``cu_seqlens`` (int32 ``[S + 1]``, on the device), ``max_seqlen`` and ``segment_offsets``
(``SegmentOffsets``: the same as Python integers, for backends that loop) through its keyword arguments. No mask is ever
built. Head counts are read from the tensors: under tensor parallelism they are the local ones.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from flowtrain.errors import ConfigError
from flowtrain.models.attention_backends import flash_attn, sdpa, torch_varlen
from flowtrain.models.attention_backends.base import Backend

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    "flash_attn": flash_attn.BACKEND,
    "torch_varlen": torch_varlen.BACKEND,
    "sdpa": sdpa.BACKEND,
}
"""Kernels for packed sequences, by the value of ``backbone.attention``; ``auto`` takes the first that runs."""


def implementation_name(backend: str) -> str:
    """Name under which transformers knows a backend (its ``attn_implementation``).

    Without the word flash: transformers takes each name that has it for a kernel that it must find itself.
    """
    return f"flowtrain_packed_{backend.replace('flash_attn', 'fa')}"


def resolve_attention(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """Turn ``backbone.attention`` into a key of ``BACKENDS`` that runs on a device, and log the choice and its reason.

    dtype: the compute type. Raises ConfigError if the requested backend cannot run on this machine.
    """
    if requested != "auto":
        reason = BACKENDS[requested].why_not(device, dtype)
        if reason is not None:
            raise ConfigError(f"backbone.attention: {requested} cannot run here: {reason}, or choose auto or sdpa")
        logger.info("backbone.attention: %s on %s, as configured", requested, device.type)
        return requested
    return first_that_runs("backbone.attention", device, dtype)


def first_that_runs(key: str, device: torch.device, dtype: torch.dtype) -> str:
    """The first key of ``BACKENDS`` that runs on a device in a type; logs why, after ``key``."""
    reasons = {name: backend.why_not(device, dtype) for name, backend in BACKENDS.items()}
    chosen = next(name for name, reason in reasons.items() if reason is None)
    passed_over = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    why = "; ".join(passed_over) or "the first choice"
    logger.info("%s: auto -> %s on %s (%s)", key, chosen, device.type, why)
    return chosen


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Stand in for transformers' mask builders: packed attention needs no mask."""


for _name, _backend in BACKENDS.items():
    AttentionInterface.register(implementation_name(_name), _backend.attend)
    AttentionMaskInterface.register(implementation_name(_name), no_mask)
