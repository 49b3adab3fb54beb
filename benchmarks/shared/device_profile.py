"""Where an accelerator's time goes during a step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "attention": r"flash|fmha|attention|softmax_warp",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|\bmm\b|wgmma",
    "optimizer": r"adam|multi_tensor|foreach",
    "collectives": r"nccl",
    "copies and fills": r"memcpy|memset|copy|fill|cat\w*_kernel|split_with_sizes|chunk_cat|index|gather|scatter",
    "reductions": r"reduce|norm|sum|max",
    "elementwise": r"elementwise|vectorized|pointwise|triton|kernel",
}
"""The first match wins; a kernel without a match is ``other``."""


@dataclass(frozen=True)
class Profile:
    """seconds: the device's time by kind of work, ``idle`` while nothing ran. table: torch's own, by kernel."""

    seconds: dict[str, float]
    wall_s: float
    table: str

    def text(self) -> str:
        """The shares, then the table."""
        rows = sorted(self.seconds.items(), key=lambda item: -item[1])
        lines = [f"{name:20s} {1e3 * seconds:10.2f} ms {100 * seconds / self.wall_s:6.2f} %" for name, seconds in rows]
        return "\n".join([f"one step: {1e3 * self.wall_s:.2f} ms on the device", *lines, "", self.table])


def profile_step(run: Callable[[], object]) -> Profile:
    """Profile one call, from its first kernel to its last."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.accelerator.synchronize()
    on_device = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    # Ranges, such as the optimizer's step, span kernels; they are not kernels.
    kernels = [event for event in on_device if not event.is_user_annotation]
    seconds: Counter[str] = Counter()
    for event in kernels:
        seconds[kind_of(event.name)] += (event.time_range.end - event.time_range.start) / 1e6
    spans = [(event.time_range.start / 1e6, event.time_range.end / 1e6) for event in kernels]
    wall_s = max(end for _, end in spans) - min(start for start, _ in spans)
    seconds["idle"] = wall_s - covered(spans)
    table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
    return Profile(dict(seconds), wall_s, table)


def kind_of(kernel: str) -> str:
    """What kind of work a kernel does, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
