"""Where ``flowtrain init`` writes, and what the run is called."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from flowtrain.config.home import expanded
from flowtrain.errors import ConfigError


def run_name(model: str) -> str:
    """Return a run's name for a directory or hub id: the last part of it, in small letters."""
    last = expanded(model).resolve().name if expanded(model).is_dir() else model.split("/")[-1]
    name = re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")
    return name or "run"


def starting_file(model: str, output: str | PathLike[str] | None, force: bool) -> Path:
    """Return the file to write, by default one of the model's name here.

    Raises ConfigError if it is there already and ``force`` is false, if it cannot be a file, or if its name does not
    print.
    """
    file = expanded(output) if output is not None else Path(f"{run_name(model)}.yaml")
    if not file.name.isprintable():
        raise ConfigError(f"--output {str(file)!r}: the name has characters that do not print; choose another one")
    if not file.parent.is_dir():
        raise ConfigError(f"--output {file}: there is no directory {file.parent}; create it or choose another place")
    if file.is_dir():
        raise ConfigError(f"--output {file}: it is a directory; name a file in it")
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; name another file with --output, or replace it with --force")
    return file
