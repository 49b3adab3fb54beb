"""Stages of a vision tower against the whole one, and the parts into which images are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flowtrain.errors import ConfigError
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import materialize
from flowtrain.models.towers import TOWERS
from flowtrain.models.vision_stage import VisionStage
from flowtrain.models.weights import tower_class
from flowtrain.pipeline.image_parts import image_parts
from tests.training.towers import PATCH, make_tower, plain_features, tower_config, tower_stage

UP_TO = {"longest_edge": 56}
SIZES = [(50, 20), (13, 61), (28, 28), (52, 30), (28, 28), (200, 200), (60, 13)]


def family_of(
    make_config: Any, tower: dict[str, Any], feature_layer: int, dtype: str = "float32", **model: Any
) -> Family:
    encoder: dict[str, Any] = {"config": {**tower, "num_hidden_layers": 4}, "feature_layer": feature_layer}
    if model.get("family") == "variable_llava":
        encoder["image_processor"] = {"size": UP_TO}
    return family_from_config(make_config(model={"dtype": dtype, **model}, encoders={"vision": encoder}))


def whole_stage(family: Family) -> VisionStage:
    stage = family.encoder_skeleton("vision").to(getattr(torch, family.config.model.dtype))
    materialize(stage, torch.device("cpu"), family.encoder_weights("vision"), from_checkpoint=False)
    return stage


def cuts_of(num_layers: int) -> list[list[range]]:
    """All layers in one stage, in two, and one in each; a first stage may have none."""
    cuts = ([num_layers], [0, num_layers], [num_layers // 2, num_layers - num_layers // 2], [1] * num_layers)
    return [[range(*pair) for pair in pairwise([0, *accumulate(cut)])] for cut in cuts if cut]


@torch.no_grad()
def run_stages(whole: VisionStage, cut: Sequence[range], images: list[torch.Tensor]) -> torch.Tensor:
    sizes = [(image.shape[1], image.shape[2]) for image in images]
    payload: Any = images
    for number, layers in enumerate(cut):
        stage = whole.take(layers, is_first=number == 0, is_last=number == len(cut) - 1)
        payload = stage(payload, sizes)
        count = whole.shape.num_rows if stage.is_last else whole.shape.num_tokens
        assert payload.shape == (sum(map(count, sizes)), whole.shape.width)
    return payload


@pytest.mark.parametrize("name", ["llava", "variable_llava"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature_layer", [-2, -1, 0])
@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "vit"])
def test_any_cut_gives_the_encoders_features_to_the_bit(
    make_config: Any, tower_configs: Any, noise: Any, tower: str, feature_layer: int, dtype: str, name: str
) -> None:
    family = family_of(make_config, tower_configs[tower], feature_layer, dtype, family=name)
    pixels = [family.preprocess("vision", noise(*size, seed)) for seed, size in enumerate(SIZES)]
    expected = torch.cat(family.load_encoder("vision").encode(pixels))
    whole, images = whole_stage(family), [torch.from_numpy(image) for image in pixels]
    for cut in cuts_of(family.num_encoder_layers("vision")):
        found = run_stages(whole, cut, images)
        assert found.dtype == expected.dtype and torch.equal(found, expected), cut


@pytest.mark.parametrize("from_files", [False, True])
@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "vit"])
def test_weights_come_tensor_by_tensor_from_a_directory(
    make_config: Any, tower_configs: Any, tmp_path: Any, tower: str, from_files: bool
) -> None:
    family = family_of(make_config, tower_configs[tower], -2)
    if from_files:
        family._load_tower().save_pretrained(tmp_path)
        encoder = {"path": str(tmp_path), "image_processor": {"size": {"height": 28, "width": 28}}}
        family = family_from_config(make_config(encoders={"vision": encoder}))
    stage, encoder_module = whole_stage(family), family.load_encoder("vision").stage
    assert [name for name, _ in stage.named_parameters()] == [name for name, _ in encoder_module.named_parameters()]
    expected = dict([*encoder_module.named_parameters(), *encoder_module.named_buffers()])
    for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
        assert torch.equal(tensor, expected[name]), name


def test_what_features_do_not_need_is_left_out(make_config: Any, tower_configs: Any) -> None:
    for tower in ("siglip", "clip", "dinov2", "registers", "vit"):
        family = family_of(make_config, tower_configs[tower], -2)
        stage = whole_stage(family).requires_grad_(True)
        stage([torch.randn(3, 28, 28)], [(28, 28)]).sum().backward()
        assert all(parameter.grad is not None for parameter in stage.parameters())
        assert len(stage.layers) == 3 and not stage.training


def test_towers_of_one_kind_share_their_classes(make_config: Any, tower_configs: Any) -> None:
    """FSDP keeps every class that it has wrapped."""
    towers = [whole_stage(family_of(make_config, tower_configs["siglip"], -2)) for _ in range(2)]
    assert len({type(layer) for tower in towers for layer in tower.layers}) == 1
    (embedding_class,) = {type(tower.tower.get_submodule("embeddings")) for tower in towers}
    assert embedding_class is not embedding_class.__base__
    assert embedding_class.__name__ == embedding_class.__base__.__name__


GRIDS = [(1, 1), (2, 3), (2, 3), (1, 1), (3, 2)]
"""Rows and columns of patches of one batch's images."""


