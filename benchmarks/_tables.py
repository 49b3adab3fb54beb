"""Tables of the packing benchmark, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _contenders import DEFAULT, ZIGZAG, Outcome, bins_over_bound
from _lengths import Statistics, Workload
from _omnibal import Row
from _plan_time import PlanTime
from rich.table import Table


def statistics_table(drawn_for: Sequence[tuple[str, Statistics, Statistics]]) -> Table:
    """The drawn statistics next to those of PipeTune's Table 1."""
    table = Table("count", "mean: paper, drawn", "median: paper, drawn", "max: paper, drawn", title="PipeTune Table 1")
    for name, paper, drawn in drawn_for:
        pairs = [(paper.mean, drawn.mean), (paper.median, drawn.median), (paper.maximum, drawn.maximum)]
        table.add_row(name, *(f"{wanted:,g}, {seen:,.5g}" for wanted, seen in pairs))
    return table


def comparison(measured: Sequence[tuple[Workload, Mapping[str, Outcome]]]) -> Table:
    """One workload's methods at every capacity."""
    columns = (
        "L",
        "method",
        "bins",
        "step imb., %",
        "slot imb., %",
        "over bound, %",
        "cost",
        "DistR. ViT",
        "LLM",
        "ms",
    )
    table = Table(*columns, title=f"{measured[0][0].name} (median / max)")
    table.columns[1].no_wrap = True
    for workload, outcomes in measured:
        reference = outcomes[ZIGZAG].report.step_cost
        for number, (label, outcome) in enumerate(outcomes.items()):
            report = outcome.report
            spreads = (report.step_imbalance, report.slot_imbalance, report.excess)
            table.add_row(
                f"{workload.capacity // 1024}k" if number == 0 else "",
                f"[bold]{label}[/bold]" if label == DEFAULT.packing else label,
                f"{bins_over_bound(outcome, workload):.3f}",
                *(f"{100 * spread.median:.2f} / {100 * spread.max:.2f}" for spread in spreads),
                f"{report.step_cost / reference:.3f}",
                f"{report.dist_ratio_vision:.3f}",
                f"{report.dist_ratio_tokens:.3f}",
                f"{1e3 * report.plan_time_s.median:.2f}",
                end_section=number == len(outcomes) - 1,
            )
    table.caption = (
        "bins: over ceil(tokens / L), before counts are made equal; over bound: a step's cost, the sum over slots of "
        "the costliest rank, above max(total / dp, costliest sample), with the total of the method's own bins; "
        f"cost: mean of a step, over that of {ZIGZAG}; ms: packing to dispatch, median"
    )
    return table


def omnibal_table(measured: Sequence[tuple[Workload, Sequence[Row]]]) -> Table:
    """OmniBal's table 3 on one trace at every capacity."""
    table = Table("L", "method", "pad ratio", "DistRatio ViT", "DistRatio LLM", title=f"OmniBal, {measured[0][0].name}")
    for workload, rows in measured:
        for number, row in enumerate(rows):
            table.add_row(
                f"{workload.capacity // 1024}k" if number == 0 else "",
                row.method,
                f"{row.pad_ratio:.3f}",
                f"{row.vision:.4f}",
                f"{row.tokens:.4f}",
                end_section=number == len(rows) - 1,
            )
    return table


def plan_time_table(measured: Sequence[tuple[Workload, PlanTime]]) -> Table:
    """Plan time of the default method."""
    columns = ("workload", "median", "p99", "processor: median", "p99", "with reading: median", "collections", "full")
    table = Table(*columns, title="From lengths to a StepPlan, in ms: 256 samples, dp=8")
    for workload, timed in measured:
        times = [timed.wall_ms.median, timed.wall_ms.p99, timed.busy_ms.median, timed.busy_ms.p99]
        times.append(timed.with_reading_ms.median)
        collections = (str(timed.num_collections), str(timed.num_full_collections))
        table.add_row(workload.label, *(f"{value:.3f}" for value in times), *collections)
    return table
