"""Float32 products of frozen towers, and of connectors that run with them, on a CPU: by oneDNN, as torch's in bfloat16.

torch's float32 products are MKL's, which leaves AVX-512 unused on AMD's processors: one core of an EPYC multiplied at
96 GFLOP/s by MKL, at 227 by oneDNN (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_FEWEST_MULTIPLICATIONS = 1 << 21
"""Smaller products are faster without oneDNN's overhead of some 10 us."""


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
