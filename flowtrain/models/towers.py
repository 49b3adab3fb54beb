"""Vision towers that FlowTrain knows: facts that their HF configuration does not state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from flowtrain.errors import ConfigError

Interpolation = Literal["flag", "always"]


@dataclass(frozen=True, slots=True)
class TowerKind:
    """Facts about one ``model_type`` of vision tower."""

    image_processor: str
    """HF class (PIL variant) used if a checkpoint has none."""
    fitted_size: Callable[[int, int], dict[str, Any]]
    """From a height and a width (pixels), the processor's size settings that give such images."""
    num_prefix_tokens: Callable[[PreTrainedConfig], int]
    """Tokens before the patches (class token, registers)."""
    interpolation: Interpolation
    """Whether image sizes other than ``image_size`` need ``interpolate_pos_encoding=True`` or always work."""
    layers: str = "encoder.layers"
    """The list of its layers, by its name in HF's class."""
    pre_norm: str | None = None
    """The norm between embedding and layers."""
    unused: tuple[str, ...] = ()
    """Parameters of the embedding that images do not use."""
    takes_mask: bool = True
    """Whether its layers take an attention mask after the hidden states."""
    heads_width: str | None = None
    """Attribute of its attention with the width of all heads together, if the forward reads it."""


def _exact(height: int, width: int) -> dict[str, Any]:
    return {"size": {"height": height, "width": width}}


def _crop(height: int, width: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": max(height, width)}, "crop_size": {"height": height, "width": width}}


TOWERS: dict[str, TowerKind] = {
    "clip_vision_model": TowerKind("CLIPImageProcessorPil", _crop, lambda config: 1, "flag", pre_norm="pre_layrnorm"),
    "siglip_vision_model": TowerKind("SiglipImageProcessorPil", _exact, lambda config: 0, "flag"),
    "dinov2": TowerKind(
        "BitImageProcessorPil", _crop, lambda config: 1, "always", layers="encoder.layer", unused=("mask_token",)
    ),
    "dinov2_with_registers": TowerKind(
        "BitImageProcessorPil",
        _crop,
        lambda config: 1 + config.num_register_tokens,
        "always",
        layers="encoder.layer",
        unused=("mask_token",),
    ),
    "vit": TowerKind("ViTImageProcessorPil", _exact, lambda config: 1, "flag", layers="layers"),
    "internvl_vision": TowerKind(
        "GotOcr2ImageProcessorPil",
        _exact,
        lambda config: 1,
        "always",
        layers="encoder.layer",
        unused=("mask_token",),
        takes_mask=False,
        heads_width="embed_dim",
    ),
}


def tower_kind(config: PreTrainedConfig, key: str) -> TowerKind:
    """The facts about a tower; raises ConfigError (naming the configuration ``key``) for an unknown one."""
    if config.model_type not in TOWERS:
        raise ConfigError(
            f"{key}: {config.model_type!r} is no vision tower that FlowTrain knows; use one of {', '.join(TOWERS)} "
            "(or a whole CLIP or SigLIP checkpoint; FlowTrain uses its vision part)"
        )
    return TOWERS[config.model_type]


def _pair(value: int | Iterable[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


def patch_grid(config: PreTrainedConfig, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches in an image of this size (pixels); a remainder at the edges is dropped."""
    patch_height, patch_width = _pair(config.patch_size)
    return height // patch_height, width // patch_width


def image_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Height and width (pixels) of the images that a tower's position encoding is for."""
    return _pair(config.image_size)


def square_patch_size(config: PreTrainedConfig, key: str) -> int:
    """Side of a patch (pixels); raises ConfigError if it is not square, since HF's LlavaProcessor needs square ones."""
    height, width = _pair(config.patch_size)
    if height != width:
        raise ConfigError(
            f"{key}: patch_size ({height}, {width}) is not square, which HF's LlavaProcessor cannot express"
        )
    return height
