"""Secrets: a configuration is written into runs and printed in messages, so it may not hold any."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
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
_SECRET_NAME = re.compile(r"(?<!image_)token$|secret|passw|credential|api_?key|access_?key|private_?key", re.IGNORECASE)
HIDDEN = "(hidden)"


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


def secret_fault(label: str, text: str) -> str | None:
    """Say that a text named ``label`` carries a secret, without repeating it; None if it has none."""
    secret = secret_in(text)
    return None if secret is None else f"{label}: has {secret} in its URL; {_WAY_OUT}"


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


def is_secret_name(name: str) -> bool:
    """Whether a key says that its value is a secret."""
    return _SECRET_NAME.search(name) is not None


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values of a configuration as others may see them.

    Secrets and options of trackers are hidden, URLs lose their parameters, and the home directory is ``~``.
    """
    shown: dict[str, Any] = _redacted(values, os.path.expanduser("~/"))
    return shown


def _redacted(value: Any, home: str) -> Any:
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if key == "tracker_options" or (isinstance(item, str) and is_secret_name(str(key)))
            else _redacted(item, home)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item, home) for item in value]
    if not isinstance(value, str):
        return value
    if secret_in(value) is not None:
        return HIDDEN
    shown = without_queries(value)
    return f"~/{shown.removeprefix(home)}" if shown.startswith(home) else shown
