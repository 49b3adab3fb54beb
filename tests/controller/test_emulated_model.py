"""Data of a model file for emulated devices: sizes that the file says, without content."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flowtrain.allocator.model_file import read_model_file
from flowtrain.controller.emulated_model import emulated_run, grid_of, header_png
from flowtrain.controller.planning.planned_run import planned_samples
from flowtrain.controller.prepare import prepare
from tests.allocator.worlds import MODELS
from tests.e2e.worlds import TOKENIZER


@given(num_patches=st.integers(1, 20_000))
def test_a_grid_has_about_as_many_patches(num_patches: int) -> None:
    rows, columns = grid_of(num_patches)
    assert 1 <= rows <= columns
    assert rows * columns == pytest.approx(num_patches, rel=0.01, abs=3)
    assert columns <= 4 * rows


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), nbytes=st.integers(100, 2000))
def test_a_header_alone_has_a_size(width: int, height: int, nbytes: int) -> None:
    data = header_png(width, height, nbytes)
    assert len(data) == nbytes and Image.open(io.BytesIO(data)).size == (width, height)


def test_samples_have_the_files_sizes(tmp_path: Path) -> None:
    file = read_model_file(MODELS / "vlm_6b.yaml")
    overrides = [f"runs_dir={tmp_path}", "training.global_batch_size=4", "training.max_steps=2"]
    overrides += ["encoders.vision.segment_nbytes=3000000000", "emulated.feature_share=0.5"]
    config = emulated_run(MODELS / "vlm_6b.yaml", tmp_path, TOKENIZER, overrides, num_samples=8, bytes_per_pixel=0.01)
    run_spec = prepare(config)
    assert run_spec.model_spec == file.model
    samples = planned_samples(run_spec)
    sizes = {int(length) for length in file.workload.lengths}
    assert len(samples) == 8
    for sample in samples:
        assert min(abs(sample.num_tokens - size) for size in sizes) <= 0.01 * sample.num_tokens
        (part,) = [part for part in sample.parts if part.name == "vision"]
        assert part.num_patches == sample.num_vision_tokens
        assert part.nbytes == part.num_rows * 832 * 2, "half of each row"
