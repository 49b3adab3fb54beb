"""YAML text with comments, for a configuration that people go on writing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from flowtrain.config.yaml_text import YamlError, parse_yaml

_MANY = 10_000
"""From here on numbers have their thousands apart."""


def comment(text: str) -> str:
    """Return a text that stays in the line of its comment: itself, or quoted if it has characters that do not print."""
    return text if text.isprintable() else json.dumps(text)


def commented_yaml(values: Mapping[str, Any], remarks: Mapping[str, str], hints: Mapping[str, list[str]]) -> str:
    """Return YAML that ``parse_yaml`` reads back to ``values``: mappings, lists of mappings, and scalars.

    remarks: a comment for a key, by its dotted path; list indices count as keys. It stands after the value, or before a
        text of several lines. hints: lines that become comments at the end of a mapping, by its dotted path ("" for
        the whole).
    """
    sections = []
    for key in values:
        sections.append("\n".join(_lines({key: values[key]}, "", 0, remarks, hints)))
    sections += ["\n".join(f"# {line}" for line in hints[""])] if "" in hints else []
    # One-line keys stand together; sections are set apart.
    text = ""
    for before, section in zip(["", *sections], sections, strict=False):
        is_apart = "\n" in section or "\n" in before
        text += ("\n" if text and is_apart else "") + section + "\n"
    return text


def _lines(
    values: Mapping[str, Any], path: str, depth: int, remarks: Mapping[str, str], hints: Mapping[str, list[str]]
) -> Iterator[str]:
    pad = "  " * depth
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        remark = f" # {comment(remarks[here])}" if here in remarks else ""
        if isinstance(value, Mapping) and value:
            yield f"{pad}{key}:{remark}"
            yield from _lines(value, here, depth + 1, remarks, hints)
            yield from (f"{pad}  # {line}" for line in hints.get(here, ()))
        elif isinstance(value, list):
            yield f"{pad}{key}:{remark}"
            for index, item in enumerate(value):
                yield from _item(item, f"{here}.{index}", depth + 1, remarks, hints)
        elif isinstance(value, str) and "\n" in value and _says("\n".join(_block("key", value, "")), value):
            yield from [f"{pad}#{remark.removeprefix(' #')}"] if remark else []
            yield from _block(key, value, pad)
        else:
            yield f"{pad}{key}: {_scalar(value)}{remark}"


def _item(
    item: Mapping[str, Any], path: str, depth: int, remarks: Mapping[str, str], hints: Mapping[str, list[str]]
) -> Iterator[str]:
    """A mapping in a list: its first line has the dash."""
    pad = "  " * depth
    lines = [*_lines(item, path, 0, remarks, hints), *(f"# {line}" for line in hints.get(path, ()))]
    yield f"{pad}- {lines[0]}"
    yield from (f"{pad}  {line}" for line in lines[1:])


def _block(key: str, text: str, pad: str) -> list[str]:
    """A text line by line, as people write a template."""
    return [f"{pad}{key}: |-", *(f"{pad}  {line}" for line in text.split("\n"))]


def _scalar(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= _MANY else str(value)
    if isinstance(value, float):
        return json.dumps(value).replace("e-0", "e-")
    if value and _says(f"key: {value} # remark", value):
        return str(value)
    quoted = json.dumps(value, ensure_ascii=False)
    if not _says(f"key: {quoted}", value):  # YAML escapes more characters than JSON
        quoted = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=sys.maxsize).strip()
    return quoted


def _says(text: str, value: str) -> bool:
    """Whether a YAML text reads back to this value of ``key``."""
    try:
        return bool(parse_yaml(text)[0] == {"key": value})
    except YamlError:
        return False
