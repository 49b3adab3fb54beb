"""The device of a process, and what it sets there."""

from __future__ import annotations

import os

import pytest
import torch

from flowtrain.models.device import opened_device


@pytest.mark.parametrize(("found", "expected"), [(None, "1"), ("0", "0")])
def test_large_tensors_of_a_cpu_have_huge_pages_unless_the_user_decides(
    found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "THP_MEM_ALLOC_ENABLE"
    monkeypatch.setenv(name, found or "")  # so that it is put back at the end
    if found is None:
        monkeypatch.delenv(name)
    assert opened_device("cpu") == torch.device("cpu")
    assert os.environ[name] == expected
