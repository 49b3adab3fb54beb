"""The device of a process, and what it sets there."""

from __future__ import annotations

import os

import pytest
import torch

from flowtrain.controller.memory_env import memory_options
from flowtrain.models.device import opened_device


@pytest.mark.parametrize("tunables", [None, "glibc.malloc.hugetlb=0:glibc.malloc.check=1"])
@pytest.mark.parametrize(("found", "expected"), [(None, "1"), ("0", "0")])
def test_large_tensors_of_a_cpu_have_huge_pages_unless_the_user_decides(
    found: str | None, expected: str, tunables: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "THP_MEM_ALLOC_ENABLE"
    monkeypatch.setenv(name, found or "")  # so that it is put back at the end
    if found is None:
        monkeypatch.delenv(name)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if tunables is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    assert opened_device("cpu") == torch.device("cpu")
    assert os.environ[name] == expected


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_MMAP_MAX_"])
def test_torch_does_not_align_large_tensors_in_a_heap_that_has_huge_pages_itself_or_keeps_freed_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed tensors would not fit the next ones, and the heap would grow with each few steps."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")  # so that it is put back at the end
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    monkeypatch.setenv(name, memory_options({})["runtime_env"]["env_vars"][name])
    assert opened_device("cpu") == torch.device("cpu")
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
