"""What a row holds, as text for people: also of a row that is no sample."""

from __future__ import annotations

import json


def text_of_json(data: bytes | memoryview) -> str:
    """Return JSON with a value a line; as it is, with escapes for what is not UTF-8, if it is none. Never raises."""
    try:
        return text_of_values(json.loads(str(data, "utf-8-sig")))
    except (ValueError, RecursionError):
        return str(data, "utf-8", "backslashreplace")


def text_of_values(values: object) -> str:
    """Return plain values as JSON with a value a line; bytes as their number."""
    return json.dumps(values, indent=2, ensure_ascii=False, default=_text_of_other)


def _text_of_other(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
