"""Secrets in URLs: a configuration is written into runs and printed in messages, so it may not hold any."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

from flowtrain.config.yaml_text import Path, dotted
from flowtrain.errors import ConfigError, Fault, FaultCode

_WAY_OUT = (
    "remove it: credentials come from the environment alone (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
    "GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN)"
)
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


def refuse_secrets(label: str, values: object, lines: Mapping[Path, int], overrides: Sequence[str]) -> None:
    """Raise ConfigError if a URL in a document or in an override carries a secret; no message repeats it.

    label: the document's name. lines: of its values, from 1.
    """
    faults = []
    for path, text in _texts(values, ()):
        if (secret := secret_in(text)) is not None:
            where = f"{label}: line {lines[path]}" if path in lines else label
            faults.append(_fault(where, dotted(path), secret))
    for override in overrides:
        if (secret := secret_in(override)) is not None:
            key = override.partition("=")[0] if secret_in(override.partition("=")[0]) is None else ""
            faults.append(_fault("an override", key, secret))
    if faults:
        raise ConfigError("\n".join(fault.text for fault in faults), faults)


def _fault(where: str, key: str, secret: str) -> Fault:
    return Fault(key, FaultCode.VALUE, f"{where}: {key} has {secret} in its URL; {_WAY_OUT}")


def _texts(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


def without_queries(text: str) -> str:
    """Return a message whose URLs have lost their parameters, which may be signatures."""
    return _QUERY.sub(r"\1?...", text)
