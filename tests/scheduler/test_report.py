from __future__ import annotations

import math
from itertools import count
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.scheduler.cost import eq3, tokens
from flowtrain.scheduler.layout import Layout
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.registry import PACKERS
from flowtrain.scheduler.report import PAPER, Method, MethodReport, StepFigures, WorkloadStep, figures_of, step_figures

CAPACITY = 100
METHODS = [Method(name, "lpt") for name in PACKERS] + [PAPER]


def layout_of(bins: list[list[int]], slots: list[list[int]]) -> Layout:
    packed = Bins.of(bins)
    return Layout(packed, np.zeros(len(packed), dtype=np.int64), np.array(slots))


def test_figures_of_a_layout_by_hand() -> None:
    lengths = Lengths.of([60, 40, 50, 20], [3, 1, 0, 2])
    rules = PackingRules(CAPACITY, tokens(CAPACITY), dp_size=2)
    layout = layout_of([[0, 1], [2], [3], []], [[0, 1], [2, 3]])
    figures = figures_of(layout.bins, layout.slots, lengths, rules, plan_time_s=0.25)
    assert (figures.num_samples, figures.num_tokens, figures.num_bins, figures.num_slots) == (4, 170, 4, 2)
    assert figures.num_weightless == 1
    assert figures.fill == 170 / 400
    # Slots have (100, 50) and (20, 0) tokens, (4, 0) and (2, 0) tiles: OmniBal's sum(max - x) / (max * ranks).
    assert figures.dist_ratio_tokens == fmean([50 / 200, 20 / 40])
    assert figures.dist_ratio_vision == fmean([4 / 8, 2 / 4])
    # The ranks' totals are 1.2 and 0.5, mean 0.85; the costliest of the slots are 1.0 and 0.2.
    assert figures.step_imbalance == pytest.approx(1.2 / 0.85 - 1)
    assert figures.slot_imbalances == pytest.approx((1.0 / 0.75 - 1, 0.2 / 0.1 - 1))
    assert (figures.cost, figures.cost_bound) == pytest.approx((1.2, 0.85))
    assert figures.excess == pytest.approx(1.2 / 0.85 - 1)
    assert figures.plan_time_s == 0.25


def test_the_bound_is_the_costliest_sample_where_that_is_more_than_an_even_share() -> None:
    lengths = Lengths.of([100, 1])
    rules = PackingRules(CAPACITY, eq3(CAPACITY), dp_size=2)
    layout = layout_of([[0], [1]], [[0, 1]])
    figures = figures_of(layout.bins, layout.slots, lengths, rules, 0.0)
    assert figures.cost_bound == pytest.approx(2.0)
    assert figures.excess == pytest.approx(0.0)


def test_a_step_without_samples_has_no_cost_and_pads_all_that_it_computes() -> None:
    step = WorkloadStep(Lengths.of([]), PackingRules(100, eq3(100), dp_size=2), 0)
    steps = list(step_figures(Method("best_fit", "lpt"), 4, [step]))
    (figures,) = steps
    assert (figures.num_bins, figures.num_slots, figures.num_weightless) == (2, 1, 2)
    assert (figures.fill, figures.cost, figures.excess, figures.step_imbalance) == (0.0, 0.0, 0.0, 0.0)
    report = MethodReport.of(Method("best_fit", "lpt"), steps)
    assert report.pad_ratio == 1.0


def figures(**changes: float | tuple[float, ...]) -> StepFigures:
    values = {
        **{"num_samples": 1, "num_tokens": 10, "num_bins": 2, "num_slots": 1, "num_weightless": 0, "fill": 0.5},
        **{"dist_ratio_vision": 0.0, "dist_ratio_tokens": 0.0, "step_imbalance": 0.0, "slot_imbalances": (0.0,)},
        **{"cost": 1.0, "cost_bound": 1.0, "plan_time_s": 0.0},
    }
    return StepFigures(**(values | changes))  # type: ignore[arg-type]


def test_a_report_weighs_steps_by_what_they_have() -> None:
    large = figures(
        num_bins=6, num_slots=3, num_tokens=99, fill=0.9, dist_ratio_tokens=0.1, slot_imbalances=(0.1, 0.2, 0.9)
    )
    small = figures(
        num_weightless=1, fill=0.1, dist_ratio_tokens=0.5, slot_imbalances=(0.3,), step_imbalance=0.4, cost=3.0
    )
    report = MethodReport.of(PAPER, [large, small])
    assert (report.num_bins, report.num_slots) == (8, 4)
    assert report.fill == pytest.approx((0.9 * 6 + 0.1 * 2) / 8)
    assert report.dist_ratio_tokens == pytest.approx((0.1 * 3 + 0.5) / 4)
    assert report.pad_ratio == pytest.approx(1 / 110)
    assert (report.slot_imbalance.median, report.slot_imbalance.max) == (median((0.1, 0.2, 0.9, 0.3)), 0.9)
    assert (report.step_imbalance.median, report.step_imbalance.max) == (0.2, 0.4)
    assert (report.excess.max, report.step_cost) == (2.0, 2.0)


def test_only_laying_out_is_timed_and_the_steps_keep_their_order() -> None:
    ticks = count()
    rules = PackingRules(CAPACITY, eq3(CAPACITY), dp_size=2)
    steps = [WorkloadStep(Lengths.of([10] * number), rules, number) for number in (3, 1, 2)]
    found = list(step_figures(PAPER, 4, steps, clock=lambda: float(next(ticks))))
    assert [step.num_samples for step in found] == [3, 1, 2]
    assert [step.plan_time_s for step in found] == [1.0, 1.0, 1.0]
    assert next(ticks) == 6


def test_an_unknown_method_is_refused() -> None:
    steps = [WorkloadStep(Lengths.of([10]), PackingRules(CAPACITY, eq3(CAPACITY)), 1)]
    with pytest.raises(ConfigError, match="worst_fit"):
        next(step_figures(Method("worst_fit", "lpt"), 4, steps))


def test_the_papers_method_is_named_as_such() -> None:
    assert PAPER.label == "best_fit + zigzag (paper)"
    assert Method("best_fit", "lpt").label == "best_fit + lpt"


@given(
    sizes=st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, 9)), max_size=40),
    dp_size=st.integers(1, 5),
    method=st.sampled_from(METHODS),
)
def test_no_figure_of_any_method_is_impossible(sizes: list[tuple[int, int]], dp_size: int, method: Method) -> None:
    lengths = Lengths.of([size for size, _ in sizes], [vision for _, vision in sizes])
    rules = PackingRules(CAPACITY, eq3(CAPACITY), dp_size, seed=3)
    (found,) = step_figures(method, 4, [WorkloadStep(lengths, rules, len(sizes))])
    assert found.num_tokens == sum(size for size, _ in sizes)
    assert found.num_bins == found.num_slots * dp_size >= max(dp_size, math.ceil(found.num_tokens / CAPACITY))
    assert 0 <= found.fill <= 1
    assert found.num_weightless == max(0, found.num_bins - len(sizes)), "padding where a bin could have been split"
    assert found.excess >= -1e-12
    assert -1e-12 <= found.step_imbalance <= dp_size - 1 + 1e-9
    assert len(found.slot_imbalances) == found.num_slots
    for ratio in (found.dist_ratio_vision, found.dist_ratio_tokens):
        assert 0 <= ratio <= 1 - 1 / dp_size + 1e-9
