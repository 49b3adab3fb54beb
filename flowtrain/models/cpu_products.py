"""Products of frozen towers, and of connectors that run with them, on a CPU: by oneDNN.

torch's own are, in float32 and within its attention, MKL's, which leaves AVX-512 unused on AMD's processors. A core of
Zen 5, with 512-bit units, multiplied at 96 GFLOP/s by MKL and at 227 by oneDNN; one of Zen 4, with 256-bit units, at 79
to 95 and at 104 (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_FEWEST_MULTIPLICATIONS = 1 << 21
"""Smaller products are faster without oneDNN's overhead of some 10 us."""
_FEWEST_TOKENS = 1024
"""Of an image; attention within smaller ones takes little of the time."""
_BLOCK = 128
"""Queries that are attended for at once, so that their scores stay in the cache."""
_ZEN_5 = 26
"""AMD's family of processors from which on all vector units are 512 bits wide."""


def fast_products(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, linear layers of such tensors run by oneDNN where that is faster; only without gradients."""
    is_plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and not torch.is_grad_enabled()
    return _ByOneDnn() if is_plain and _one_dnn() is not None else nullcontext()


class _ByOneDnn(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attends_in_blocks(query: Tensor) -> bool:
    """Whether ``attend_in_blocks`` is faster than torch's attention for ``[B, H, T, D]``; only without gradients.

    That follows from the processor and is not timed: a run that is resumed on the same one must compute in the same
    way. Blocks in float32 were 1.3 to 1.6 times as fast on Zen 5, and up to a tenth slower on Zen 4; in bfloat16 1.04
    to 1.24 times as fast there.
    """
    is_plain = query.device.type == "cpu" and not torch.is_grad_enabled()
    return is_plain and query.shape[-2] >= _FEWEST_TOKENS and query.dtype in _types_in_blocks()


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return softmax(query key^T scaling) value, for a block of queries after another; scores are in float32.

    query: ``[B, H, T, D]``. key, value: ``[B, H_kv, T, D]``. scaling: None: ``D ** -0.5``. Returns ``[B, H, T, D]``.
    """
    kernel = _one_dnn()
    assert kernel is not None, "attends_in_blocks was not asked"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    group = query.shape[1] // key.shape[1]
    output = torch.empty_like(query)
    for row, head in product(range(query.shape[0]), range(query.shape[1])):
        queries = query[row, head].float() * scaling
        keys = key[row, head // group].float().contiguous()
        values = value[row, head // group].t().contiguous()
        for first in range(0, len(queries), _BLOCK):
            block = slice(first, first + _BLOCK)
            shares = kernel(queries[block], keys, None, "none", [], "").softmax(dim=-1)
            output[row, head, block] = kernel(shares.to(values.dtype), values, None, "none", [], "")
    return output


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel = _one_dnn()
    if kernel is None or input.numel() * len(weight) < _FEWEST_MULTIPLICATIONS:
        return linear(input, weight, bias)
    output: Tensor = kernel(input, weight, bias, "none", [], "")
    return output


@cache
def _one_dnn() -> Callable[..., Tensor] | None:
    """oneDNN's linear layer over dense weights; None where torch lacks it or nothing is gained."""
    if not torch.backends.mkldnn.is_available() or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@cache
def _types_in_blocks() -> frozenset[torch.dtype]:
    """Types in which attention in blocks is faster on this processor."""
    found = _processor()
    if _one_dnn() is None or found.get("vendor_id") != "AuthenticAMD":
        return frozenset()
    types = set()
    if int(found.get("cpu family", 0)) >= _ZEN_5:
        types.add(torch.float32)
    if "avx512_bf16" in found.get("flags", "").split():
        types.add(torch.bfloat16)
    return frozenset(types)


def _processor() -> dict[str, str]:
    """What Linux knows of the first processor, by its own names; nothing where it does not tell."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
