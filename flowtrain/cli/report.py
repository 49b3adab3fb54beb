"""``flowtrain report``: writes a page about runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from flowtrain import api
from flowtrain.cli.output_path import check_output_path
from flowtrain.errors import ConfigError


def report(runs: Sequence[str], output: Path | None, steps: str | None, thumbnails: bool) -> None:
    """Write as ``api.report`` does, and print where."""
    if output is not None:
        check_output_path("--output", output, (".html", ".htm"))
    print(f"wrote {api.report(*runs, output=output, steps=_steps(steps), thumbnails=thumbnails)}")


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,12})(?:-([0-9]{1,12}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise ConfigError(f"--steps {text}: give a step, or the first and the last one, such as 20-22")
    return first, last
