"""The embedding of images of any sizes against HF's own, image by image."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig

from flowtrain.models.tower_embedding import FrameCache, embed_in_rows
from flowtrain.models.towers import TOWERS
from flowtrain.models.weights import tower_class

PATCH = 4
GRIDS = [(2, 3), (1, 1), (3, 3), (2, 3), (5, 1)]
"""Rows and columns of patches; the third is the tower's own."""


def hf_embedding(kind: str, **settings: Any) -> nn.Module:
    """An embedding with random values everywhere."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 12, "patch_size": PATCH}
    config = AutoConfig.for_model(kind, **sizes, **settings)
    embedding = tower_class(config)._from_config(config).get_submodule("embeddings")
    for parameter in embedding.parameters():
        nn.init.normal_(parameter)
    return embedding.eval()


def in_rows(embedding: nn.Module, *, is_trained: bool = False) -> nn.Module:
    twin = copy.deepcopy(embedding)
    embed_in_rows(twin, is_trained=is_trained)
    return twin


def options_of(kind: str) -> dict[str, Any]:
    return {"interpolate_pos_encoding": True} if TOWERS[kind].interpolation == "flag" else {}


def make_images(rest: int = 0) -> list[Tensor]:
    """rest: pixels at the right and below that belong to no patch."""
    torch.manual_seed(1)
    return [torch.randn(3, rows * PATCH + rest, columns * PATCH + rest) for rows, columns in GRIDS]


def alone(embedding: nn.Module, images: list[Tensor], kind: str) -> list[Tensor]:
    weight = next(module.weight for module in embedding.modules() if isinstance(module, nn.Conv2d))
    return [embedding(image[None].to(weight.dtype), **options_of(kind))[0] for image in images]


@pytest.mark.parametrize("kind", TOWERS)
def test_images_of_all_sizes_equal_hf_one_by_one(kind: str) -> None:
    embedding = hf_embedding(kind)
    images = make_images()
    with torch.no_grad():
        expected = alone(embedding, images, kind)
        found = in_rows(embedding)(images, **options_of(kind))
        lengths = [len(rows) for rows in expected]
        assert found.shape == (sum(lengths), 16) and torch.allclose(found, torch.cat(expected), atol=1e-5)
        num_prefix = lengths[1] - 1  # the second image has one patch
        for own, rows in zip(found.split(lengths), expected, strict=True):
            assert torch.equal(own[:num_prefix], rows[:num_prefix]), "no rounding where no patch is"


@pytest.mark.parametrize("kind", TOWERS)
def test_images_of_one_size_have_hfs_bits(kind: str) -> None:
    embedding, images = hf_embedding(kind), [torch.randn(3, 12, 12) for _ in range(3)]
    with torch.no_grad():
        expected = embedding(torch.stack(images), **options_of(kind)).flatten(0, 1)
        assert torch.equal(in_rows(embedding)(images, **options_of(kind)), expected)


def column_images() -> list[Tensor]:
    """Of one size, one patch wide."""
    return [torch.randn(3, 6 * PATCH, PATCH) for _ in range(2)]


@pytest.mark.parametrize("images", [make_images(), column_images()], ids=["sizes", "columns"])
@pytest.mark.parametrize("kind", TOWERS)
def test_in_half_precision(kind: str, images: list[Tensor]) -> None:
    """Against float32 with the same weights: torch's own convolution is wrong for columns on some CPUs."""
    embedding = hf_embedding(kind).bfloat16()
    with torch.no_grad():
        found = in_rows(embedding)(images, **options_of(kind))  # the images are float32
        expected = torch.cat(alone(embedding.float(), images, kind))
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_pixels_that_belong_to_no_patch_are_left_out() -> None:
    embedding, images = hf_embedding("siglip_vision_model"), make_images(rest=3)
    with torch.no_grad():
        expected = torch.cat(alone(embedding, images, "siglip_vision_model"))
        found = in_rows(embedding)(images, interpolate_pos_encoding=True)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", TOWERS)
def test_gradients_equal_those_of_hf(kind: str) -> None:
    embedding, images = hf_embedding(kind), make_images()
    packed = in_rows(embedding, is_trained=True)
    found, expected = packed(images, **options_of(kind)), torch.cat(alone(embedding, images, kind))
    weights = torch.randn_like(found)
    for rows in (found, expected):
        (rows * weights).sum().backward()
    theirs = dict(embedding.named_parameters())
    for name, parameter in packed.named_parameters():
        if name == "mask_token":
            assert parameter.grad is None
            continue
        assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-4), name


def test_a_frozen_embedding_interpolates_a_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = in_rows(hf_embedding("dinov2"))
    calls: list[Any] = []
    plain = nn.functional.interpolate
    monkeypatch.setattr(
        nn.functional, "interpolate", lambda *args, **kw: calls.append(kw["size"]) or plain(*args, **kw)
    )
    with torch.no_grad():
        first, again = (embedding(make_images()) for _ in range(2))
    assert torch.equal(first, again)
    assert sorted(calls) == [(1, 1), (2, 3), (5, 1)], "the tower's own size needs none"


def test_a_trained_embedding_keeps_nothing() -> None:
    embedding = in_rows(hf_embedding("dinov2"), is_trained=True)
    with torch.no_grad():
        before = embedding(make_images())
        embedding.position_embeddings.add_(1.0)
        after = embedding(make_images())
    assert torch.allclose(after, before + 1.0, atol=1e-5)


def test_dropout_is_for_patches_and_positions_together() -> None:
    embedding = in_rows(hf_embedding("dinov2", hidden_dropout_prob=0.5), is_trained=True).train()
    torch.manual_seed(0)
    rows = embedding(make_images())
    assert 0.3 < (rows == 0).float().mean() < 0.7


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=30))
def test_kept_frames_stay_within_the_limit(requests: list[tuple[int, int]]) -> None:
    """Each key's frame has a size of its own."""
    limit, cache, sizes = 400, FrameCache(400), {key: 4 * (key + 1) * size for key, size in requests}
    kept: list[int] = []
    for key in (key for key, _ in requests):
        computed: list[int] = []
        size = sizes[key] // 4
        frame = cache.get(key, lambda size=size, computed=computed: computed.append(1) or torch.zeros(size))
        assert len(frame) == size and bool(computed) == (key not in kept)
        kept = [other for other in kept if other != key] + [key]
        while sum(sizes[other] for other in kept) > limit:
            kept.pop(0)
        assert sum(each.nbytes for each in cache._frames.values()) == sum(sizes[other] for other in kept) <= limit
