"""Which settings ``mode: auto`` may still choose, once overrides have set some."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.config.allocator import CHOICE_KEYS
from flowtrain.config.run import RunConfig


def with_kept_choices(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration with settings that overrides set taken from those that ``mode: auto`` chooses."""
    if config.mode != "auto" or config.allocator.choose != "auto":
        return config
    keys = {text.partition("=")[0].strip() for text in overrides}
    sections = {key.partition(".")[0] for key in keys if "." not in key}

    def is_set(each: str) -> bool:
        return each in keys or each.partition(".")[0] in sections

    free = tuple(choice for choice, names in CHOICE_KEYS.items() if not any(map(is_set, names)))
    return config.model_copy(update={"allocator": config.allocator.model_copy(update={"choose": free})})
