"""The table of modes that ``flowtrain plan`` and a start with ``mode: auto`` print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowtrain.allocator.mode_reasons import CANNOT_RUN, rate_text
from flowtrain.cli.tables import facts_table
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings

if TYPE_CHECKING:
    from flowtrain.allocator.mode_rating import ModeRating
    from flowtrain.controller.planning.report import PlanReport


def mode_tables(report: PlanReport) -> Iterator[Table]:
    """All modes with degrees, settings and rates, the fastest first; then why each won or lost."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    table.add_column("degrees, settings", overflow="fold")
    for heading in ("devices", "samples/s", "tokens/s", "of best"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rating in report.comparison.ratings:
        table.add_row(rating.mode, plan_text(rating), *_rates(report, rating))
    yield table
    yield facts_table([(rating.mode, rating.reason) for rating in report.comparison.ratings])


def choice_tables(report: PlanReport) -> Iterator[Table]:
    """What a start with ``mode: auto`` chose, for which devices, and by which rates."""
    counts = ", ".join(f"{each.count} {each.name}" for each in report.cluster.device_types)
    rates = "data sheets" if report.profile is None else report.profile.source
    yield facts_table([("mode auto", f"for {counts} of {report.where}, rates from {rates}")])
    yield from mode_tables(report)
    yield facts_table([("starts", f"{report.winner.mode}: {' '.join(report.overrides)}")])


def plan_text(rating: ModeRating) -> str:
    """The degrees of each module, a line each, and the chosen settings; degrees of 1 are left out."""
    lines = [f"{module.name} {_degrees(module.degrees)}" for module in rating.modules]
    if rating.encoder_layers is not None and rating.modules[-1].degrees.pp > 1:
        lines.append(f"encoder layers {rating.encoder_layers}")
    if rating.settings is not None:
        lines.append(settings_text(rating.settings))
    return "\n".join(lines) or "-"


def settings_text(settings: BackboneSettings) -> str:
    """Settings of the backbone in words; what is as configured is left out."""
    words = [f"{settings.microbatch_tokens:,} tokens"]
    if settings.chunks > 1:
        words.append(f"{settings.chunks} chunks")
    if settings.activation_checkpointing is not None:
        words.append(f"checkpointing {settings.activation_checkpointing}")
    if settings.sharding is not None:
        words.append(f"sharding {settings.sharding}")
    return ", ".join(words)


def _degrees(degrees: Degrees) -> str:
    parts = {"dp": degrees.dp, "pp": degrees.pp, "tp": degrees.tp}
    return " ".join(f"{name}={degree}" for name, degree in parts.items() if name == "dp" or degree > 1)


def _rates(report: PlanReport, rating: ModeRating) -> tuple[str, ...]:
    if rating.rate is None:
        return "-", "-", "-", "cannot run" if rating.reason.startswith(CANNOT_RUN) else "does not fit"
    tokens = rating.rate * report.planned.workload.tokens_per_sample
    return str(rating.devices), rate_text(rating.rate), f"{tokens:,.0f}", f"{rating.rate / report.rate:.1%}"
