"""The sections of a page about one run, but for its samples and its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from markupsafe import Markup

from flowtrain.config.secrets import redacted
from flowtrain.config.yaml_text import dump_yaml
from flowtrain.observability.report.blocks import Cell, Tile, number_cell, table, text_cell, tiles
from flowtrain.observability.report.markup import element
from flowtrain.observability.report.outcome import (
    KeyFigures,
    Outcome,
    State,
    Verdict,
    disturbed_steps,
    steady_steps,
)
from flowtrain.observability.report.reading import as_count, as_list, as_number, as_text, dig
from flowtrain.observability.report.run_data import Record, RunData, event_time
from flowtrain.observability.report.units import MISSING, counted, duration, moment, number, percent, scaled

MAX_ROWS = 100
PILL = {
    State.RUNNING: "running",
    State.DONE: "done",
    State.STOPPED: "stopped",
    State.FAILED: "failed",
    State.KILLED: "killed",
    State.EMPTY: "empty",
}
"""The style sheet's name of each state."""
_SKIP_REASONS = {0.0: "loss or gradients were not finite", 1.0: "the loss was a spike"}
"""Why a step made no update, by whether its loss was a spike."""


def lead(run: RunData, outcome: Outcome) -> str:
    """Return the line under a run's name."""
    of = f" of {outcome.num_steps:,}" if outcome.num_steps else ""
    started = run.of_kind("run_started")
    device = as_text(dig(started[-1], "device")) if started else ""
    parts = [
        f"{outcome.step:,}{of} steps",
        f"in {duration(outcome.duration_s)}" if outcome.duration_s is not None else "",
        f"mode {run.mode}",
        run.steps.emulated or device,
        f"started {moment(outcome.started_s)}" if outcome.started_s is not None else "",
        f"{outcome.num_starts:,} starts" if outcome.num_starts > 1 else "",
    ]
    return " \u00b7 ".join(part for part in parts if part)


def verdict_box(outcome: Outcome, verdict: Verdict) -> Markup:
    """Return how the run ended if it did not end well, and what limits it."""
    said: list[Markup] = []
    tone = ""
    if outcome.state in (State.FAILED, State.STOPPED):
        tone = "bad" if outcome.state is State.FAILED else "warn"
        why = outcome.reason or "it did not say why"
        said.append(element("p", f"The run {outcome.state}: ", element("span", why, class_="text"), class_="first"))
    elif outcome.state is State.KILLED:
        tone = "warn"
        said.append(
            element(
                "p",
                "The run ended without a word: it was killed, or its machine was.",
                class_="first",
            )
        )
    elif outcome.state is State.EMPTY:
        tone = "warn"
        said.append(element("p", "The run has not finished a step.", class_="first"))
    if outcome.resume:
        said.append(element("p", f"Resume: {outcome.resume}."))
    if outcome.step:
        said.append(element("p", verdict.limit, class_=None if said else "first"))
        said += [element("p", line, class_="muted") for line in verdict.advice]
    return element("div", said, class_=f"verdict {tone}".strip())


def glance(run: RunData, figures: KeyFigures) -> Markup:
    """Return the numbers of the first screen."""
    return tiles(_tiles(run, figures))


