"""Which device an actor computes on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

TORCH_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""The variable by which torch asks for huge pages where a CPU's tensor is large; it reads it at its first tensor."""
HUGE_HEAP = "glibc.malloc.hugetlb"
"""The C library's own way (``GLIBC_TUNABLES``): all of its heap has them."""


def default_device(choice: str) -> torch.device:
    """The accelerator of this process, else the CPU; another choice (``model.device``) than ``auto``: the CPU."""
    if choice != "auto" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator


def opened_device(choice: str) -> torch.device:
    """As ``default_device``, for a process that computes there; call it before the first tensor is made.

    A CPU's large tensors then have huge pages, unless the environment decides it: one as large as a table of
    embeddings takes as long to get as to fill otherwise. In a heap that keeps freed memory torch must not ask for them:
    it aligns tensors to 2 MiB, and glibc looks for 2 MiB more than such a tensor has, so that it never finds the freed
    one that was there before, and the heap grows by a table every few steps.
    """
    device = default_device(choice)
    if device.type == "cpu" and not _has_huge_or_keeping_heap(os.environ):
        os.environ.setdefault(TORCH_HUGE_PAGES, "1")
    return device


def _has_huge_or_keeping_heap(environ: Mapping[str, str]) -> bool:
    tunables = dict(each.partition("=")[::2] for each in environ.get("GLIBC_TUNABLES", "").split(":"))
    return tunables.get(HUGE_HEAP, "0") != "0" or environ.get("MALLOC_MMAP_MAX_") == "0"


def device_name(device: torch.device) -> str:
    """The kind of device, as torch names it (``NVIDIA H200``); ``cpu`` for all CPUs."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
