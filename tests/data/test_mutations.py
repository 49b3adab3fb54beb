"""A sample is trained or quarantined, whatever is wrong with it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from flowtrain.config.run import RunConfig
from flowtrain.data.images import pixels_of_sample
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.samples import TEXT_PART, PartSize, Rejection, RejectReason, SampleRef
from tests.data.mutations import OWN_SYSTEM_PROMPT, STRICT, Draft, drafts

COUNT = 1000
TEMPLATES = {"ours": None, "own system prompt": OWN_SYSTEM_PROMPT, "strict": STRICT}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "image_size": 56,
    "patch_size": 14,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
MAX_PIXELS, MAX_IMAGE_NBYTES = 1_000_000, 1 << 18
REASONS = [reason.value for reason in RejectReason if reason is not RejectReason.MISSING_IMAGE]
UNFORESEEN = re.compile(r"\(line \d+ of \w+\.py\)$")
"""Ends the detail of an error that our own code did not expect."""


def sizer_of(template: str | None, oversized: str) -> tuple[Family, Sizer]:
    model: dict[str, Any] = {"family": "variable_llava", "tokenizer": "assets/tokenizer", "chat_template": template}
    data: dict[str, Any] = {
        "sources": [{"path": "unused.parquet"}],
        "max_seq_len": 1024,
        "max_image_pixels": MAX_PIXELS,
        "max_image_nbytes": MAX_IMAGE_NBYTES,
        "oversized": oversized,
    }
    encoders = {"vision": {"config": SIGLIP}}
    config = RunConfig.model_validate(
        {"name": "test", "model": model, "encoders": encoders, "backbone": {"config": QWEN3}, "data": data}
    )
    family = family_from_config(config)
    return family, Sizer(family, family.tokenizer, config.data)


def check_sized(family: Family, result: SizedResult, num_images: int) -> None:
    sample, text = result.sample, result.text
    assert text.dtype == np.int32 and text.shape == (2, sample.num_tokens) and text.flags.c_contiguous
    assert 0 < sample.num_tokens <= 1024
    assert sample.num_target_tokens == (text[1, 1:] != -100).sum() > 0
    assert sample.num_vision_tokens == (text[0] == family.image_token_id).sum()
    has_loss = text[1] != -100
    assert (text[1][has_loss] == text[0][has_loss]).all() and family.image_token_id not in text[1]
    assert [part.name for part in sample.parts] == [TEXT_PART] + ["vision"] * bool(num_images)
    assert sample.parts[0] == PartSize(TEXT_PART, 1, 0, sample.num_tokens, text.nbytes)
    assert len(result.images) == num_images and sum(map(len, result.images)) <= MAX_IMAGE_NBYTES


def decoded(family: Family, result: SizedResult) -> Rejection | None:
    """Decode a sized sample's images; the pixels must be what was sized."""
    pixels = pixels_of_sample(
        result.sample.ref, result.images, MAX_PIXELS, lambda image: family.preprocess("vision", image)
    )
    if isinstance(pixels, Rejection):
        return pixels
    if pixels:
        part = result.sample.parts[1]
        grids = [(height // 14) * (width // 14) for _, height, width in (each.shape for each in pixels)]
        assert (part.num_items, part.num_patches, part.num_rows) == (len(pixels), sum(grids), sum(grids))
        assert part.num_rows == result.sample.num_vision_tokens and part.nbytes == part.num_rows * family.row_nbytes(
            "vision"
        )
        assert all(np.isfinite(each).all() for each in pixels)
    return None


def check_rejection(rejection: Rejection, ref: SampleRef, draft: Draft) -> None:
    assert rejection.ref == ref
    assert 0 < len(rejection.detail) <= 1000 and not UNFORESEEN.search(rejection.detail), rejection.detail
    assert rejection.id is None or len(rejection.id) <= 200
    assert (rejection.image is None) == (f"image {rejection.image} of {len(draft.images)}" not in rejection.detail)
    for text in (rejection.detail, rejection.id or ""):
        text.encode("utf-8")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("name", "oversized"), [("ours", "reject"), ("own system prompt", "truncate_text"), ("strict", "reject")]
)
def test_a_mutated_sample_is_trained_or_rejected(name: str, oversized: str) -> None:
    family, sizer = sizer_of(TEMPLATES[name], oversized)
    outcomes: Counter[str] = Counter()
    for row, draft in enumerate(drafts(seed=14, count=COUNT)):
        ref = SampleRef(row, 0, row, 0)
        result = sizer.size(ref, draft.raw())
        if isinstance(result, SizedResult):
            check_sized(family, result, len(draft.images))
        rejection = result if isinstance(result, Rejection) else decoded(family, result)
        if rejection is not None:
            check_rejection(rejection, ref, draft)
        outcomes["trained" if rejection is None else rejection.reason.value] += 1
    # A test in which everything is rejected for one reason would show nothing.
    assert sum(outcomes.values()) == COUNT
    assert outcomes["trained"] >= 100 and set(outcomes) == {"trained", *REASONS}, outcomes
