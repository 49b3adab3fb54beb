"""Charts hold all of their values, whatever these are."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.observability.report.blocks import chart_figure
from flowtrain.observability.report.chart_svg import SIZE, axes_of, description, draw_chart
from flowtrain.observability.report.figures import MIN_TO_SMOOTH, Chart, Line, Mark, smoothed, window_of
from tests.report.parsed import Node, parsed
from tests.report.runs import HOSTILE

VALUES = st.floats(-1e18, 1e18) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 5e-324, 1e300])
KINDS = st.sampled_from(["plain", "share", "seconds", "nbytes", "si"])


def chart(*lines: list[float], **changes: object) -> Chart:
    series = [Line(f"line {n}", np.arange(len(y), dtype=float), np.array(y, float), n) for n, y in enumerate(lines)]
    return Chart("key", "Title", tuple(series), **changes)  # type: ignore[arg-type]


def drawn(shown: Chart) -> Node:
    (picture,) = parsed(str(draw_chart(shown))).children
    assert not isinstance(picture, str)
    return picture


@given(st.lists(st.lists(VALUES, max_size=30), max_size=3), KINDS, st.booleans(), st.booleans())
def test_every_place_in_a_chart_is_a_number(lines: list[list[float]], kind: str, from_zero: bool, is_log: bool) -> None:
    shown = chart(*lines, kind=kind, from_zero=from_zero, is_log=is_log)
    if not any(math.isfinite(value) for line in lines for value in line):
        assert axes_of(shown) is None and draw_chart(shown) == ""
        return
    picture = drawn(shown)
    for node in picture.all():
        for value in node.attributes.values():
            assert value is None or not re.search(r"\b(nan|inf)\b", value), node.attributes
    for path in picture.all("path"):
        numbers = [float(each) for each in re.findall(r"-?[0-9.]+", path.attributes["d"] or "")]
        assert len(numbers) % 2 == 0 and all(-1 <= number <= SIZE + 1 for number in numbers)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=50), st.booleans(), st.booleans())
def test_the_axes_hold_all_values(values: list[float], from_zero: bool, is_log: bool) -> None:
    axes = axes_of(chart(values, from_zero=from_zero, is_log=is_log))
    assert axes is not None
    assert axes.low <= min(values) and max(values) <= axes.high and axes.low < axes.high
    assert axes.left <= 0 and len(values) - 1 <= axes.right and axes.left < axes.right
    assert not from_zero or axes.is_log or axes.low == 0
    assert not axes.is_log or axes.low > 0
    down = np.asarray(axes.y(np.array(values)))
    assert ((down >= -1e-9) & (down <= 1 + 1e-9)).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff(down[order]) <= 1e-12).all(), "more is higher"


def test_a_long_line_is_a_band_and_a_mean_with_all_values_under_the_pointer() -> None:
    y = np.sin(np.arange(100_000) / 3000)
    y[5000] = 7.5
    line = Line("loss", np.arange(100_000.0), y, is_faint=True)
    mean = Line("loss", np.arange(100_000.0), y)
    shown = Chart("key", "Loss", (line, mean), marks=(Mark(50_000.0, "resumed"), Mark(1e9, "outside")))
    picture = drawn(shown)
    assert len(picture.all("path", "band")) == 1 and len(picture.all("path", "line")) == 2
    titles = [node.all("title")[0].text for node in picture.all("rect", "hover")]
    assert len(titles) == 48 and titles[0].startswith("steps 0 to 2,083\nloss: ") and "to 7.50)" in titles[2]
    assert all(title.count("loss:") == 1 for title in titles)
    assert [node.text for node in picture.all("line", "mark")] == ["resumed"]
    assert len(str(draw_chart(shown))) < 60_000


def test_a_single_value_and_points_are_dots() -> None:
    assert len(drawn(chart([3.0])).all("circle")) == 1
    points = Line("held-out", np.array([1.0, 5.0]), np.array([2.0, 1.0]), form="points")
    picture = drawn(Chart("key", "Loss", (points,)))
    assert len(picture.all("circle", "dot")) == 2 and not picture.all("path")


def test_ticks_have_units_and_round_numbers() -> None:
    texts = [node.text for node in drawn(chart([0.0, 3200.0], kind="si", unit="tokens/s", from_zero=True)).all("text")]
    assert texts == ["0", "1", "2", "3", "k tokens/s", "0", "1", "step"]
    texts = [node.text for node in drawn(chart([0.5, 2000.0], is_log=True)).all("text", "tick-y")]
    assert texts == ["1", "10", "100", "1,000"]


def test_a_description_says_in_words_what_is_drawn() -> None:
    assert (
        description(chart([3.0, math.nan, 1.0]))
        == "line 0: from 3.00 at step 0 to 1.00 at step 2, between 1.00 and 3.00."
    )
    picture = drawn(Chart(HOSTILE, HOSTILE, (Line(HOSTILE, np.arange(3.0), np.arange(3.0)),)))
    assert not picture.all("script") and "<script>" in picture.all("title")[0].text


def test_what_is_said_of_a_smoothed_line_is_of_its_values() -> None:
    y = np.array([8.0, *[4.0] * MIN_TO_SMOOTH, 1.0])
    long = Chart("key", "Title", tuple(smoothed("loss", np.arange(len(y), dtype=float), y)))
    assert description(long) == f"loss: from 8.00 at step 0 to 1.00 at step {len(y) - 1}, between 1.00 and 8.00."
    assert "last 1.00" in str(chart_figure(long))


@pytest.mark.parametrize("count", [0, 1, MIN_TO_SMOOTH - 1, MIN_TO_SMOOTH, 6000])
def test_only_long_lines_are_smoothed(count: int) -> None:
    x = np.arange(count, dtype=float)
    lines = smoothed("x", x, x)
    assert [line.is_faint for line in lines] == ([False] if count < MIN_TO_SMOOTH else [True, False])
    assert window_of(6000) == 100 and window_of(10) == 3
