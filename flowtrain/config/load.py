"""Load a configuration: YAML, then dotted overrides, then pydantic, then paths; and write it back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowtrain.config.earlier import in_todays_words
from flowtrain.config.home import expanded
from flowtrain.config.messages import Document, refusal, refused
from flowtrain.config.overrides import apply_overrides
from flowtrain.config.paths import resolve_paths
from flowtrain.config.put_plan import put_plan
from flowtrain.config.run import RunConfig
from flowtrain.config.schema import nearest_key
from flowtrain.config.secrets import refuse_secrets
from flowtrain.config.yaml_text import Path as KeyPath
from flowtrain.config.yaml_text import YamlError, dump_yaml, parse_yaml
from flowtrain.errors import ConfigError
from flowtrain.types.run_plan import Plan


def load_config(
    path: str | PathLike[str], overrides: Sequence[str] = (), check_paths: bool = True, plan: Plan | None = None
) -> RunConfig:
    """Load a YAML file, apply overrides (``section.key=value``) and make its paths absolute.

    check_paths: paths of data and local models must exist. plan: sets degrees and resources; overrides win over it.
    Raises ConfigError: one message that names file, key, value and the nearest valid key of every fault.
    """
    values, lines = _read(path)
    refuse_secrets(str(path), values, lines, overrides)
    document = Document(str(path), values, lines, _changed(values, overrides, plan), nearest_key)
    return _build(document, expanded(path).resolve().parent, check_paths)


def config_of_text(text: str, path: Path, check_paths: bool = True) -> RunConfig:
    """Load a YAML text that is to become the file ``path``; raises ConfigError as ``load_config``."""
    values, lines = _parse(text, path)
    refuse_secrets(str(path), values, lines, ())
    return _build(Document(str(path), values, lines, {}, nearest_key), expanded(path).resolve().parent, check_paths)


def load_resolved(path: Path) -> RunConfig:
    """Load what ``dump_resolved`` of this or an earlier version wrote; its paths need not exist any more."""
    values, lines = _read(path)
    in_todays_words(values)
    return _build(Document(str(path), values, lines, {}, nearest_key), path.resolve().parent, check_paths=False)


def override_config(
    config: RunConfig, overrides: Sequence[str], check_paths: bool = True, plan: Plan | None = None
) -> RunConfig:
    """Apply overrides to a configuration; relative paths in it start from the current directory.

    plan: as in ``load_config``.
    """
    values = plain_values(config)
    refuse_secrets("configuration", values, {}, overrides)
    document = Document("configuration", values, {}, _changed(values, overrides, plan), nearest_key)
    return _build(document, Path.cwd(), check_paths)


def dump_resolved(config: RunConfig) -> str:
    """The configuration with every default, as YAML that loads again to an equal one."""
    return dump_yaml(plain_values(config))


def plain_values(config: RunConfig) -> dict[str, Any]:
    """The configuration as mappings, lists and scalars."""
    values: dict[str, Any] = _plain(config.model_dump())
    return values


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of plain values; the order of keys does not change it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the values of a YAML file, and the line of each key."""
    try:
        text = expanded(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: the configuration cannot be read: {reason}") from error
    return _parse(text, path)


def _parse(text: str, path: str | PathLike[str]) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        values, lines = parse_yaml(text)
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, not {type(values).__name__}")
    return values, lines


def _build(document: Document, config_dir: Path, check_paths: bool) -> RunConfig:
    try:
        values = plain_values(RunConfig.model_validate(document.values))
        faults = resolve_paths(values, document, config_dir, check_paths)
        if faults:
            raise refusal(document.label, faults)
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise refused(document, error) from error


def _changed(values: dict[str, Any], overrides: Sequence[str], plan: Plan | None) -> dict[KeyPath, str]:
    """Apply overrides and a plan to ``values``; returns the key of each change with the text that set it."""
    origins = apply_overrides(values, overrides)
    # Overrides are applied first, since they may add encoders, and they win: the plan keeps off their keys.
    return origins if plan is None else put_plan(values, plan, kept=origins) | origins


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
