"""Secrets in URLs: a configuration is written into runs and printed in messages, so it may not hold any."""

from __future__ import annotations

import re
from urllib.parse import unquote

_PASSWORD = re.compile(r"://[^/@:\s]*:(?!\d+/)[^@\s]*@")
_PARAMETER = re.compile(
    r"[?&;#](?:[^=&;#\s]*(?:token|secret|passw|pwd|signature|credential|access[_-]?key|api[_-]?key|auth|session)"
    r"[^=&;#\s]*|key|pass|sig|jwt)=",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|A[KS]IA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,})\b")
_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\"]+")


def secret_in(text: str) -> str | None:
    """Say which kind of secret a URL carries, without repeating it; None if it has none."""
    if _TOKEN.search(text):
        return "an access token"
    plain = unquote(text)
    if "://" not in plain:
        return None
    if _PASSWORD.search(plain):
        return "a password (user:password@)"
    if _PARAMETER.search(plain):
        return "a key, token or signature among its parameters"
    return None


def without_queries(text: str) -> str:
    """Return a message whose URLs have lost their parameters, which may be signatures."""
    return _QUERY.sub(r"\1?...", text)