@pytest.mark.parametrize("tower", [name for name, kind in TOWERS.items() if kind.takes_mask])  # others get one size
def test_a_trained_tower_over_all_sizes_has_hfs_gradients(tower: str) -> None:
    stage, plain = tower_stage(tower, trainable=True), make_tower(tower)
    torch.manual_seed(1)
    images = [torch.randn(3, rows * PATCH, columns * PATCH) for rows, columns in GRIDS]
    calls: list[nn.Module] = []
    for layer in stage.layers:
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    found = stage(images, [(image.shape[1], image.shape[2]) for image in images])
    assert calls == stage.layers, "one forward of each layer"
    expected = torch.cat([plain_features(plain, image) for image in images])
    assert (found - expected).norm() < 1e-5 * expected.norm()
    weights = torch.randn_like(found)
    for rows in (found, expected):
        (rows * weights).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in stage.tower.named_parameters():
        if name.endswith("k_proj.bias"):
            continue  # it changes no attention: what there is is rounding
        reference = theirs[name].grad
        assert (parameter.grad - reference).norm() < 1e-5 * max(reference.norm().item(), 1e-3), name


def test_a_trained_tower_that_drops_layers_is_refused() -> None:
    """Images of a microbatch share a row, and HF draws for each row."""
    config = tower_config("dinov2")
    config.drop_path_rate = 0.1
    tower = tower_class(config)._from_config(config)
    VisionStage(tower, feature_layer=-1, drop_first=True)
    with pytest.raises(ConfigError, match=r"drop_path_rate \(0\.1\)"):
        VisionStage(tower, feature_layer=-1, drop_first=True, trainable=True)


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "vit"])
def test_without_images_a_trained_stage_gives_zero_gradients(make_config: Any, tower_configs: Any, tower: str) -> None:
    family = family_of(make_config, tower_configs[tower], -2)
    whole = whole_stage(family).requires_grad_(True)
    first, last = (whole.take(layers, is_first=not k, is_last=bool(k)) for k, layers in enumerate(cuts_of(3)[2]))
    hidden = first([], [])
    given_on = hidden.detach().requires_grad_()
    rows = last(given_on, [])
    assert hidden.shape == rows.shape == (0, 32)
    rows.backward(torch.empty(0, 32))
    hidden.backward(given_on.grad)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in whole.parameters())


@given(st.lists(st.integers(1, 400), max_size=12), st.integers(1, 5))
def test_parts_are_contiguous_and_about_even(patches: list[int], num_parts: int) -> None:
    parts = image_parts(patches, num_parts)
    assert len(parts) == num_parts
    assert [index for part in parts for index in part] == list(range(len(patches)))
    for part in parts:
        assert sum(patches[index] for index in part) <= sum(patches) / num_parts + max(patches, default=0)


def test_equal_images_make_equal_parts() -> None:
    assert image_parts([4] * 6, 3) == (range(0, 2), range(2, 4), range(4, 6))
    assert image_parts([], 2) == (range(0, 0), range(0, 0))
