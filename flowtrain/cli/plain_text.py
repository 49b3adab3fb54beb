"""Text from data for a terminal: whatever could steer the terminal is shown as an escape."""

from __future__ import annotations

import re
from collections.abc import Sequence

LOSS_OPEN, LOSS_CLOSE = "\u27e6", "\u27e7"
"""Brackets around text; in text from data they are escaped."""

# Control codes but for tab and newline, invisible marks of direction, line separators, tags.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
    + LOSS_OPEN
    + LOSS_CLOSE
    + "]"
)


def plain(text: str, encoding: str = "utf-8") -> str:
    """Return a text that can be printed safely, and in this encoding."""
    escaped = _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: str, limit: int, encoding: str = "utf-8") -> str:
    """Return a safe text without line breaks, of at most ``limit`` characters."""
    text = plain(text[: limit + 1], encoding).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def short_paths(names: Sequence[str], limit: int) -> list[str]:
    """Return names for a table: of a longer path the last components that fit, but what tells it from the others."""
    parts = [re.split("/+", name.rstrip("/")) for name in names]
    counts = [
        len(each) if len(name) <= limit else _fitting(each, limit) for name, each in zip(names, parts, strict=True)
    ]
    while True:
        shown = [
            name if count >= len(each) else "/".join(["...", *each[-count:]])
            for name, each, count in zip(names, parts, counts, strict=True)
        ]
        alike = [
            index
            for index, text in enumerate(shown)
            if counts[index] < len(parts[index])
            and any(other == text and names[number] != names[index] for number, other in enumerate(shown))
        ]
        if not alike:
            return shown
        for index in alike:
            counts[index] += 1


def _fitting(parts: Sequence[str], limit: int) -> int:
    """Return how many of the last components fit, with dots before them; at least one."""
    count = 1
    while count < len(parts) and len("/".join(["...", *parts[-count - 1 :]])) <= limit:
        count += 1
    return count
