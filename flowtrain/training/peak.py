"""Peak of the device, the denominator of MFU: from its data sheet, else measured (on a CPU)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from flowtrain.costs.devices import device_spec
from flowtrain.models.cpu_products import fast_products
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
    """FLOP/s of a square matrix product in ``dtype`` with torch's current number of threads; the fastest of several.

    size: rows of the square matrices; on a CPU core 1024 is enough for full speed and takes well under a second. On a
    CPU, oneDNN's product counts where towers use it, and only processor time counts: while a run starts, actors that
    load their models take the cores again and again.
    """
    left = torch.ones(size, size, dtype=dtype, device=device)
    right = torch.ones(size, size, dtype=dtype, device=device)
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    with torch.no_grad(), fast_products(left):
        products = (torch.mm, linear) * _REPEATS
        fastest_s = min(_timed_s(product, left, right, clock) for product in products)
    return 2.0 * size**3 / fastest_s


def _timed_s(
    product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, clock: Callable[[], float]
) -> float:
    started_s = clock()
    product(left, right)
    if left.device.type != "cpu":
        torch.accelerator.synchronize(left.device)
    return clock() - started_s
