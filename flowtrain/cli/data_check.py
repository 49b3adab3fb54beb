"""``flowtrain data check``: progress on standard error, the report on standard output."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from flowtrain import api
from flowtrain.cli.output_path import check_output_path
from flowtrain.cli.plain_text import one_line, short_paths
from flowtrain.cli.tables import facts_table, nbytes_text
from flowtrain.cli.work_progress import work_progress
from flowtrain.controller.dataset.report import DataReport
from flowtrain.errors import ConfigError
from flowtrain.types.samples import Rejection

MAX_PATH = 20
"""Characters of a source's path: a table must fit into 80 columns. Some need more to be told apart."""
SHOWN_ROWS = 3
"""Rejected rows that the table shows of each reason, and groups of duplicates."""


def check(
    config: Path,
    overrides: Sequence[str],
    workers: int | None,
    decode: bool,
    as_json: bool,
    sizes: Path | None,
    rejected: Path | None,
) -> bool:
    """Check as ``api.data_check`` does, and show the report; returns whether a run would go through."""
    if sizes is not None and sizes == rejected:
        raise ConfigError(f"--sizes and --rejected both name {sizes}; give two files")
    if sizes is not None:
        check_output_path("--sizes", sizes, (".csv",))
    if rejected is not None:
        check_output_path("--rejected", rejected, (".jsonl",))
    with work_progress(plain_lines=True) as progress:
        report = api.data_check(
            config, overrides, workers=workers, decode=decode, sizes=sizes, rejected=rejected, progress=progress
        )
    if as_json:
        print(json.dumps(report.as_record()))
        return report.passes
    console = Console(highlight=False)
    for shown in _report(report, console.encoding):
        console.print(shown)
    for what, file in (("sizes", sizes), ("rejected rows", rejected)):
        if file is not None:
            console.print(f"{what}: {file}", markup=False, soft_wrap=True)
    verdict = "a run would go through" if report.passes else "a run would not go through"
    console.print(verdict, style="green" if report.passes else "bold red")
    return report.passes


def _report(report: DataReport, encoding: str) -> Iterator[RenderableType]:
    short = short_paths([each.name for each in report.sources], MAX_PATH)
    names = [
        one_line(each.name if each.is_named else path, 60, encoding)
        for each, path in zip(report.sources, short, strict=True)
    ]
    yield _sources(report, names)
    yield _spreads(report, names)
    if report.rejected:
        yield _rejected(report, names, encoding)
    yield facts_table([(name, one_line(text, 2000, encoding)) for name, text in _facts(report, names)])


def _sources(report: DataReport, names: Sequence[str]) -> Table:
    table = _table("source", "rows", "blocks", "stored", "images", "rejected", "text cut")
    for name, source in zip(names, report.sources, strict=True):
        rows = f"{source.num_rows:,}"
        if source.num_checked < source.num_rows:
            rows = f"{source.num_checked:,} of {rows}"
        cut = f"{source.num_cut / source.num_accepted:.1%}" if source.num_accepted else "-"
        table.add_row(
            Text(name),
            rows,
            f"{source.num_blocks:,}",
            nbytes_text(source.nbytes),
            f"{source.images.total:,}",
            f"{source.num_rejected:,}",
            cut,
        )
    return table


def _spreads(report: DataReport, names: Sequence[str]) -> Table:
    table = _table("in an accepted row", "mean", "median", "95 %", "max")
    for name, source in zip(names, report.sources, strict=True):
        if not source.num_accepted:
            continue
        for what, spread in (("tokens", source.tokens), ("images", source.images)):
            numbers = (f"{number:,}" for number in (spread.p50, spread.p95, spread.max))
            table.add_row(Text(f"{name}: {what}"), f"{spread.mean:,.1f}", *numbers)
        bytes_ = source.image_nbytes
        numbers = (nbytes_text(number) for number in (bytes_.mean, bytes_.p50, bytes_.p95, bytes_.max))
        table.add_row(Text(f"{name}: encoded images"), *numbers)
    return table


def _rejected(report: DataReport, names: Sequence[str], encoding: str) -> Table:
    """The first rejected rows of each reason."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("reason", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column(f"the first {SHOWN_ROWS}", overflow="fold")
    by_reason: defaultdict[str, list[Rejection]] = defaultdict(list)
    for rejection in report.rejected:
        by_reason[rejection.reason.value].append(rejection)
    for reason, count in report.num_rejected_by_reason.items():
        lines = [_line(report, names, rejection, encoding) for rejection in by_reason[reason][:SHOWN_ROWS]]
        table.add_row(reason, f"{count:,}", Text("\n".join(lines)))
    return table


def _line(report: DataReport, names: Sequence[str], rejection: Rejection, encoding: str) -> str:
    name = names[rejection.ref.source]
    id_ = "" if rejection.id is None else f" (id {one_line(rejection.id, 40, encoding)})"
    place = ""
    if report.sources[rejection.ref.source].num_files > 1:
        file, file_row = report.indexes[rejection.ref.source].place_of(rejection.ref.row)
        place = f", {one_line(file.rpartition('/')[2], 60, encoding)} row {file_row}"
    return f"{name} row {rejection.ref.row}{place}{id_}: {one_line(rejection.detail, 200, encoding)}"


def _facts(report: DataReport, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    limit = f"data.max_rejected_fraction ({100 * report.max_rejected_fraction:.3g}%)"
    share = f"{100 * report.rejected_share:.3g}% of the training samples"
    if report.would_end:
        yield "rejected", f"{share}, more than {limit} allows: the run would end"
    elif report.rejected_share > report.max_rejected_fraction:
        yield "rejected", f"{share}, more than {limit}, but a run of {report.num_positions} samples is not judged by it"
    else:
        yield "rejected", f"{share}; {limit} allows it"
    if not report.is_decoded:
        yield "images", "by their headers alone; --decode also finds those that cannot be decoded"
    for fault in report.faults:
        yield "cannot be read", f"{fault.num_rows:,} rows of {fault.source}: {fault.detail}"
    yield from _duplicates(report, names)


def _duplicates(report: DataReport, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    found, sources = report.duplicates, report.sources
    if not found.num_groups:
        yield "duplicates", "none"
        return
    yield "duplicates", f"{report.num_repeated:,} training rows have the turns and images of an earlier one"
    for source, count in found.within.items():
        yield "", f"{count:,} rows of {names[source]} repeat a row of it"
    for (source, earlier), count in found.across.items():
        if not sources[source].is_eval:
            yield "", f"{count:,} rows of {names[source]} are in {names[earlier]}"
    for group in islice(found.groups, SHOWN_ROWS):
        rows = ", ".join(f"{names[source]} {row}" for source, row in group[:6])
        yield "", f"the same: {rows}{', ...' if len(group) > 6 else ''}"
    if report.num_leaked:
        leaked = report.leaked[:SHOWN_ROWS]
        pairs = [f"{names[held_out]} {row} is {names[source]} {same}" for (held_out, row), (source, same) in leaked]
        more = ", ..." if report.num_leaked > SHOWN_ROWS else ""
        yield "evaluation", f"{report.num_leaked:,} of its rows are also trained on: {', '.join(pairs)}{more}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
