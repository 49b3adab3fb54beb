"""Dotted overrides: ``training.max_steps=20``, ``data.sources.0.path=more.parquet``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowtrain.config.yaml_text import MAX_DEPTH, Path, YamlError, dotted, parse_yaml
from flowtrain.errors import ConfigError


def apply_overrides(document: dict[str, Any], overrides: Sequence[str]) -> dict[Path, str]:
    """Set each override in ``document``, in order; returns the key of each with its text.

    A value is read as YAML, so lists and mappings can be given. Missing sections are created. A list index one past the
    end appends. Raises ConfigError.
    """
    origins: dict[Path, str] = {}
    for text in overrides:
        path, value = _parse(text)
        set_at = _set(document, path, value, text)
        origins = {key: origin for key, origin in origins.items() if key[: len(set_at)] != set_at}  # replaced
        origins[set_at] = text
    return origins


def _parse(text: str) -> tuple[tuple[str, ...], Any]:
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"override {text!r}: must look like section.key=value, e.g. training.max_steps=20")
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"override {text[:60]!r}...: {len(path)} names with dots; no key has more than {MAX_DEPTH}")
    try:
        return path, parse_yaml(value)[0]
    except YamlError as error:
        raise ConfigError(
            f"override {text!r}: the value of {key} cannot be read ({error}); quote text with YAML's special signs"
        ) from error


def _set(document: dict[str, Any], path: tuple[str, ...], value: Any, text: str) -> Path:
    here: Any = document
    walked: list[str | int] = []
    for depth, part in enumerate(path):
        key = _key_in(here, part, tuple(walked), text)
        walked.append(key)
        if depth == len(path) - 1:
            _put(here, key, value)
            break
        child = here.get(key) if isinstance(here, dict) else next(iter(here[key : key + 1]), None)
        if child is None:
            child = {}
            _put(here, key, child)
        here = child
    return tuple(walked)


def _key_in(container: Any, part: str, walked: Path, text: str) -> Any:
    if isinstance(container, dict):
        return part
    if not isinstance(container, list):
        raise ConfigError(
            f"override {text!r}: {dotted(walked)} is {container!r}, not a section; it has no key {part!r}"
        )
    if not part.isdecimal() or int(part) > len(container):
        raise ConfigError(
            f"override {text!r}: {dotted(walked)} is a list of {len(container)}; "
            f"{part!r} must be an index from 0 to {len(container)} (the last appends)"
        )
    return int(part)


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, list) and key == len(container):
        container.append(value)
    else:
        container[key] = value
