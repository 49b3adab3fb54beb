"""Whether a node with CUDA devices has no MPS, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.controller import mps


def test_mps_is_missed_where_there_is_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_DRIVER", tmp_path / "driver")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    assert not mps.lacks_mps(), "no CUDA device"
    (tmp_path / "driver").mkdir()
    assert mps.lacks_mps()
    (tmp_path / "pipes").mkdir()
    assert not mps.lacks_mps()


def test_the_way_out_is_said() -> None:
    text = mps.without_mps_text(["one", "two"])
    assert text.startswith("MPS does not run on one, two:") and "nvidia-cuda-mps-control -d" in text
