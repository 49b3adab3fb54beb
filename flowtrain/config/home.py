"""Paths that begin with ``~``."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from flowtrain.errors import ConfigError


def expanded(path: str | PathLike[str]) -> Path:
    """Return a path with the home directory in the place of ``~`` or ``~user``; raises ConfigError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise ConfigError(f"{path}: {user} is no user's home directory here; write the path in full") from error
