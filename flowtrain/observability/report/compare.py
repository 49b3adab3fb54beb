"""Several runs side by side: their numbers, curves over each other, and paired differences to the first one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from flowtrain.config.resume import ABSENT, leaves
from flowtrain.config.secrets import redacted
from flowtrain.observability.report.blocks import Cell, number_cell, table, text_cell
from flowtrain.observability.report.figures import NUM_COLORS, Chart, Line, smoothed
from flowtrain.observability.report.outcome import KeyFigures, Outcome, eval_points, steady_steps
from flowtrain.observability.report.run_data import RunData
from flowtrain.observability.report.sampling import Difference, FloatArray, moving_mean, paired_difference
from flowtrain.observability.report.units import MISSING, NBSP, Kind, duration, number, percent, scaled

MAX_CHANGES = 200

Shown = Callable[[KeyFigures], str]
Places = npt.NDArray[np.intp]
_FIGURES: tuple[tuple[str, Shown], ...] = (
    ("training loss, last twentieth", lambda figures: number(figures.last_loss, 4)),
    ("tokens/s", lambda figures: scaled(figures.tokens_per_s, "si")),
    ("tokens/s a device", lambda figures: scaled(figures.tokens_per_s_per_device, "si")),
    ("step time, median", lambda figures: duration(figures.step_time_s)),
    ("MFU", lambda figures: percent(figures.mfu)),
    ("starved", lambda figures: percent(figures.starved_share)),
    ("blocked", lambda figures: percent(figures.blocked_share)),
    ("packing fill", lambda figures: percent(figures.fill)),
    ("imbalance of ranks", lambda figures: percent(figures.imbalance)),
    ("pool, most in use", lambda figures: scaled(figures.pool_peak_nbytes, "nbytes")),
)
_CHARTS: tuple[tuple[str, str, str, Kind, str], ...] = (
    ("tokens_per_s", "tokens", "Throughput", "si", "tokens/s"),
    ("step_time_s", "step-time", "Step time", "seconds", ""),
    ("mfu", "mfu", "Model FLOPs utilisation", "share", ""),
    ("packing_fill", "fill", "Packing fill", "share", ""),
    ("pool_dram_nbytes", "pool", "Pool in use, DRAM", "nbytes", ""),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the runs."""

    label: str
    """Its name; runs of one name are told apart by a number."""
    run: RunData
    outcome: Outcome
    figures: KeyFigures


def labels_of(runs: Sequence[RunData]) -> list[str]:
    """Return a name for each run, each once."""
    names = [run.name for run in runs]
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def figures_table(runs: Sequence[Compared]) -> Markup:
    """Return the numbers of all runs, a column for each."""
    rows: list[list[Cell | str]] = [
        ["outcome", *(number_cell(str(each.outcome.state)) for each in runs)],
        ["steps", *(number_cell(f"{each.outcome.step:,}") for each in runs)],
        ["mode", *(number_cell(each.run.mode) for each in runs)],
        ["duration", *(number_cell(duration(each.outcome.duration_s)) for each in runs)],
    ]
    for name in dict.fromkeys(name for each in runs for name in each.figures.eval_losses):
        values = [each.figures.eval_losses.get(name) for each in runs]
        rows.append([f"loss of {name}, last", *(number_cell(number(v[0], 4) if v else MISSING) for v in values)])
    for name, shown in _FIGURES:
        texts = [shown(each.figures) for each in runs]
        if any(text != MISSING for text in texts):
            rows.append([name, *map(number_cell, texts)])
    rows.append(["rejected samples", *(number_cell(f"{each.run.quarantine.num_samples:,}") for each in runs)])
    return table("Runs side by side", ("value", *(each.label for each in runs)), rows)


def paired_table(runs: Sequence[Compared]) -> Markup | None:
    """Return differences to the first run over the steps that both have; None if there are none."""
    rows = [row for other in runs[1:] for row in _paired_rows(runs[0], other)]
    headings = ("run", "value", "steps", "difference", "95 % interval", "same plans")
    return table(f"Paired difference to {runs[0].label}, step by step", headings, rows) if rows else None


def _paired_rows(base: Compared, other: Compared) -> Iterator[list[Cell | str]]:
    ours, theirs = common_places(base.run, other.run)
    plans, others = base.run.steps.digests, other.run.steps.digests
    same = sum(bool(plans[a]) and plans[a] == others[b] for a, b in zip(ours, theirs, strict=True))
    plans_text = f"{same:,} of {len(ours):,}" if len(ours) else MISSING
    loss = paired_difference(other.run.steps["loss"][theirs] - base.run.steps["loss"][ours])
    if loss.num_pairs:
        yield _row(other.label, "training loss", loss, lambda value: f"{value:+.4f}", False, plans_text)
    for name in (each for each in base.figures.eval_losses if each in other.figures.eval_losses):
        held_out = _eval_difference(base.run, other.run, name)
        if held_out.num_pairs:
            yield _row(other.label, f"loss of {name}", held_out, lambda value: f"{value:+.4f}", False, "")
    for key, name, is_better in (("step_time_s", "step time", False), ("tokens_per_s", "tokens/s", True)):
        rates = rate_difference(base.run, other.run, key)
        if rates.num_pairs:
            yield _row(other.label, name, rates, _as_percent, is_better, plans_text)


