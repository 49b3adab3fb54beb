"""Checks where a command will write, so that a bad path is refused before the work, not after it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from flowtrain.errors import ConfigError


def check_output_path(option: str, path: Path, endings: Sequence[str] = ()) -> None:
    """Raise ConfigError unless a file can be written there; with ``endings``, its name must have one of them.

    option: the option that names the file, for messages.
    """
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{option} {path}: the ending must be {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {path.parent}; create it or choose another place")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: no file can be written there; choose another place")


def check_plot_path(path: Path, endings: Sequence[str]) -> None:
    """Raise ConfigError unless a plot can be drawn and written there; ``endings`` are its formats."""
    check_output_path("--plot", path, endings)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {path}: plots need matplotlib, which is not installed: pip install 'flowtrain[plot]', or leave "
            "--plot out"
        )
