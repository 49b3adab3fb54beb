"""The charts of one run: learning, speed, flow of data, packing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from flowtrain.observability.report.figures import MIN_TO_SMOOTH, NUM_COLORS, Chart, Line, Mark, smoothed, window_of
from flowtrain.observability.report.outcome import eval_points
from flowtrain.observability.report.reading import as_number, as_text
from flowtrain.observability.report.run_data import RunData
from flowtrain.observability.report.sampling import FloatArray
from flowtrain.observability.report.units import counted

MAX_SOURCES = NUM_COLORS


def learning_charts(run: RunData) -> list[Chart]:
    """Return losses, gradient norm and learning rate."""
    steps = run.steps
    lines = smoothed("training", steps.step, steps["loss"])
    for color, (name, (at, losses)) in enumerate(eval_points(run).items(), start=1):
        lines.append(Line(name, at, losses, color % NUM_COLORS, form="points"))
    note = _smoothing_note(len(steps))
    return _kept(
        run,
        Chart("loss", "Loss", tuple(lines), note=note, is_tall=True),
        Chart("source-loss", "Loss by source", tuple(_by_source(run)), note=note),
        Chart(
            "gradient",
            "Gradient norm",
            tuple(smoothed("before clipping", steps.step, steps["grad_norm"])),
            is_log=True,
        ),
        Chart("rate", "Learning rate", (Line("learning rate", steps.step, steps["lr"]),), from_zero=True),
    )


def speed_charts(run: RunData) -> list[Chart]:
    """Return rates, MFU and step time."""
    steps = run.steps
    return _kept(
        run,
        Chart(
            "tokens",
            "Throughput",
            tuple(smoothed("backbone tokens", steps.step, steps["tokens_per_s"])),
            kind="si",
            unit="tokens/s",
            from_zero=True,
        ),
        Chart(
            "mfu",
            "Model FLOPs utilisation",
            (
                *smoothed("all devices", steps.step, steps["mfu"]),
                *smoothed("the backbone's devices", steps.step, steps["backbone_mfu"], 1),
            ),
            kind="share",
            from_zero=True,
            note="Matrix products of the samples that ran, over the devices' peak.",
        ),
        Chart(
            "step-time",
            "Step time",
            tuple(smoothed("step", steps.step, steps["step_time_s"])),
            kind="seconds",
            from_zero=True,
        ),
        Chart(
            "samples",
            "Samples",
            (
                *smoothed("consumed", steps.step, steps["consumed_samples_per_s"]),
                *smoothed("produced", steps.step, steps["produced_samples_per_s"], 1),
            ),
            kind="si",
            unit="samples/s",
            from_zero=True,
            note="Consumed: trained in the step. Produced: became ready in it, so it runs ahead by the lookahead.",
        ),
    )


def flow_charts(run: RunData) -> list[Chart]:
    """Return waits, pool and lookahead."""
    steps = run.steps
    shares = smoothed("backbone starved", steps.step, _share(steps["starved_s"], steps["step_time_s"]))
    if run.num_encoders:
        blocked = np.minimum(_share(steps["blocked_s"], steps["step_time_s"] * run.num_encoders), 1.0)
        shares += smoothed("encoders blocked", steps.step, blocked, 1)
    return _kept(
        run,
        Chart(
            "waits",
            "Starved and blocked",
            tuple(shares),
            kind="share",
            from_zero=True,
            note="Starved: the backbone waited for data. Blocked: an encoder had no work that it may do. Blocked alone "
            "is healthy: the backbone is what the run waits for.",
        ),
        Chart("pool", "Pool occupancy", tuple(_pool_lines(run)), kind="nbytes", from_zero=True),
        Chart(
            "lookahead",
            "Steps ready ahead",
            tuple(smoothed("whole steps that are ready", steps.step, steps["lookahead_steps"])),
            from_zero=True,
        ),
        Chart(
            "fetch",
            "Reading and planning a step",
            (
                *smoothed("fetch", steps.step, steps["fetch_s"]),
                *smoothed("plan", steps.step, steps["plan_time_s"], 1),
            ),
            kind="seconds",
            from_zero=True,
            note="Both run beside the computation; a step waits for them only where it is starved.",
        ),
    )


def packing_charts(run: RunData) -> list[Chart]:
    """Return fill and balance."""
    steps = run.steps
    return _kept(
        run,
        Chart(
            "fill",
            "Packing fill",
            tuple(smoothed("share of the microbatches' capacity", steps.step, steps["packing_fill"])),
            kind="share",
            from_zero=True,
        ),
        Chart(
            "balance",
            "Imbalance",
            (
                *(smoothed("ranks in a step", steps.step, steps["dp_imbalance"]) if run.has_replicas else ()),
                *smoothed("slots, mean", steps.step, steps["slot_imbalance_mean"], 1),
                *smoothed("slots, worst", steps.step, steps["slot_imbalance_max"], 2),
            ),
            kind="share",
            from_zero=True,
            note="Cost of the costliest over the mean, minus one: the share that the others wait.",
        ),
    )


def marks_of(run: RunData) -> list[Mark]:
    """Return what interrupted a run, by step: resumes, restarts, skipped steps, rewinds."""
    marks = [
        Mark(as_number(event.get("resumed_from")), f"resumed after step {as_number(event.get('resumed_from')):,.0f}")
        for event in run.of_kind("run_started")
        if event.get("resumed_from")
    ]
    for event in run.of_kind("restart"):
        marks.append(Mark(as_number(event.get("step")), f"{as_text(event.get('name'))} restarted"))
    marks += [Mark(float(step), f"step {step:,.0f} made no update") for step in run.steps.skipped]
    rewound = run.steps["rewound_to"]
    for place in np.flatnonzero(np.isfinite(rewound)):
        step = float(run.steps.step[place])
        marks.append(Mark(step, f"after step {step:,.0f} weights went back to step {rewound[place]:,.0f}"))
    return [mark for mark in marks if np.isfinite(mark.x)]


def _kept(run: RunData, *charts: Chart) -> list[Chart]:
    """Leave out charts and lines without a value, and mark the others."""
    marks = marks_of(run)
    kept = []
    for chart in charts:
        lines = tuple(line for line in chart.lines if np.isfinite(line.y).any())
        if lines:
            kept.append(replace(chart, lines=lines, marks=tuple(marks)))
    return kept


def _by_source(run: RunData) -> Iterator[Line]:
    """Yield a line for each source; of many, those with the most steps."""
    found: Mapping[str, FloatArray] = run.steps.source_losses
    by_size = sorted(found, key=lambda name: -int(np.isfinite(found[name]).sum()))[:MAX_SOURCES]
    for color, name in enumerate(sorted(by_size)):
        known = np.isfinite(found[name])
        yield from smoothed(name, run.steps.step[known], found[name][known], color)


def _pool_lines(run: RunData) -> Iterator[Line]:
    steps = run.steps
    for color, tier in enumerate(("dram", "hbm")):
        used = steps[f"pool_{tier}_used"]
        used = used if np.isfinite(used).any() else steps[f"pool_{tier}_nbytes"]
        if not np.isfinite(used).any() or (tier == "hbm" and np.nanmax(used) == 0):
            continue
        yield from smoothed(f"{tier.upper()} in use", steps.step, used, color)
        bound = steps[f"pool_{tier}_bound"]
        if not np.isfinite(bound).any() and tier == "dram" and run.planned_pool_nbytes:
            bound = np.full(len(steps), float(run.planned_pool_nbytes))
        if np.isfinite(bound).any():
            yield Line(f"{tier.upper()} bound", steps.step, bound, color, form="bound")


def _share(parts: FloatArray, wholes: FloatArray) -> FloatArray:
    shares: FloatArray = np.full(len(parts), np.nan)
    np.divide(parts, wholes, out=shares, where=np.isfinite(wholes) & (wholes > 0))
    return shares


def _smoothing_note(count: int) -> str:
    if count < MIN_TO_SMOOTH:
        return ""
    return f"Faint: each step, or the range of several. Line: mean of {counted(window_of(count), 'step')}."