def common_places(base: RunData, other: RunData) -> tuple[Places, Places]:
    """Return where the steps that two runs share are in each."""
    _, ours, theirs = np.intersect1d(base.steps.step, other.steps.step, assume_unique=True, return_indices=True)
    return ours, theirs


def rate_difference(base: RunData, other: RunData, key: str) -> Difference:
    """Return the difference of a rate's or a time's logarithm, without the first step of any start."""
    ours, theirs = common_places(base, other)
    steady = steady_steps(base)[ours] & steady_steps(other)[theirs]
    before, after = base.steps[key][ours][steady], other.steps[key][theirs][steady]
    with np.errstate(divide="ignore", invalid="ignore"):
        return paired_difference(np.log(after) - np.log(before))


def _eval_difference(base: RunData, other: RunData, name: str) -> Difference:
    (steps, losses), (other_steps, other_losses) = eval_points(base)[name], eval_points(other)[name]
    _, ours, theirs = np.intersect1d(steps, other_steps, assume_unique=True, return_indices=True)
    return paired_difference(other_losses[theirs] - losses[ours])


def _as_percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(min(log_ratio, 50.0)):+.1f}{NBSP}%"


def _row(
    label: str, name: str, found: Difference, shown: Callable[[float], str], more_is_better: bool, plans: str
) -> list[Cell | str]:
    interval = f"{shown(found.low)} to {shown(found.high)}" if found.low is not None and found.high is not None else ""
    tone = ""
    if found.is_clear:
        tone = "better" if (found.mean > 0) == more_is_better else "worse"
    return [
        text_cell(label),
        name,
        number_cell(f"{found.num_pairs:,}"),
        number_cell(shown(found.mean), tone),
        number_cell(interval or "too few steps"),
        number_cell(plans),
    ]


def compared_charts(runs: Sequence[Compared]) -> list[Chart]:
    """Return the curves of all runs over each other, and the differences of losses."""
    found = [
        Chart("loss", "Loss", tuple(_loss_lines(runs)), is_tall=True),
        Chart(
            "loss-difference",
            f"Loss minus that of {runs[0].label}",
            tuple(_difference_lines(runs)),
            note="Of the steps that both have, smoothed; below 0 is better than the first run.",
        ),
    ]
    for key, name, title, kind, unit in _CHARTS:
        lines = [line for color, each in enumerate(runs) for line in _of_run(each, each.run.steps[key], color)]
        found.append(Chart(name, title, tuple(lines), kind, unit, from_zero=True))
    waits = [line for color, each in enumerate(runs) for line in _of_run(each, _starved(each.run), color)]
    found.append(Chart("waits", "Starved: the backbone waits for data", tuple(waits), "share", from_zero=True))
    return [chart for chart in found if any(np.isfinite(line.y).any() for line in chart.lines)]


def _starved(run: RunData) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        shares: FloatArray = run.steps["starved_s"] / run.steps["step_time_s"]
    return shares


def _of_run(each: Compared, values: FloatArray, color: int) -> list[Line]:
    lines = smoothed(each.label, each.run.steps.step, values, color % NUM_COLORS)
    return [line for line in lines if not line.is_faint]  # several runs over each other: only the means


def _loss_lines(runs: Sequence[Compared]) -> Iterator[Line]:
    for color, each in enumerate(runs):
        yield from _of_run(each, each.run.steps["loss"], color)
        for name, (steps, losses) in eval_points(each.run).items():
            yield Line(f"{each.label}, {name}", steps, losses, color % NUM_COLORS, form="points")


def _difference_lines(runs: Sequence[Compared]) -> Iterator[Line]:
    base = runs[0].run
    for color, other in enumerate(runs[1:], start=1):
        ours, theirs = common_places(base, other.run)
        if not len(ours):
            continue
        differences = other.run.steps["loss"][theirs] - base.steps["loss"][ours]
        yield Line(
            other.label, base.steps.step[ours], moving_mean(differences, max(3, len(ours) // 30)), color % NUM_COLORS
        )


def changes_table(runs: Sequence[Compared]) -> Markup | None:
    """Return the keys in which the configurations differ; None if they do not."""
    flat = [{key: value for key, value in leaves(redacted(each.run.config)) if key} for each in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = [
        [text_cell(key), *(text_cell(str(values.get(key, ABSENT))) for values in flat)]
        for key in keys
        if len({repr(values.get(key, ABSENT)) for values in flat}) > 1
    ]
    if not rows:
        return None
    more = f" (the first {MAX_CHANGES} of {len(rows):,})" if len(rows) > MAX_CHANGES else ""
    return table(f"Keys that differ{more}", ("key", *(each.label for each in runs)), rows[:MAX_CHANGES])
