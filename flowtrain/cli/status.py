"""``flowtrain status``: prints how a run stands; nothing in a text can steer the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flowtrain import api
from flowtrain.cli.plain_text import one_line, plain
from flowtrain.cli.tables import facts_table, nbytes_text
from flowtrain.observability.report.units import NBSP, counted, duration, number, percent

if TYPE_CHECKING:
    from flowtrain.observability.report.status import RunStatus, Said

MAX_TEXT = 300
MAX_REASON = 10_000
"""Reasons end with the ways out, so they are shown whole."""
COLORS = {"RUNNING": "blue", "DONE": "green", "FAILED": "red"}


def status(run: str, as_json: bool) -> None:
    """Show what ``api.status`` returns."""
    found = api.status(run)
    if as_json:
        print(json.dumps(found.as_record()))
        return
    console = Console(highlight=False)
    head = Text(one_line(found.name, MAX_TEXT, console.encoding), "bold")
    head.append("  ")
    head.append(str(found.state), COLORS.get(found.state.name, "yellow"))
    console.print(head)
    encoding = console.encoding
    console.print(facts_table([(name, plain(_spaced(text), encoding)) for name, text in _facts(found)]))


def _spaced(text: str) -> str:
    return text.replace(NBSP, " ")


def _ago(age_s: float) -> str:
    return f"{duration(age_s)} ago"


def _said_text(said: Said) -> str:
    text = one_line(said.text, MAX_TEXT)
    return text if said.age_s is None else f"{_ago(said.age_s)}: {text}"


def _facts(found: RunStatus) -> Iterator[tuple[str, str]]:
    of = f" of {found.num_steps:,}" if found.num_steps else ""
    eta = f", about {duration(found.eta_s)} left" if found.eta_s is not None else ""
    yield "step", f"{found.step:,}{of}{eta}"
    if found.step_age_s is not None:
        yield "last step", _ago(found.step_age_s)
    elif found.start_age_s is not None:
        yield "started", _ago(found.start_age_s)
    elif found.age_s is not None:
        yield "last sign", _ago(found.age_s)
    for said in found.recovering:
        yield "recovering", _said_text(said)
    if found.reason:
        yield "reason", one_line(found.reason, MAX_REASON)
    yield "mode", found.mode + (f", {found.emulated}" if found.emulated else "")
    if found.loss is not None:
        yield "loss", f"{number(found.loss, 4)} in the last step"
    for name, loss in found.eval_losses.items():
        yield f"loss of {one_line(name, 40)}", number(loss, 4)
    if found.tokens_per_s is not None:
        over = f"; rates and shares are over the last {counted(found.num_recent, 'step')}"
        yield "rate", f"{found.tokens_per_s:,.0f} tokens/s, a step takes {duration(found.step_time_s)}{over}"
    if found.mfu is not None:
        yield "MFU", percent(found.mfu)
    if found.starved_share is not None:
        blocked = f", encoders blocked {percent(found.blocked_share)}" if found.blocked_share is not None else ""
        yield "waits", f"backbone starved {percent(found.starved_share)}{blocked}"
    if found.pool_nbytes is not None:
        bound = f" of {nbytes_text(found.pool_bound_nbytes)}" if found.pool_bound_nbytes else ""
        yield "pool", f"{nbytes_text(found.pool_nbytes)}{bound}"
    counts = (("restarts", found.num_restarts), ("quarantined", found.num_rejected), ("skipped", found.num_skipped))
    yield from ((name, f"{count:,}") for name, count in counts if count)
    if found.checkpoint_step is not None:
        yield "checkpoint", f"after step {found.checkpoint_step:,}"
    elif found.step:
        yield "checkpoint", "none"
    if found.resume:
        yield "resume", found.resume
    for said in found.warnings:
        yield "warning", _said_text(said)
    for text in found.notes:
        yield "note", one_line(text, MAX_TEXT)
    yield "directory", str(found.directory)
