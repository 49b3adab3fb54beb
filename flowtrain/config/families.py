"""Keys that some families of models do not read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flowtrain.config.model import ConnectorConfig
from flowtrain.errors import Fault, FaultCode

if TYPE_CHECKING:
    from flowtrain.config.base import ConfigModel
    from flowtrain.config.run import RunConfig

FEATURE_KEYS = ("feature_layer", "feature_select")
"""Keys of an encoder that choose what of the tower becomes features."""
_FIXED_FAMILIES = frozenset({"qwen3_vl"})
"""Families whose Hugging Face class alone decides about features and connector."""


def given_keys(section: ConfigModel, names: Iterable[str]) -> dict[str, Any]:
    """Return the keys of a section, among these, whose values are not their defaults."""
    fields, values = type(section).model_fields, {name: getattr(section, name) for name in names}
    return {name: value for name, value in values.items() if value != fields[name].default}


def family_reads_its_keys(config: RunConfig) -> Iterator[Fault]:
    """Refuse keys of features and connector for which the run's family has no use.

    A key with its default counts as not given: a run's resolved configuration has all keys.
    """
    family = config.model.family
    if family not in _FIXED_FAMILIES:
        return
    sections = [(f"encoders.{name}", encoder, FEATURE_KEYS) for name, encoder in config.encoders.items()]
    for prefix, section, names in (*sections, ("connector", config.connector, tuple(ConnectorConfig.model_fields))):
        for key, value in given_keys(section, names).items():
            default = type(section).model_fields[key].default
            yield Fault(
                f"{prefix}.{key}",
                FaultCode.CONFLICT,
                f"{prefix}.{key} ({json.dumps(value)}) has no effect with model.family {family!r}, whose Hugging Face "
                f"class decides it; leave the key out (its default is {json.dumps(default)})",
            )
