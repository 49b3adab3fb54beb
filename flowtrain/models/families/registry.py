"""The known families."""

from __future__ import annotations

from flowtrain.config.run import RunConfig
from flowtrain.models.families.base import Family
from flowtrain.models.families.internvl import InternVLFamily
from flowtrain.models.families.llava import LlavaFamily
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.variable import VariableLlavaFamily
from flowtrain.models.weights import check_module

FAMILIES: dict[str, type[Family]] = {
    family.name: family for family in (LlavaFamily, VariableLlavaFamily, InternVLFamily, Qwen3VLFamily)
}


def family_from_config(config: RunConfig) -> Family:
    """Build the adapter that ``model.family`` names. Raises ConfigError if parts of it do not fit together."""
    _check_modules(config)  # before an adapter computes with their values
    family = unchecked_family(config)
    family.check()
    return family


def unchecked_family(config: RunConfig) -> Family:
    """As ``family_from_config``, for a process of a run that has been checked: it opens only what it uses."""
    return FAMILIES[config.model.family](config)


def _check_modules(config: RunConfig) -> None:
    sections = {f"encoders.{name}": encoder.config for name, encoder in config.encoders.items()}
    for key, section in {**sections, "backbone": config.backbone.config}.items():
        if section is not None:
            check_module(section, key)
