"""``flowtrain plan``: the degrees that the allocator chooses, why, and the file that starts them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowtrain import api
from flowtrain.allocator.allocation import Allocation, Alternative
from flowtrain.allocator.plan import to_yaml
from flowtrain.allocator.solvers import SolverName
from flowtrain.cli.pack_tables import counted
from flowtrain.cli.tables import nbytes_text
from flowtrain.controller.planning import PlanReport
from flowtrain.errors import ConfigError


def plan(
    config: Path,
    overrides: Sequence[str],
    device: str,
    devices: int | None,
    nodes: int | None,
    solver: str,
    as_json: bool,
    save: Path | None,
) -> None:
    """Allocate as ``api.allocate`` does, show it and save its plan; raises ConfigError where it cannot be saved."""
    # An unknown solver is refused by its name, as one that is not installed.
    name = cast(SolverName, solver)
    report = api.allocate(config, overrides, device=device, devices=devices, nodes=nodes, solver=name)
    if save is not None:
        try:
            save.write_text(to_yaml(report.plan), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--save {save}: the plan cannot be written: {error.strerror}") from error
    if as_json:
        print(json.dumps(report.as_record(), allow_nan=False))
    else:
        Console().print(*plan_report_tables(report, save), sep="\n")


def plan_report_tables(report: PlanReport, saved: Path | None = None) -> tuple[Table, ...]:
    """What was asked, the plan, what was left out, what lost, and what all of it rests on."""
    found = report.allocation
    asked = _facts([("planned", report.planned.source), *_data_rows(report), ("devices", _devices(report))])
    result = _facts(_result_rows(report))
    rest = _facts([*_assumption_rows(report), *_start_rows(report, saved)])
    tables = [asked, _modules(found), result, _left_out(found)]
    if found.alternatives:
        tables.append(_alternatives(found))
    return *tables, rest


def _data_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    workload = report.planned.workload
    yield (
        "data",
        f"{counted(len(workload.lengths), 'representative sample')}: {workload.tokens_per_sample:,.0f} tokens each, "
        f"{workload.vision_share:.0%} of them from images, {workload.target_share:.0%} with loss",
    )
    yield (
        "batch",
        f"{counted(workload.global_batch_size, 'sample')}, {workload.microbatch_tokens:,} tokens a microbatch",
    )


def _devices(report: PlanReport) -> str:
    device, dtype = report.device_type, report.setup.dtype
    return (
        f"{device.count} {device.name}, {device.devices_per_node} a node, {device.flops / 1e12:.4g} TFLOP/s in "
        f"{dtype}, {nbytes_text(device.memory_nbytes)}"
    )


def _modules(found: Allocation) -> Table:
    table = _table("module", "degrees", "devices", "samples/s", "peak memory, GiB", "MFU", "waits")
    for module in found.modules:
        table.add_row(
            module.name,
            str(module.degrees),
            str(module.devices),
            f"{module.production:.4g}",
            f"{module.peak_nbytes / 2**30:.1f} of {module.memory_nbytes / 2**30:.1f}",
            f"{module.mfu:.1%}",
            f"{module.waiting:.1%}",
        )
    return table


def _result_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    found, tokens = report.allocation, report.allocation.rate * report.planned.workload.tokens_per_sample
    yield (
        "rate",
        f"{found.rate:.4g} samples/s, {tokens:,.0f} tokens/s, {tokens / found.devices:,.0f} a device, on "
        f"{found.devices} of {sum(found.budget.values())} devices",
    )
    blocked = max((module.waiting for module in found.modules[:-1]), default=0.0)
    yield (
        "bottleneck",
        f"{found.bottleneck}; backbone starved {found.starved:.1%} of its time, encoders blocked {blocked:.1%}",
    )
    yield (
        "memory pool",
        f"{nbytes_text(report.features_nbytes)} of features at most, of mean samples; the encoders' segments hold "
        f"{nbytes_text(report.segments_nbytes)}",
    )


def _left_out(found: Allocation) -> Table:
    """Numbers of configurations by module, kept and left out by reason."""
    names = list(found.pruned)
    table = _table("configurations", *names)
    reasons = dict.fromkeys(reason for pruned in found.pruned.values() for reason in pruned)
    for reason in reasons:
        table.add_row(reason, *(f"{found.pruned[name].get(reason, 0):,}" for name in names))
    table.add_section()
    table.add_row("feasible", *(f"{found.num_candidates[name]:,}" for name in names))
    table.add_row("worth choosing", *(f"{found.num_front[name]:,}" for name in names))
    return table


def _alternatives(found: Allocation) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("instead", no_wrap=True)
    table.add_column("samples/s", justify="right")
    table.add_column("why it lost", overflow="fold")
    for each in found.alternatives:
        table.add_row(_described(each), f"{each.rate:.4g}", each.reason)
    return table


def _described(alternative: Alternative) -> str:
    return "\n".join(f"{name} {alternative.devices[name]}: {degrees}" for name, degrees in alternative.degrees.items())


def _assumption_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    share, device, found = report.efficiency, report.device_type, report.allocation
    yield (
        "assumed",
        f"rates by data sheet, nothing is measured: {share.backbone:.0%} of the peak in the backbone's layers, "
        f"{share.encoder:.0%} in encoders; {share.memory:.0%} of {device.bandwidth / 1e12:.3g} TB/s of memory; "
        f"{share.links:.0%} of {device.links.node / 1e9:.4g} GB/s inside a node and {device.links.network / 1e9:.4g} "
        f"GB/s between nodes ({device.links.source}); microbatches {report.planned.workload.fill:.0%} full; "
        "launching kernels and decoding images take no time",
    )
    setup = report.setup
    yield (
        "",
        f"{report.budget.usable:.0%} of the memory for a process; activation checkpointing "
        f"{setup.activation_checkpointing}, attention {setup.attention}, sharding {setup.sharding}, {setup.optimizer}",
    )
    times = found.timings
    yield (
        "search",
        f"{found.num_combinations:,} combinations in {1e3 * times.total_s:.0f} ms: enumeration "
        f"{1e3 * times.enumeration_s:.0f}, rates {1e3 * times.surrogate_s:.0f}, {found.solver} "
        f"{1e3 * times.solve_s:.0f} ({found.num_variables} variables)",
    )


def _start_rows(report: PlanReport, saved: Path | None) -> Iterator[tuple[str, str]]:
    yield from (("note", note) for note in report.notes)
    yield "overrides", " ".join(report.overrides)
    if saved is not None:
        yield "saved", f"{saved}; start it with flowtrain train CONFIG --plan {saved}"


def _facts(rows: Sequence[tuple[str, str]] | Iterator[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=first == "module")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "degrees" else "right", no_wrap=True)
    return table
