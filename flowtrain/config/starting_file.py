"""Where ``flowtrain init`` writes, what the run is called, and how its user goes on."""

from __future__ import annotations

import re
import shlex
from os import PathLike
from pathlib import Path

from flowtrain.config.home import expanded
from flowtrain.config.paths import data_fault
from flowtrain.config.secrets import secret_fault
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


def check_data(data: str, file: Path) -> None:
    """Raise ConfigError if the path or URL of ``--data`` cannot be used in ``file``, which is not written yet."""
    config_dir = expanded(file).resolve().parent
    fault = secret_fault("--data", data) or data_fault(data, "--data", config_dir)
    if fault is not None:
        raise ConfigError(fault)


def next_commands(file: str, has_data: bool, has_rates: bool) -> list[str]:
    """Return the commands that come after ``flowtrain init``.

    has_data: the file names data to check. has_rates: ``mode: auto`` can plan for this machine.
    """
    name = shlex.quote(file)
    # Where nothing has rates, mode auto has no plan to show.
    mode = "" if has_rates else " mode=decoupled"
    check = [f"flowtrain data check {name}"] if has_data else []
    return [*check, f"flowtrain plan {name} --devices 8", f"flowtrain train {name}{mode} --dry-run"]
