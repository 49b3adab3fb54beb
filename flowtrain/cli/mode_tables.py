"""The table of modes that ``flowtrain plan`` and a start with ``mode: auto`` print."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowtrain.allocator.mode_rating import ModeRating
from flowtrain.cli.tables import facts_table
from flowtrain.controller.planning.report import PlanReport
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings


def mode_tables(report: PlanReport) -> Iterator[Table]:
    """All modes with degrees, settings and rates, the fastest first; then why each won or lost."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("mode", "degrees", "settings", "devices", "samples/s", "tokens/s", "of best"):
        is_text = heading in ("mode", "degrees", "settings")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    has_settings = any(rating.settings is not None for rating in report.comparison.ratings)
    if not has_settings:
        table.columns.pop(2)
    for rating in report.comparison.ratings:
        settings = [settings_text(rating.settings)] if has_settings else []
        table.add_row(rating.mode, degrees_text(rating), *settings, *_rates(report, rating))
    yield table
    yield facts_table([(rating.mode, rating.reason) for rating in report.comparison.ratings])


def choice_tables(report: PlanReport) -> Iterator[Table]:
    """What a start with ``mode: auto`` chose, for which devices, and by which rates."""
    counts = ", ".join(f"{each.count} {each.name}" for each in report.cluster.device_types)
    rates = "data sheets" if report.profile is None else report.profile.source
    yield facts_table([("mode auto", f"for {counts} of {report.where}, rates from {rates}")])
    yield from mode_tables(report)
    yield facts_table([("starts", f"{report.winner.mode}: {' '.join(report.overrides)}")])


def degrees_text(rating: ModeRating) -> str:
    """The degrees of each module, a line each; those of 1 are left out."""
    lines = [f"{module.name} {_degrees(module.degrees)}" for module in rating.modules]
    if rating.encoder_layers is not None and rating.modules[-1].degrees.pp > 1:
        lines.append(f"encoder layers {rating.encoder_layers}")
    return "\n".join(lines) or "-"


def settings_text(settings: BackboneSettings | None) -> str:
    """The chosen settings of the backbone, in two lines."""
    if settings is None:
        return "-"
    chunks = f", {settings.chunks} chunks" if settings.chunks > 1 else ""
    words = []
    if settings.activation_checkpointing is not None:
        words.append(
            {"none": "no recompute", "offload": "offload"}.get(
                settings.activation_checkpointing, f"{settings.activation_checkpointing} recompute"
            )
        )
    if settings.sharding is not None:
        words.append(f"{settings.sharding} sharding")
    return "\n".join(filter(None, (f"{settings.microbatch_tokens:,} tokens{chunks}", ", ".join(words))))


def _degrees(degrees: Degrees) -> str:
    parts = {"dp": degrees.dp, "pp": degrees.pp, "tp": degrees.tp}
    return " ".join(f"{name}={degree}" for name, degree in parts.items() if name == "dp" or degree > 1)


def _rates(report: PlanReport, rating: ModeRating) -> tuple[str, ...]:
    if rating.rate is None:
        return "-", "-", "-", "does not fit"
    tokens = rating.rate * report.planned.workload.tokens_per_sample
    return str(rating.devices), f"{rating.rate:.4g}", f"{tokens:,.0f}", f"{rating.rate / report.rate:.1%}"
