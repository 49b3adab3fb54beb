"""Text from data for a terminal: whatever could steer the terminal is shown as an escape."""

from __future__ import annotations

import re

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
