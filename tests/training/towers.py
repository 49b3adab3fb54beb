"""A tiny vision tower for the tests of training, its images, and its features by HF's own forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from flowtrain.models.vision_stage import VisionStage
from flowtrain.models.weights import tower_class

FEATURE_DIM, PATCH = 6, 2
COMPUTED_LAYERS, FEATURE_LAYER = 3, -2


def tower_config(model_type: str) -> PreTrainedConfig:
    """Four layers. Without biases of keys, whose gradients are zero but for rounding."""
    mlp: dict[str, Any] = {"mlp_ratio": 2} if model_type.startswith("dinov2") else {"intermediate_size": 12}
    return AutoConfig.for_model(
        model_type,
        hidden_size=FEATURE_DIM,
        num_hidden_layers=COMPUTED_LAYERS + 1,
        num_attention_heads=2,
        image_size=2 * PATCH,
        patch_size=PATCH,
        qkv_bias=False,
        **mlp,
    )


def make_tower(model_type: str) -> PreTrainedModel:
    """HF's tower with random values in all parameters; on ``meta`` without values."""
    config = tower_config(model_type)
    torch.manual_seed(5)
    tower = tower_class(config)._from_config(config)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return tower


def tower_stage(model_type: str, *, trainable: bool = False) -> VisionStage:
    stage = VisionStage(make_tower(model_type), feature_layer=FEATURE_LAYER, drop_first=True, trainable=trainable)
    stage.interpolates = stage.shape.kind.interpolation == "flag"
    return stage


def computed_names(tower: PreTrainedModel) -> list[str]:
    """Names of the parameters that features depend on, found by a backward pass."""
    plain_features(tower, torch.ones(3, PATCH, 2 * PATCH)).sum().backward()
    names = [name for name, parameter in tower.named_parameters() if parameter.grad is not None]
    tower.zero_grad()
    return names


def plain_features(tower: PreTrainedModel, image: torch.Tensor) -> torch.Tensor:
    """Feature rows of one image, ``[rows, D]``, by HF's forward."""
    forward = partial(tower, interpolate_pos_encoding=True) if "dinov2" not in tower.config.model_type else tower
    states = forward(image[None], output_hidden_states=True).hidden_states
    return states[FEATURE_LAYER][0, 1:]


def make_images(position: int, num_rows: int) -> list[torch.Tensor]:
    """Images with so many patches together: one or two, of several shapes."""
    rng = np.random.default_rng([position, 1])
    rows = [1, num_rows - 1] if num_rows == 3 and position % 2 else [num_rows]
    shapes = [(3, PATCH, PATCH * count) if position % 3 else (3, PATCH * count, PATCH) for count in rows if count]
    return [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]
