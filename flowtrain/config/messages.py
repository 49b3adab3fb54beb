"""What a user reads when a configuration is refused: one line per fault, with its place, key, value and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from flowtrain.config.base import meant
from flowtrain.config.data import EVAL_FORMS
from flowtrain.config.earlier import MOVED_KEYS
from flowtrain.config.yaml_text import Path, dotted
from flowtrain.errors import ConfigError, Fault, FaultCode

_MAX_VALUE_LENGTH = 60

_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section (a mapping of keys)",
    "model_attributes_type": "a section (a mapping of keys)",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
}
_LISTS_OF_NAMES = frozenset({"model.freeze", "observability.trackers"})
"""A name alone is most likely the list's only entry."""
_NEEDS_ITEMS = {"too_short": "at least {min_length}", "too_long": "at most {max_length}"}


@dataclass
class Document:
    """A configuration before validation, with the origin of each value."""

    label: str
    """The file as the user named it."""
    values: dict[str, Any]
    lines: Mapping[Path, int] = field(default_factory=dict)
    """Line of every value in the file."""
    overrides: Mapping[Path, str] = field(default_factory=dict)
    """Text of the override that set a value."""
    nearest: Callable[[Path, Any], str | None] = lambda path, values: None
    """Finds the valid key most like an unknown one; gets its path and the document's values."""

    def place(self, path: Path, text: str) -> str | None:
        """``override 'a.b=1'`` or ``line 12`` of a fault at ``path``; None if neither is known.

        An override hides the lines of the values it replaced. A fault of a whole section is blamed on the override
        whose key the fault's text names, or on the override that created the section.
        """
        above = [key for key in self.overrides if key == path[: len(key)]]
        inside = [key for key in self.overrides if path and path == key[: len(path)]]
        to_blame = [key for key in inside if path not in self.lines or dotted(key) in text]
        if above or to_blame:
            return f"override {self.overrides[max(above, key=len) if above else to_blame[0]]!r}"
        known = [path[:length] for length in range(len(path), 0, -1) if path[:length] in self.lines]
        return f"line {self.lines[known[0]]}" if known else None


def refusal(label: str, faults: Sequence[Fault]) -> ConfigError:
    """One error for all faults of a file."""
    if len(faults) == 1:
        return ConfigError(f"{label}: {faults[0].text}", faults)
    return ConfigError("\n".join([f"{label}: {len(faults)} errors", *(f"  - {each.text}" for each in faults)]), faults)


def refused(document: Document, error: ValidationError) -> ConfigError:
    """One error for all faults that pydantic found."""
    details = [each for each in error.errors(include_url=False) if not _is_echo(each)]
    return refusal(document.label, [fault for each in details for fault in _faults(document, each)])


def fault_line(document: Document, path: Path, text: str) -> str:
    """A fault's text with its place in front."""
    place = document.place(path, text)
    return f"{place}: {text}" if place else text


def show_value(value: Any) -> str:
    """A value as the message shows it, shortened."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."


def _is_echo(details: ErrorDetails) -> bool:
    """Pydantic also calls a tuple too short when it refused one of its entries; that entry has its own fault."""
    return details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]


def _faults(document: Document, details: ErrorDetails) -> Iterator[Fault]:
    path, error = _path(details), (details.get("ctx") or {}).get("error")
    if isinstance(error, ConfigError):  # raised by our own check, which names its faults
        for fault in error.faults:
            yield replace(fault, text=fault_line(document, path, fault.text))
        return
    code, where, text = _described(document, details)
    yield Fault(dotted(path), code, fault_line(document, where, text))


def _described(document: Document, details: ErrorDetails) -> tuple[FaultCode, Path, str]:
    """The code of a fault that pydantic found, the path whose place is shown, and the text."""
    path, kind, value = _path(details), details["type"], details["input"]
    context: dict[str, Any] = details.get("ctx") or {}
    key = dotted(path)
    if kind == "missing":
        return FaultCode.KEY, path[:-1], f"{key} is missing; it is required"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):  # models; dataclasses
        return FaultCode.KEY, path, _unknown_key(document, path, value)
    if kind in _NEEDS_ITEMS:
        count = _NEEDS_ITEMS[kind].format(**context)
        return FaultCode.VALUE, path, f"{key} has {context['actual_length']} entries; it must have {count}"
    if kind not in _EXPECTED:
        return FaultCode.VALUE, path, f"{key} = {show_value(value)}: {details['msg']}"
    text = f"{key} = {show_value(value)}: must be {_EXPECTED[kind].format(**context)}"
    if key in _LISTS_OF_NAMES and isinstance(value, str) and show_value(value) == repr(value):
        text += f", such as [{value}]"
    return FaultCode.VALUE, path, text + _nearest_value(kind, value, context)


def _path(details: ErrorDetails) -> Path:
    """The keys to a fault; pydantic adds which form of a section it took the value for."""
    return tuple(part for part in details["loc"] if part not in EVAL_FORMS)


def _unknown_key(document: Document, path: Path, value: Any) -> str:
    if (moved := MOVED_KEYS.get(dotted(path))) is not None:
        return f"{dotted(path)} = {show_value(value)}: this key is called {moved} now; write it there"
    near = document.nearest(path, document.values)
    way_out = f"did you mean {near}?" if near else "remove it"
    return f"{dotted(path)} = {show_value(value)}: unknown key; {way_out}"


def _nearest_value(kind: str, value: Any, context: Mapping[str, Any]) -> str:
    if kind != "literal_error":
        return ""
    choices = [choice.strip("'") for choice in str(context["expected"]).replace(" or ", ", ").split(", ")]
    return meant(value, choices)
