"""Peak of the device, the denominator of MFU: from its data sheet, else measured (on a CPU)."""

from __future__ import annotations

import statistics
import time

import torch

from flowtrain.costs.devices import device_spec
from flowtrain.models.device import device_name
from flowtrain.types.plan import DevicePeak

_REPEATS = 5


def device_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """Peak of ``device`` in ``dtype``: from the data sheet, else measured with torch's current number of threads."""
    name = device_name(device)
    spec = device_spec(name)
    flops = spec.peak_flops(str(dtype).removeprefix("torch.")) if spec is not None else None
    if spec is not None and flops is not None:
        return DevicePeak(name, flops, spec.source)
    return DevicePeak(name, measure_peak_flops(device, dtype), "measured by a matrix product")


def measure_peak_flops(device: torch.device, dtype: torch.dtype, *, size: int = 1024) -> float:
    """FLOP/s of a square matrix product in ``dtype`` with torch's current number of threads; median of a few.

    size: rows of the square matrices; on a CPU core 1024 is enough for full speed and takes well under a second.
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
