"""What a plan sets in a configuration's values, before they are validated."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flowtrain.config.yaml_text import Path, dotted
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.types.run_plan import Plan


def put_plan(values: dict[str, Any], plan: Plan, kept: Collection[Path] = ()) -> dict[Path, str]:
    """Set the plan's settings in ``values``; returns the key and text of each, as ``apply_overrides`` does.

    kept: keys or sections that overrides set; overrides win, so the plan does not set them, except ``mode=auto``.
    Raises ConfigError if the encoders differ from the plan's, or if an override sets another mode. A section that is
    not a mapping is left for validation to refuse.
    """
    encoders = values.get("encoders")
    if plan.encoders and isinstance(encoders, dict) and set(encoders) != set(plan.encoders):
        raise ConfigError.of(
            "encoders",
            FaultCode.ENCODERS,
            f"encoders has {', '.join(map(str, encoders))} and the plan has {', '.join(plan.encoders) or 'none'}; "
            "create a plan for this configuration, or rename its encoders",
        )
    mode = values.get("mode", plan.mode)
    if mode == "auto":
        kept = [key for key in kept if key != ("mode",)]  # the plan decides what was left open
    elif ("mode",) in kept and mode != plan.mode:
        raise ConfigError.of(
            "mode",
            FaultCode.CONFLICT,
            f"the plan is for mode {plan.mode!r} and an override sets mode {mode!r}: degrees of one mode mean little "
            "in another; leave out the override or the plan",
        )
    origins: dict[Path, str] = {}
    for key, value in plan.settings().items():
        if not any(key[: len(path)] == path for path in kept) and _set(values, key, value):
            origins[key] = f"{dotted(key)}={value}"
    return origins


def _set(values: dict[str, Any], key: Path, value: Any) -> bool:
    """Set a value, creating missing sections; returns False if a section is not a mapping."""
    section: Any = values
    for name in key[:-1]:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            return False
    section[key[-1]] = value
    return True
