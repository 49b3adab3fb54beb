"""``flowtrain calibrate``: prints how measured times compare with predicted ones, and writes the profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flowtrain import api
from flowtrain.cli.output_path import check_output_path
from flowtrain.cli.tables import facts_table
from flowtrain.costs.calibration import factors_text
from flowtrain.errors import ConfigError
from flowtrain.observability.files import replace_text
from flowtrain.observability.run_dir import RunDir, find_run


def calibrate(runs: Sequence[str], profile: Path | None, save: Path | None) -> None:
    """Fit as ``api.calibrate`` does, write the profile and show its factors; ConfigError if it cannot be written."""
    roots = [find_run(run) for run in runs]
    target = save if save is not None else RunDir(roots[0]).profile
    check_output_path("--save", target)
    report = api.calibrate(*roots, profile=profile)
    try:
        replace_text(target, report.profile.to_json())
    except OSError as error:
        raise ConfigError(f"--save {target}: the profile cannot be written: {error.strerror}") from error
    found = report.calibration
    rows = [(f"{name}, measured over predicted", text) for name, text in factors_text(found).items()]
    rows[-1] = ("the host", rows[-1][1])
    facts = [
        (
            "calibrated",
            f"{found.num_spans:,} spans of {report.num_steps} steps of {found.run} on {report.profile.device}",
        ),
        *rows,
        ("saved", f"{target}; plan with flowtrain plan CONFIG --profile {target}"),
    ]
    Console().print(facts_table(facts))
