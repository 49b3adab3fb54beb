"""The known families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, FlowTrainError
from flowtrain.models.families.base import Family
from flowtrain.models.families.internvl import InternVLFamily
from flowtrain.models.families.llava import LlavaFamily
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.variable import VariableLlavaFamily
from flowtrain.models.image_processing import unusable
from flowtrain.models.weights import in_a_line

_OF_VALUES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""What computing with a value of another kind raises."""
_TRIED_SIZE = (224, 160)
"""Width and height (pixels) of an ordinary image."""
_MOST_TRIED_PIXELS = 1 << 24

FAMILIES: dict[str, type[Family]] = {
    family.name: family for family in (LlavaFamily, VariableLlavaFamily, InternVLFamily, Qwen3VLFamily)
}


def family_from_config(config: RunConfig) -> Family:
    """Build the adapter that ``model.family`` names. Raises ConfigError if parts of it do not fit together."""
    try:
        family = unchecked_family(config)
        family.check()
    except FlowTrainError:
        raise
    except _OF_VALUES as error:
        sections = _given(config)
        if not sections:
            raise
        raise ConfigError(
            f"{' and '.join(sections)}: family {config.model.family!r} cannot use these values: {in_a_line(error)}; "
            "correct them, or leave out those that the model's own documentation does not name"
        ) from error
    for name, encoder in config.encoders.items():
        if encoder.image_processor:
            _try_image(family, name, encoder.image_processor)
    return family


def unchecked_family(config: RunConfig) -> Family:
    """As ``family_from_config``, for a process of a run that has been checked: it opens only what it uses."""
    return FAMILIES[config.model.family](config)


def _try_image(family: Family, encoder: str, overrides: Mapping[str, Any]) -> None:
    """Let a tower's settings of images work on a grey one: else every image would be rejected in the run."""
    key = f"encoders.{encoder}.image_processor"
    try:
        height, width = family.entering_size(encoder, *_TRIED_SIZE)
        if height * width > _MOST_TRIED_PIXELS:
            return
        pixels = family.preprocess(encoder, Image.new("RGB", _TRIED_SIZE, (128, 128, 128)))
    except ConfigError:
        raise
    except Exception as error:  # HF's classes compute with values that nothing has checked
        raise unusable(key, f"family {family.name!r}", overrides, error) from error
    if not np.isfinite(pixels).all():
        raise ConfigError(
            f"{key}: pixels are infinite with these settings ({', '.join(overrides)}); image_std may not be 0"
        )


def _given(config: RunConfig) -> list[str]:
    """Keys of the sections that go to classes of Hugging Face, as far as the configuration has them."""
    modules = {f"encoders.{name}": encoder.config for name, encoder in config.encoders.items()}
    keys = [f"{key}.config" for key, section in {**modules, "backbone": config.backbone.config}.items() if section]
    return keys + [f"encoders.{name}.image_processor" for name, each in config.encoders.items() if each.image_processor]
