"""Names of the parameters of connector and language model, and what modules and name patterns stand for.

A key of ``model.freeze`` or ``training.learning_rates`` is the name of a module, or a pattern as of a shell (``*``,
``?``, ``[0-9]``) that a whole name must match. Names are those of ``Backbone.state_dict()`` of the whole model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

CONNECTOR = "connector"
BACKBONE = "backbone"
ENCODERS = "encoders"
MODULES = (CONNECTOR, BACKBONE)
"""Modules whose parameters have these names; an encoder's are not among them."""

_OF_PATTERNS = frozenset("*?[.")
_TOWERS = ("vision", "visual")
"""Begin the names that Hugging Face gives to encoders."""
_NUM_NEAREST = 3


def module_of(parameter_name: str) -> str:
    """The configuration's module (encoders, connector or backbone) of a parameter, by its qualified name."""
    first = parameter_name.split(".", 1)[0]
    return first if first in (CONNECTOR, ENCODERS) else BACKBONE


def is_pattern(key: str) -> bool:
    """Whether a key is a pattern of parameter names; otherwise it is the name of a module."""
    return not _OF_PATTERNS.isdisjoint(key)


def stands_for(key: str, name: str) -> bool:
    """Whether a module or a pattern stands for a parameter, by one of its names."""
    return fnmatchcase(name, key) if is_pattern(key) else module_of(name) == key


def names_of(name: str, tied: Mapping[str, str]) -> tuple[str, ...]:
    """Return all names of a parameter. tied: further names of parameters that have several, {name: first name}."""
    first = tied.get(name, name)
    return first, *(other for other, its_first in tied.items() if its_first == first)


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """The parameters of a whole model. Tied weights are one parameter of several names: one of them is enough."""

    of_each: Mapping[str, tuple[str, ...]]
    """All names of each parameter, by the first."""

    @classmethod
    def of(cls, names: Iterable[str], tied: Mapping[str, str]) -> ParameterNames:
        """Return the parameters with these names; tied: as in ``names_of``."""
        return cls({name: names_of(name, tied) for name in names if name not in tied})

    def named_by(self, key: str) -> frozenset[str]:
        """Return the parameters, by their first names, that a module or a pattern stands for."""
        each = self.of_each.items()
        return frozenset(first for first, names in each if any(stands_for(key, name) for name in names))

    def frozen(self, freeze: Iterable[str]) -> frozenset[str]:
        """Return the parameters, by their first names, that ``model.freeze`` stands for."""
        return frozenset[str]().union(*map(self.named_by, freeze))

    def hint(self, pattern: str) -> str:
        """Return the way out for a pattern that matches nothing: a pattern that does, or the names most like it."""
        longer = (f"{pattern}.*", f"{pattern}*", f"*{pattern}", f"*{pattern}*")
        is_of_tower = any(part.strip("*").startswith(_TOWERS) for part in pattern.split("."))
        for other in (*longer, *_without_first_parts(pattern)):
            found = self.named_by(other)
            # Of what Hugging Face has within a tower, only a connector has names here; layers of both are alike.
            if found and len(found) < len(self.of_each) and not (is_of_tower and found - self.named_by(CONNECTOR)):
                return f"did you mean {other!r}, which names {len(found)}?"
        if is_of_tower:
            return "parameters of encoders have no names here: they are frozen unless encoders.<name>.trainable"
        # Compared with as much of each name as the pattern has parts: a short pattern is like no long name.
        depth, parts = pattern.count(".") + 1, dict[str, str]()
        for name in (name for names in self.of_each.values() for name in names):
            parts.setdefault(".".join(name.split(".")[:depth]), name)
        near = difflib.get_close_matches(pattern, parts, _NUM_NEAREST, cutoff=0.0)
        return f"the nearest are {', '.join(parts[part] for part in near)}"


def _without_first_parts(pattern: str) -> Iterator[str]:
    """Yield a pattern without one first part, without two, and so on: a whole Hugging Face class has other ones."""
    parts = pattern.split(".")
    for index in range(1, len(parts)):
        named = (part for part in parts[index:] if part not in ("weight", "bias"))
        if any(character.isalpha() for part in named for character in part):  # numbers alone would match by chance
            yield f"*{'.'.join(parts[index:])}"
