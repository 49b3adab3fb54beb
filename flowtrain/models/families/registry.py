"""The known families."""

from __future__ import annotations

from flowtrain.config.run import RunConfig
from flowtrain.models.families.base import Family
from flowtrain.models.families.llava import LlavaFamily
from flowtrain.models.families.variable import VariableLlavaFamily

FAMILIES: dict[str, type[Family]] = {family.name: family for family in (LlavaFamily, VariableLlavaFamily)}


def family_from_config(config: RunConfig) -> Family:
    """Build the adapter that ``model.family`` names."""
    return FAMILIES[config.model.family].from_config(config)
