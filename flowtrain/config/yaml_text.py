"""YAML in and out: safe, YAML 1.2 scalars, duplicate keys refused, line numbers kept.

PyYAML reads YAML 1.1, where ``1e-6`` is text, ``off`` is false and ``12:30`` is 750. In a training configuration each
of these is a trap, so scalars follow YAML 1.2's core schema here, for reading and writing alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and list indices from the root of a document to a value."""


class YamlError(ValueError):
    """A text is not the expected YAML; the message gives the line if it is known."""


_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_letters in _SCALARS:
        for letter in first_letters:
            table.setdefault(letter.replace("\0", ""), []).append((tag, re.compile(rf"^(?:{pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice in full both times: people read the text."""
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 16 if text.lower().startswith("0x") else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _Builder:
    """Plain Python values from a node tree, with the line of every value."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._open: set[int] = set()
        self.lines: dict[Path, int] = {}

    def build(self, node: yaml.Node, path: Path) -> Any:
        """Value of ``node``; raises YamlError on duplicate or non-text keys and on aliases that contain themselves."""
        self.lines[path] = node.start_mark.line + 1
        if id(node) in self._open:
            raise YamlError(f"line {self.lines[path]}: an alias refers to something that contains it")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(child, (*path, index)) for index, child in enumerate(node.value)]
            return self._loader.construct_object(node)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for index, name in enumerate(own):
            if name in own[:index]:
                line = [key for key, _ in node.value if key.value == name][-1].start_mark.line + 1
                raise YamlError(f"line {line}: key {dotted((*path, name))} is given twice; keep one")
        self._loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise YamlError(f"line {key.start_mark.line + 1}: key {key.value} in {dotted(path)} must be text")
            result[key.value] = self.build(value, (*path, key.value))
            self.lines[(*path, key.value)] = key.start_mark.line + 1
        return result


def parse_yaml(text: str) -> tuple[Any, dict[Path, int]]:
    """Value of a YAML text and the line (from 1) of every value in it; raises YamlError."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        builder = _Builder(loader)
        return builder.build(node, ()), builder.lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise YamlError(f"{where}not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise YamlError(f"not valid YAML: {' '.join(str(error).split())}") from error


def dump_yaml(value: Mapping[str, Any]) -> str:
    """YAML text that ``parse_yaml`` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120)


def dotted(path: Path) -> str:
    """``data.sources.0.path`` for ``("data", "sources", 0, "path")``."""
    return ".".join(str(part) for part in path) or "the top level"