def _tiles(run: RunData, figures: KeyFigures) -> Iterator[Tile]:
    if figures.first_loss is not None:
        over = f"mean of the last {counted(figures.num_last, 'step')}" if figures.num_last > 1 else "of the last step"
        first = f"{number(figures.first_loss, 4)} at the first"
        yield Tile("Training loss", number(figures.last_loss, 4), f"{over}; {first}")
    for name, (last, best, step) in list(figures.eval_losses.items())[:4]:
        yield Tile(f"Loss of {name}"[:60], number(last, 4), f"best {number(best, 4)} after step {step:,}")
    if figures.tokens_per_s is not None:
        each = figures.tokens_per_s_per_device
        sub = f"{scaled(each, 'si')} a device, " if each is not None else ""
        yield Tile(
            "Throughput",
            scaled(figures.tokens_per_s, "si"),
            f"tokens/s; {sub}{scaled(figures.samples_per_s, 'si', 'samples/s')}",
        )
    if figures.step_time_s is not None:
        yield Tile("Step time", duration(figures.step_time_s), "median")
    if figures.mfu is not None:
        sub = f"backbone {percent(figures.backbone_mfu)}" if figures.backbone_mfu is not None else ""
        yield Tile("MFU", percent(figures.mfu), sub)
    if figures.starved_share is not None:
        yield Tile("Starved", percent(figures.starved_share), "of the backbone's time, without data")
    if figures.blocked_share is not None:
        yield Tile("Blocked", percent(figures.blocked_share), "of the encoders' time, ahead of the backbone")
    if figures.pool_peak_nbytes is not None:
        bound = run.planned_pool_nbytes
        yield Tile(
            "Pool, most in use",
            scaled(figures.pool_peak_nbytes, "nbytes"),
            f"of {scaled(bound, 'nbytes')}" if bound else "",
        )
    yield Tile("Quarantined", f"{run.quarantine.num_samples:,}", "samples")
    if run.events:
        yield Tile("Restarts", f"{len(run.of_kind('restart')):,}", _restarts_text(run))
    if len(run.steps.skipped):
        yield Tile("Skipped", f"{len(run.steps.skipped):,}", "steps that made no update")


def _restarts_text(run: RunData) -> str:
    """Return what restarts have cost."""
    restarts = run.of_kind("restart")
    lost_s = sum(np.nan_to_num(as_number(event.get(key))) for event in restarts for key in ("hung_s", "down_s"))
    again = sum(as_count(event.get("steps_again")) or 0 for event in restarts)
    parts = ["of actors"]
    if lost_s > 0.0:
        parts.append(f"{duration(float(lost_s))} until they worked again")
    if again:
        parts.append(f"{counted(again, 'step')} done again")
    return ", ".join(parts)


def packing_table(run: RunData) -> Markup | None:
    """Return how even and how full microbatches were, over all steps."""
    columns: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("packing fill", "packing_fill", percent),
        ("imbalance of ranks in a step", "dp_imbalance", percent),
        ("imbalance of slots, mean of a step", "slot_imbalance_mean", percent),
        ("imbalance of slots, worst of a step", "slot_imbalance_max", percent),
        ("microbatches of a step", "num_microbatches", lambda value: f"{value:,.4g}"),
        ("tokens of a step", "num_tokens", lambda value: f"{value:,.0f}"),
        ("planning time of a step", "plan_time_s", duration),
        ("wait for the plan of a step", "plan_wait_s", duration),
    )
    rows: list[list[Cell | str]] = []
    for name, key, shown in columns:
        if key == "dp_imbalance" and not run.has_replicas:
            continue
        values = run.steps[key][np.isfinite(run.steps[key])]
        if len(values):
            points = np.percentile(values, (5, 50, 95))
            rows.append([name, *(number_cell(shown(float(value))) for value in (*points, values.max()))])
    return table("Packing over all steps", ("value", "5 %", "median", "95 %", "largest"), rows) if rows else None


def plan_content(run: RunData, figures: KeyFigures) -> list[Markup | None]:
    """Return what was planned beside what came out."""
    return [_modules_table(run), _predicted_table(run, figures)]


def _modules_table(run: RunData) -> Markup | None:
    encoders = run.plan.get("encoders")
    modules = dict(encoders) if isinstance(encoders, Mapping) else {}
    modules |= {name: run.plan[name] for name in ("backbone", "feeder") if isinstance(run.plan.get(name), Mapping)}
    rows: list[list[Cell | str]] = []
    for name, module in modules.items():
        degrees = [as_count(dig(module, f"{axis}_parallel_size")) or 1 for axis in ("data", "pipeline", "tensor")]
        segment = as_count(dig(module, "segment_nbytes")) or 0
        rows.append(
            [
                Cell(name),
                number_cell(f"{math.prod(degrees):,}"),
                number_cell(" x ".join(f"{degree:,}" for degree in degrees)),
                number_cell(f"{as_number(dig(module, 'num_cpus')):g}"),
                number_cell(f"{as_number(dig(module, 'num_devices')):g}"),
                number_cell(scaled(segment, "nbytes") if segment else MISSING),
            ]
        )
    headings = ("module", "actors", "data x pipeline x tensor", "CPUs each", "devices each", "pool segment")
    return table(f"Plan: mode {run.mode}", headings, rows) if rows else None


