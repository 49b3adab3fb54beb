"""YAML in and out: safe, YAML 1.2 scalars, duplicate keys refused, sizes limited, line numbers kept.

PyYAML reads YAML 1.1, where ``1e-6`` is text, ``off`` is false and ``12:30`` is 750. In a training configuration each
of these is a trap, so scalars follow YAML 1.2's core schema here, for reading and writing alike. Limits on length,
depth and the number of values keep a text of a few lines from taking minutes and gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser
from yaml.resolver import Resolver

Path = tuple[str | int, ...]
"""Keys and list indices from the root of a document to a value."""


MAX_LENGTH = 1 << 18
"""Characters of a text."""
MAX_VALUES = 10_000
"""Keys and values of a text, each alias and each merged key counted where it stands."""
MAX_DEPTH = 50
"""Mappings and lists inside each other."""
_SHOWN_LENGTH = 60

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "null"))


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


class _Loader(Composer, CParser, SafeConstructor, Resolver):
    """Reads by libyaml, which takes a quarter of the time, but for its composer: that has no limits and overflows."""

    yaml_implicit_resolvers = _resolvers()

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._num_values = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read one value, if the text has not too many of them; raises YamlError."""
        self._num_values += 1
        self._depth += 1
        line = self.peek_event().start_mark.line + 1
        if self._num_values > MAX_VALUES:
            raise _too_many(line)
        if self._depth > MAX_DEPTH:
            raise _too_deep(line)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice in full both times: people read the text."""
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 16 if text.lower().startswith("0x") else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _too_many(line: int) -> YamlError:
    return YamlError(
        f"line {line}: more than {MAX_VALUES} keys and values, aliases and merges counted where they stand; a "
        "configuration is much smaller, so leave out what is none"
    )


def _too_deep(line: int) -> YamlError:
    return YamlError(f"line {line}: more than {MAX_DEPTH} mappings and lists inside each other; write it flatter")


class _Builder:
    """Plain Python values from a node tree, with the line of every value."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._open: set[int] = set()
        self._num_values = 0
        self.lines: dict[Path, int] = {}

    def build(self, node: yaml.Node, path: Path) -> Any:
        """Value of ``node``; raises YamlError on duplicate or non-text keys, and on what grows without end."""
        self.lines[path] = line = node.start_mark.line + 1
        with self._inside(node):
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(child, (*path, index)) for index, child in enumerate(node.value)]
            return self._scalar(node, line)

    @contextmanager
    def _inside(self, node: yaml.Node) -> Iterator[None]:
        line = node.start_mark.line + 1
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _too_many(line)
        if id(node) in self._open:
            raise YamlError(f"line {line}: an alias refers to something that contains it")
        if len(self._open) >= MAX_DEPTH:
            raise _too_deep(line)
        self._open.add(id(node))
        try:
            yield
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.Node, line: int) -> Any:
        if node.tag not in _PLAIN_TAGS:
            # What PyYAML has no constructor for at all keeps its own words.
            if node.tag in yaml.SafeLoader.yaml_constructors:
                raise YamlError(
                    f"line {line}: !!{node.tag.removeprefix(_TAG)} is no type of a configuration; leave it out"
                )
            return self._loader.construct_object(node)
        try:
            value = self._loader.construct_object(node)
        except (ValueError, KeyError) as error:
            kind = node.tag.removeprefix(_TAG)
            raise YamlError(
                f"line {line}: {_shown(node.value)} cannot be read as {kind}; write a plain value, without !!{kind}"
            ) from error
        return value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == _TAG + "merge":
                merged = self._merged(value, path) | merged
                continue
            if key.tag != _TAG + "str" or not isinstance(key.value, str):
                shown = key.value if isinstance(key.value, str) else "a list or mapping"
                raise YamlError(f"line {line}: key {shown} in {dotted(path)} must be text")
            if key.value in own:
                raise YamlError(f"line {line}: key {dotted((*path, key.value))} is given twice; keep one")
            own[key.value] = self.build(value, (*path, key.value))
            self.lines[(*path, key.value)] = line
        return merged | own

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """What ``<<`` brings in; of several mappings the first that has a key counts."""
        line = node.start_mark.line + 1
        with self._inside(node):
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.MappingNode) for each in node.value):
                found: dict[str, Any] = {}
                for each in node.value:
                    found = self._merged(each, path) | found
                return found
        raise YamlError(f"line {line}: << in {dotted(path)} must be given a mapping, or a list of mappings")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "...")


def parse_yaml(text: str) -> tuple[Any, dict[Path, int]]:
    """Value of a YAML text and the line (from 1) of every value in it; raises YamlError."""
    if len(text) > MAX_LENGTH:
        raise YamlError(f"{len(text)} characters, more than a configuration has ({MAX_LENGTH}); is it the right file?")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        builder = _Builder(loader)
        return builder.build(node, ()), builder.lines
    except UnicodeEncodeError as error:  # of libyaml, which reads UTF-8
        line = text.count("\n", 0, error.start) + 1
        raise YamlError(f"line {line}: there is half of a surrogate pair; take that out") from error
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
