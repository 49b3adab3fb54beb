"""A configuration for others to read: values that are, or may hold, a secret are replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flowtrain.config.secrets import secret_in, without_queries

REDACTED = "(redacted)"

# Keys of a configuration that are no secrets, such as image_token and microbatch_tokens, do not match.
_SECRET_KEY = re.compile(
    r"(?:^|[_-])(?:api[_-]?key|access[_-]?key|secret|password|passwd|pwd|credentials?|auth|authorization|private[_-]?key)"
    r"(?:$|[_-])|(?:^|[_-])(?:access|auth|api|bearer|refresh|session|hf|id)[_-]?token$|^token$|apikey",
    re.IGNORECASE,
)


def redacted(values: Any) -> Any:
    """Return plain values without secrets: those of telling keys, and URLs that carry one."""
    if isinstance(values, Mapping):
        return {
            str(key): REDACTED if _is_secret(str(key)) and item not in (None, "", {}) else redacted(item)
            for key, item in values.items()
        }
    if isinstance(values, list | tuple):
        return [redacted(item) for item in values]
    if isinstance(values, str):
        return REDACTED if secret_in(values) is not None else without_queries(values)
    return values


def _is_secret(key: str) -> bool:
    return key == "tracker_options" or _SECRET_KEY.search(key) is not None