def _predicted_table(run: RunData, figures: KeyFigures) -> Markup | None:
    rows = list(_predictions(run, figures))
    return table("Plan and reality", ("value", "planned", "measured", "measured over planned"), rows) if rows else None


def _predictions(run: RunData, figures: KeyFigures) -> Iterator[list[Cell | str]]:
    tokens, samples = as_number(run.planning.get("tokens_per_s")), as_number(run.planning.get("rate"))
    if math.isfinite(tokens):
        yield _compared("tokens/s", tokens, figures.tokens_per_s, number)
    if math.isfinite(samples):
        yield _compared("samples/s", samples, figures.samples_per_s, number)
    if figures.pool_peak_nbytes is not None and run.planned_pool_nbytes:
        yield _compared(
            "pool", float(run.planned_pool_nbytes), figures.pool_peak_nbytes, lambda value: scaled(value, "nbytes")
        )
    modes = as_list(run.planning.get("modes"))
    imbalance = as_number(dig(modes[0], "imbalance")) if modes else math.nan  # the winner comes first
    if figures.imbalance is not None and math.isfinite(imbalance):
        yield ["imbalance of ranks", number_cell(percent(imbalance)), number_cell(percent(figures.imbalance)), ""]
    r2 = as_number(dig(run.profile, "microbatches", "fitted", "r2"))
    if math.isfinite(r2):
        shown = f"R\u00b2 {r2:.3f}"
        yield ["cost of microbatches, fitted to measured ones", "", number_cell(shown), ""]


def _compared(
    name: str, planned: float, measured: float | None, shown: Callable[[float | None], str]
) -> list[Cell | str]:
    over = percent(measured / planned) if measured is not None and planned > 0 else MISSING
    return [name, number_cell(shown(planned)), number_cell(shown(measured)), number_cell(over)]


def modes_table(run: RunData) -> Markup | None:
    """Return the modes that ``mode: auto`` compared; None if no plan was made."""
    rows: list[list[Cell | str]] = []
    for mode in as_list(run.planning.get("modes")):
        rate = as_number(dig(mode, "tokens_per_s"))
        rows.append(
            [
                as_text(dig(mode, "mode")),
                number_cell(scaled(rate, "si", "tokens/s")),
                number_cell(percent(as_number(dig(mode, "of_best")))),
                text_cell(as_text(dig(mode, "reason"))),
            ]
        )
    return table("Modes that the planner compared", ("mode", "predicted", "of the best", "why"), rows) if rows else None


def faults_table(run: RunData) -> Markup | None:
    """Return what went wrong or was interrupted, in order of time; None if nothing did."""
    found = sorted(_faults(run), key=lambda fault: fault[0] if math.isfinite(fault[0]) else 0.0)
    if not found:
        return None
    more = f" (the last {MAX_ROWS} of {len(found):,})" if len(found) > MAX_ROWS else ""
    rows: list[list[Cell | str]] = [
        [
            Cell(moment(time_s if math.isfinite(time_s) else None), tone="when"),
            number_cell(step),
            what,
            text_cell(text),
        ]
        for time_s, step, what, text in found[-MAX_ROWS:]
    ]
    return table(f"Faults and restarts{more}", ("when", "step", "what", "details"), rows)


