"""Where a plot may be written, so that it is refused before the work and not behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flowtrain.errors import ConfigError


def check_plot_path(plot: Path, endings: Sequence[str]) -> None:
    """Raise ConfigError unless a file with one of the endings can be written there."""
    if plot.suffix.lower() not in endings:
        raise ConfigError(f"--plot {plot}: the ending must be {' or '.join(endings)}")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no directory {plot.parent}; make it or choose another place")
    if plot.is_dir() or not os.access(plot if plot.exists() else plot.parent, os.W_OK):
        raise ConfigError(f"--plot {plot}: no file can be written there; choose another place")
