"""The valid keys of a run: the models' fields as patterns, and the valid key nearest to a wrong one."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from flowtrain.config.base import ConfigModel
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import Path

ANY = "*"
"""Stands for a list index or a free name (an encoder's) in a pattern."""

_CUTOFF = 0.6


@cache
def key_patterns() -> tuple[tuple[str, ...], ...]:
    """Every valid key as a tuple of names, ``ANY`` for indices and free names; sections come before their fields."""
    return tuple(_patterns(RunConfig, ()))


def nearest_key(path: Path, document: Any) -> str | None:
    """The valid key most like an unknown one, dotted, or None.

    The same name in another section comes first (``learning_rate`` -> ``training.learning_rate``), then a similar name
    in the same section, then a similar one anywhere. Free names are filled in from ``document``.
    """
    name, section = str(path[-1]), tuple(path[:-1])
    others = [pattern for pattern in key_patterns() if pattern[-1] != ANY]
    same_name = [pattern for pattern in others if pattern[-1] == name]
    siblings = [pattern for pattern in others if len(pattern) == len(path) and _matches(pattern[:-1], section)]
    for candidates, cutoff in ((same_name, 1.0), (siblings, _CUTOFF), (others, _CUTOFF)):
        found = difflib.get_close_matches(name, [pattern[-1] for pattern in candidates], n=1, cutoff=cutoff)
        if found:
            close = [pattern for pattern in candidates if pattern[-1] == found[0]]
            best = max(close, key=lambda pattern: (_common_prefix(pattern, path), -len(pattern)))
            return ".".join(_fill(best, path, document))
    return None


def _patterns(model: type[ConfigModel], prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        key = (*prefix, name)
        yield key
        for section, suffix in _sections(field.annotation):
            yield from _patterns(section, (*key, *suffix))


def _sections(annotation: Any) -> Iterator[tuple[type[ConfigModel], tuple[str, ...]]]:
    """Config models inside an annotation, each with ``(ANY,)`` if a list or a mapping holds it."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation, ()
        return
    origin = typing.get_origin(annotation)
    if origin is None or origin is typing.Literal:
        return
    if origin is typing.Annotated:
        yield from _sections(typing.get_args(annotation)[0])
        return
    is_union = origin in (typing.Union, types.UnionType)
    for argument in typing.get_args(annotation):
        for section, suffix in _sections(argument):
            yield section, suffix if is_union else (ANY, *suffix)


def _matches(pattern: tuple[str, ...], path: Path) -> bool:
    return len(pattern) == len(path) and all(part in (ANY, str(name)) for part, name in zip(pattern, path, strict=True))


def _common_prefix(pattern: tuple[str, ...], path: Path) -> int:
    length = 0
    for part, name in zip(pattern, path, strict=False):
        if part not in (ANY, str(name)):
            break
        length += 1
    return length


def _fill(pattern: tuple[str, ...], path: Path, document: Any) -> Iterator[str]:
    """Replace ``ANY`` by the name at the same place in ``path``, otherwise by the first name in the document."""
    here, on_path = document, True
    for depth, part in enumerate(pattern):
        filled = part
        if part == ANY:
            if on_path and depth < len(path):
                filled = str(path[depth])
            elif isinstance(here, dict) and here:
                filled = next(iter(here))
            else:
                filled = "0" if isinstance(here, list) else "<name>"
        on_path = on_path and depth < len(path) and str(path[depth]) == filled
        here = _step(here, filled)
        yield filled


def _step(here: Any, name: str) -> Any:
    if isinstance(here, dict):
        return here.get(name)
    if isinstance(here, list) and name.isdecimal() and int(name) < len(here):
        return here[int(name)]
    return None
