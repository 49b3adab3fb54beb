"""HTML and SVG from Python values: whatever is not markup already is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

from markupsafe import Markup, escape

Content: TypeAlias = Markup | str | int | float | Iterable["Content"] | None
"""What an element may hold; None is left out."""
Attribute: TypeAlias = str | int | float | bool | None
"""True: the attribute alone; False and None: it is left out."""

# Control codes but for tab and newline, halves of surrogate pairs, and marks that turn the direction of text.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_REPLACEMENT = "\ufffd"
_VOID = frozenset({"meta", "link", "img", "br"})


def plain_text(value: object) -> str:
    """Return a value as text that UTF-8 can hold and that does not change how a page reads."""
    return _UNSAFE.sub(_REPLACEMENT, str(value).replace("\r\n", "\n").replace("\r", "\n"))


def join(children: Iterable[Content]) -> Markup:
    """Return contents one after another."""
    parts: list[str] = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(escape(plain_text(child)))
        else:
            parts.append(join(child))
    return Markup("".join(parts))


def element(name: str, /, *children: Content, **attributes: Attribute) -> Markup:
    """Return an element. ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        assert not children, f"{name} holds nothing"
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(plain_text(value))}"'
