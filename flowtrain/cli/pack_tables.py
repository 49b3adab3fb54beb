"""Tables of ``flowtrain pack``, for the terminal and the plot's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowtrain.controller.pack import PackReport
from flowtrain.scheduler.report import PAPER, Method, MethodReport, Spread


@dataclass(frozen=True)
class Column:
    """A figure of each method: its heading, and its text from the method's report and the first method's.

    of_ranks: it compares ranks, so a single rank has a dash.
    """

    heading: str
    text: Callable[[MethodReport, MethodReport], str]
    of_ranks: bool = False


BINS = (
    Column("micro-\nbatches", lambda report, _: f"{report.num_bins:,}"),
    Column("slots", lambda report, _: f"{report.num_slots:,}"),
    Column("fill\n%", lambda report, _: f"{100 * report.fill:.1f}"),
    Column("pad\n%", lambda report, _: f"{100 * report.pad_ratio:.3g}"),
    Column(
        "DistRatio\nViT / LLM",
        lambda report, _: f"{report.dist_ratio_vision:.4f} / {report.dist_ratio_tokens:.4f}",
        of_ranks=True,
    ),
    Column("plan\nms", lambda report, _: f"{1e3 * report.plan_time_s.median:.2f}"),
)
BALANCE = (
    Column("imbalance\nin a step, %", lambda report, _: _percent(report.step_imbalance), of_ranks=True),
    Column("imbalance\nin a slot, %", lambda report, _: _percent(report.slot_imbalance), of_ranks=True),
    Column("step's cost\nover bound, %", lambda report, _: _percent(report.excess), of_ranks=True),
    Column("to the\nfirst", lambda report, first: _ratio(report.step_cost, first.step_cost)),
)
SIMULATED = (
    Column("simulated\nstep, ms", lambda report, _: _ms(report.simulated_s)),
    Column("time to\nthe first", lambda report, first: _ratio(report.simulated_s, first.simulated_s)),
    Column("longest\nstep, ms", lambda report, _: _ms(max(step.simulated_s or 0.0 for step in report.steps))),
)
CAPTIONS = {
    "bins": "pad: tokens computed for no sample; plan: median of a step, from lengths to dispatch, a search included",
    "balance": "a / b: median / maximum; imbalance: costliest rank over the mean, minus 1; to the first: mean cost",
    "simulated": "simulated step: mean time without the update; time to the first: the first method's is 1",
}


def pack_tables(report: PackReport) -> tuple[Table, ...]:
    """What was packed, and the figures of each method; each table fits into 80 columns."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    for name, text in fact_rows(report):
        facts.add_row(name, text)
    tables = (_table(report, columns, CAPTIONS[name]) for name, columns in shown_columns(report).items())
    return facts, *tables


def shown_columns(report: PackReport) -> dict[str, tuple[Column, ...]]:
    """The tables of a report by the name of their caption: the simulated times only if there are some."""
    simulated = {"simulated": SIMULATED} if report.workload.search is not None else {}
    return {"bins": BINS, "balance": BALANCE, **simulated}


def fact_rows(report: PackReport) -> Iterator[tuple[str, str]]:
    """Name and text of each fact: what was packed, with which settings, and what a reader must know."""
    workload, config = report.workload, report.workload.config
    scheduler = config.step_scheduler
    yield "sizes", workload.source
    yield "steps", f"{workload.order}, {workload.step_sizes}"
    yield "samples", f"{workload.num_samples:,} with {counted(workload.num_tokens, 'token')}"
    if spread := workload.token_spread:
        yield (
            "a whole step" if workload.num_of_partial else "a step",
            f"{spread.mean:,.0f} tokens on average, standard deviation {spread.spread:.1%}; with data.shuffle=rows it "
            f"would be {spread.spread_of_rows:.1%}",
        )
    if workload.rejected:
        yield "rejected", ", ".join(f"{count:,} {reason}" for reason, count in workload.rejected.items())
    chosen = "policy balanced: " if config.pipeline.policy == "balanced" else ""
    if report.methods[0].method.is_searched:
        chosen = "policy pipetune, which starts from "
    packing = f"packing {scheduler.packing}, dispatch {scheduler.dispatch}, cost {workload.cost_label}"
    yield "configured", chosen + packing
    ranks = counted(config.backbone.data_parallel_size, "data-parallel rank")
    yield "", f"{ranks}, {scheduler.microbatch_tokens:,} tokens a microbatch"
    if workload.search is not None:
        yield "simulated", workload.simulated_on
    for note in workload.notes:
        yield "note", note


def method_name(method: Method, configured: Method) -> str:
    """A method's name in a table: without its dispatch if that is the configured one; the paper's always in full."""
    is_short = method.dispatch == configured.dispatch and method != PAPER and not method.is_searched
    return method.packing if is_short else method.label


def counted(count: int, noun: str) -> str:
    """A count with its noun, in the plural unless the count is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def method_rows(report: PackReport, columns: Sequence[Column]) -> Iterator[tuple[str, ...]]:
    """Name and cells of each method; with a single rank, cells that compare ranks are a dash."""
    first, is_alone = report.methods[0], report.workload.config.backbone.data_parallel_size == 1
    for each in report.methods:
        cells = ("-" if is_alone and column.of_ranks else column.text(each, first) for column in columns)
        yield method_name(each.method, first.method), *cells


def _table(report: PackReport, columns: Sequence[Column], caption: str) -> Table:
    table = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in method_rows(report, columns):
        table.add_row(*row)
    return table


def _ms(seconds: float | None) -> str:
    return f"{1e3 * seconds:.4g}" if seconds else "-"


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.3f}" if one and other else "-"


def _percent(spread: Spread) -> str:
    return f"{100 * spread.median:.2f} / {100 * spread.max:.2f}"