def _faults(run: RunData) -> Iterator[tuple[float, str, str, str]]:
    """Yield (time, step, what, text)."""
    for event in run.events:
        kind, time_s, step = event.get("event"), event_time(event), _step_text(as_number(event.get("step")))
        if kind == "restart":
            yield time_s, step, "restart", _restart_text(event)
        elif kind == "run_started" and event.get("resumed_from"):
            yield time_s, step, "resume", f"after step {as_number(event.get('resumed_from')):,.0f}"
        elif kind == "note" and event.get("level") == "warning":
            yield time_s, step, "warning", as_text(event.get("text"))
        elif kind == "run_ended" and event.get("outcome") != "done":
            yield time_s, step, as_text(event.get("outcome")), as_text(event.get("reason"))
    yield from _skipped(run)
    times = run.steps["timestamp"]
    for place in np.flatnonzero(np.isfinite(run.steps["rewound_to"])):
        text = f"weights and optimizer went back to the checkpoint of step {run.steps['rewound_to'][place]:,.0f}"
        yield float(times[place]), _step_text(float(run.steps.step[place])), "rewind", text


def _restart_text(event: Record) -> str:
    hung_s, down_s = as_number(event.get("hung_s")), as_number(event.get("down_s"))
    parts = [f"{as_text(event.get('name'))}: {as_text(event.get('reason'))}"]
    if math.isfinite(hung_s):
        parts.append(f"noticed after {duration(hung_s)}")
    parts.append(f"worked again after {duration(down_s)}" if math.isfinite(down_s) else "not known to have worked")
    if again := as_count(event.get("steps_again")):
        parts.append(f"{counted(again, 'step')} done again")
    return "; ".join(parts)


def _step_text(step: float) -> str:
    return f"{step:,.0f}" if math.isfinite(step) else MISSING


def _skipped(run: RunData) -> Iterator[tuple[float, str, str, str]]:
    """Yield steps without an update as ``_faults`` does; those in a row, for one reason, are one."""
    rows: list[tuple[float, int, int, str]] = []
    for place in np.flatnonzero(run.steps["skipped"] == 1):
        time_s, step = float(run.steps["timestamp"][place]), int(run.steps.step[place])
        why = _SKIP_REASONS.get(float(run.steps["spike"][place]), " or ".join(_SKIP_REASONS.values()))
        if rows and rows[-1][2:] == (step - 1, why):
            time_s, first, *_ = rows.pop()
        else:
            first = step
        rows.append((time_s, first, step, why))
    for time_s, first, last, why in rows:
        steps = _step_text(first) if first == last else f"{_step_text(first)}-{_step_text(last)}"
        yield time_s, steps, "skipped step" if first == last else "skipped steps", f"{why}; no update"


def checkpoints_table(run: RunData) -> Markup | None:
    """Return the checkpoints that a run completed; None if it tells of none."""
    found = run.of_kind("checkpoint")
    if not found:
        return None
    rows: list[list[Cell | str]] = [
        [
            Cell(f"{as_number(event.get('step')):,.0f}", is_number=True),
            Cell(moment(event_time(event)), tone="when"),
            number_cell(duration(as_number(event.get("duration_s")))),
            number_cell(scaled(as_number(event.get("nbytes")), "nbytes")),
            as_text(event.get("best_of")),
        ]
        for event in found[-MAX_ROWS:]
    ]
    more = f" (the last {MAX_ROWS} of {len(found):,})" if len(found) > MAX_ROWS else ""
    return table(f"Checkpoints{more}", ("after step", "complete", "took", "size", "best by"), rows)


def notes_box(texts: Iterable[str]) -> Markup | None:
    """Return what a reader must know about the files; None if there is nothing."""
    shown = [element("li", text) for text in texts]
    if not shown:
        return None
    return element("div", element("ul", shown, class_="notes"), class_="verdict warn")


def configuration(run: RunData) -> Markup:
    """Return the configuration, without secrets."""
    text = dump_yaml(redacted(run.config)) if run.config else "config.yaml is missing or cannot be read"
    return element("details", element("summary", "config.yaml"), element("pre", text, tabindex=0))


def steady_note(run: RunData) -> str:
    """Return over which steps rates and shares are."""
    count = int(steady_steps(run).sum())
    lost = int(disturbed_steps(run).sum())
    if count == len(run.steps) > 0:
        return f"Rates and shares are over all {counted(count, 'step')}."
    also = f", and {counted(lost, 'step')} during which a process was missing" if lost else ""
    return f"Rates and shares are over {counted(count, 'step')}: all but the first of each start{also}."
