"""The known families."""

from __future__ import annotations

from flowtrain.config.run import RunConfig
from flowtrain.models.families.base import Family
from flowtrain.models.families.internvl import InternVLFamily
from flowtrain.models.families.llava import LlavaFamily
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.variable import VariableLlavaFamily

FAMILIES: dict[str, type[Family]] = {
    family.name: family for family in (LlavaFamily, VariableLlavaFamily, InternVLFamily, Qwen3VLFamily)
}


def family_from_config(config: RunConfig) -> Family:
    """Build the adapter that ``model.family`` names. Raises ConfigError if parts of it do not fit together."""
    family = unchecked_family(config)
    family.check()
    return family


def unchecked_family(config: RunConfig) -> Family:
    """As ``family_from_config``, for a process of a run that has been checked: it opens only what it uses."""
    return FAMILIES[config.model.family](config)
