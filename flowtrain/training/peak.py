"""Measured peak of the device, the denominator of MFU where no data sheet is known (a CPU)."""

from __future__ import annotations

import statistics
import time

import torch

_REPEATS = 5


def measure_peak_flops(device: torch.device, dtype: torch.dtype, *, size: int = 1024) -> float:
    """FLOP/s of a square matrix product in ``dtype`` with the threads that torch has now; median of a few.

    size: edge of the matrices; 1024 is past the knee on a CPU core and takes well under a second.
    """
    left = torch.ones(size, size, dtype=dtype, device=device)
    right = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty(size, size, dtype=dtype, device=device)
    durations_s = [_timed_product_s(left, right, out) for _ in range(_REPEATS + 1)]
    return 2.0 * size**3 / statistics.median(durations_s[1:])  # the first one warms up


def _timed_product_s(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    started_s = time.perf_counter()
    torch.mm(left, right, out=out)
    if out.device.type != "cpu":
        torch.accelerator.synchronize(out.device)
    return time.perf_counter() - started_s
