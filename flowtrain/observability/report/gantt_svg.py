"""Draws chosen steps as lanes of bars; places are percentages, so that the picture stretches with the page."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from flowtrain.observability.report.gantt import Bar, Gantt
from flowtrain.observability.report.markup import element
from flowtrain.observability.report.units import counted, duration, nice_ticks, scale_for, tick_labels

ROW_HEIGHT, BAR_HEIGHT, TOP = 20, 14, 26
KINDS = (
    *("size", "pack", "decode", "encode", "put", "fetch", "forward", "backward", "optimizer", "checkpoint"),
    *("generate", "restart", "other"),
)
"""Kinds of work that have a colour; the style sheet knows them."""


def kind_of(name: str) -> str:
    """Return the kind of a piece of work, whose name may be any text."""
    return next((kind for kind in KINDS if name == kind or name.startswith(f"{kind}_")), "other")


def draw_gantt(gantt: Gantt, key: str) -> Markup:
    """Return the picture, with a name and a description."""
    title = steps_text(gantt)
    said = f"{title}: {duration(gantt.duration_s)}, {counted(len({row.actor for row in gantt.rows}), 'actor')}."
    return element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", said, id=f"{key}-desc"),
        _content(gantt),
        class_="gantt",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        height=ROW_HEIGHT * len(gantt.rows),
    )


def steps_text(gantt: Gantt) -> str:
    """Return which steps a picture shows."""
    if gantt.first_step == gantt.last_step:
        return f"Step {gantt.first_step:,}"
    return f"Steps {gantt.first_step:,} to {gantt.last_step:,}"


def kinds_in(gantt: Gantt) -> list[str]:
    """Return the kinds of work in a picture, in the order in which a sample meets them."""
    found = {kind_of(bar.name) for row in gantt.rows for bar in row.bars}
    return [kind for kind in KINDS if kind in found]


def _content(gantt: Gantt) -> Iterator[Markup]:
    total = gantt.duration_s
    scale = scale_for("seconds", total)
    ticks = nice_ticks(0.0, total / scale.divisor, 6)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        x = _percent(tick * scale.divisor / total)
        yield element("line", class_="grid", x1=x, x2=x, y1="0%", y2="100%")
        yield element("text", f"{label} {scale.unit}", class_="tick-x", x=x, y="100%", dy="1.4em")
    before = 0.0
    for step, end_s in gantt.ends_s:
        x = _percent(end_s / total)
        yield element("line", class_="step-end", x1=x, x2=x, y1=-TOP + 8, y2="100%")
        middle = _percent((before + end_s) / 2 / total)
        yield element("text", f"step {step:,}", class_="step-name", x=middle, y=-10)
        before = end_s
    actor = None
    for number, row in enumerate(gantt.rows):
        y = ROW_HEIGHT * number
        if row.actor != actor:
            yield element("line", class_="lane-top", x1=-164, x2="100%", y1=y, y2=y)
        name = "lane-name" if row.actor != actor else "lane-name side"
        yield element("text", _short(row.label), class_=name, x=-10, y=y + ROW_HEIGHT / 2, dy="0.32em")
        for bar in row.bars:
            yield _bar(bar, y, total)
        actor = row.actor


def _bar(bar: Bar, y: int, total: float) -> Markup:
    length = duration(bar.end_s - bar.start_s)
    what = f"{bar.count:,} times {bar.name}, in all" if bar.count > 1 else bar.name
    title = f"{what} {length}" + (f"\n{bar.text}" if bar.text else "")
    return element(
        "rect",
        element("title", title),
        class_=f"bar k-{kind_of(bar.name)}",
        x=_percent(bar.start_s / total),
        y=y + (ROW_HEIGHT - BAR_HEIGHT) / 2,
        width=_percent(max((bar.end_s - bar.start_s) / total, 0.0005)),
        height=BAR_HEIGHT,
    )


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:14]}\u2026{name[-9:]}"


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
