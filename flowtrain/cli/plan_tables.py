"""Tables of ``flowtrain plan``: the request, the choice, what was left out, and the assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowtrain.allocator.allocation import Allocation, Alternative
from flowtrain.allocator.mode_reasons import rate_text
from flowtrain.cli.mode_tables import mode_tables
from flowtrain.cli.pack_tables import counted
from flowtrain.cli.tables import facts_table, nbytes_text
from flowtrain.controller.planning.report import PlanReport
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.memory import MOMENTS, StepMemory

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 64
APART = ("decoupled", "disaggregated")
"""Modes that split the devices; the splits' rates are by formula, without drawn batches."""


def plan_report_tables(report: PlanReport) -> tuple[Table, ...]:
    """The request, the modes, the winner's modules and memory, what was left out, alternatives, and assumptions."""
    found, winner = report.comparison.allocation, report.winner
    asked = facts_table([("planned", report.planned.source), *_data_rows(report), *_device_rows(report)])
    tables = [asked, *(mode_tables(report) if len(report.comparison.ratings) > 1 else ())]
    memory = winner.modules[-1].memory
    assert memory is not None
    tables += [_modules(report), memory_table(memory), facts_table(_result_rows(report))]
    if found is not None and winner.mode in APART:
        tables.append(_left_out(found))
        if found.alternatives:
            tables.append(_alternatives(found))
    return *tables, facts_table([*_assumption_rows(report), *(("note", note) for note in report.notes)])


def _data_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    workload = report.planned.workload
    samples, low, high = counted(len(workload.lengths), "representative sample"), *map(workload.tokens_at, (5, 95))
    spread = "each" if low == high else f"a sample (5% below {low:,}, 5% above {high:,})"
    yield (
        "data",
        f"{samples}: {workload.tokens_per_sample:,.0f} tokens {spread}, "
        f"{workload.vision_share:.0%} of them from images, {workload.target_share:.0%} with loss",
    )
    yield (
        "batch",
        f"{counted(workload.global_batch_size, 'sample')}, {workload.microbatch_tokens:,} tokens a microbatch",
    )


def _device_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    where = f" of {report.where}" if report.where else ""
    number_from = "" if report.asked.has_number else ", from the configuration's degrees (give --devices)"
    for number, device in enumerate(report.cluster.device_types):
        yield (
            "" if number else "devices",
            f"{device.count} {device.name}{where}{number_from}, {device.devices_per_node} a node, "
            f"{device.flops / 1e12:.4g} TFLOP/s in {report.setup.dtype}, {nbytes_text(device.memory_nbytes)}",
        )
    if report.profile is None and not report.asked.has_type:
        (default,) = report.cluster.device_types
        yield "", f"{default.name} is the default, not this machine: give --device, or --profile for measured rates"


def _modules(report: PlanReport) -> Table:
    has_types = len(report.cluster.device_types) > 1
    table = _table("module", "degrees", "devices", "samples/s\nby formula", "peak\nmemory, GiB", "MFU", "waits")
    for module in report.winner.modules:
        table.add_row(
            module.encoder if has_types else module.name,
            str(module.degrees),
            f"{module.devices} {module.device_type}" if has_types else str(module.devices),
            rate_text(module.production),
            f"{module.peak_nbytes / 2**30:.1f} of {module.memory_nbytes / 2**30:.1f}",
            f"{module.mfu:.1%}",
            f"{module.waiting:.1%}",
        )
    return table


def memory_table(memory: StepMemory, title: str = "memory of a backbone rank, GiB") -> Table:
    """What a rank holds at each moment that can be the worst, and its share of host memory."""
    moments = memory.moments
    table = _table(title, *(f"at the {moment}" for moment in moments))
    for field in fields(memory):
        nbytes = getattr(memory, field.name)
        if nbytes and any(field.name in MOMENTS[moment] for moment in moments):
            cells = (_gib(nbytes) if field.name in MOMENTS[moment] else "" for moment in moments)
            table.add_row(field.name.replace("_", " "), *cells)
    table.add_section()
    table.add_row("device", *(_gib(memory.at(moment)) for moment in moments))
    if memory.host:
        table.add_row("host, pinned", *(_gib(memory.host) for _ in moments))
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _result_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    winner, found, tokens = report.winner, report.comparison.allocation, report.tokens_per_s
    is_alone = len(report.comparison.ratings) == 1  # otherwise the reason is below the table of modes
    yield "mode", f"{winner.mode}: {winner.reason}" if is_alone else winner.mode
    shared = ", shared" if winner.devices == 1 and len(winner.modules) > 1 else ""
    by_formula = f"; {rate_text(winner.rate_formula)} samples/s by formula" if winner.rate_formula is not None else ""
    yield (
        "rate",
        f"{rate_text(report.rate)} samples/s, {tokens:,.0f} tokens/s, {tokens / winner.devices:,.0f} a device, on "
        f"{winner.devices} of {counted(report.cluster.num_devices, 'device')}{shared}{by_formula}",
    )
    if (predicted := winner.predicted) is not None and rate_text(predicted) != rate_text(report.rate):
        how = "a trial of this very plan" if winner.was_tried else "trials of other plans"
        yield "", f"the first is by {how}; {rate_text(predicted)} samples/s are predicted"
    elif winner.rate_formula is not None and rate_text(winner.rate_formula) != rate_text(report.rate):
        yield "", "the first is of packed batches: real lengths pack unevenly, and replicas wait for each other"
    *encoders, backbone = winner.modules
    if encoders:
        slowest = min(winner.modules, key=lambda module: module.production).encoder
        blocked = max(module.waiting for module in encoders)
        yield (
            "bottleneck",
            f"{slowest}; backbone starved {backbone.waiting:.1%} of its time, encoders blocked {blocked:.1%}",
        )
        pool = report.pool
        holds = "hold them" if pool.segments_nbytes >= pool.features_nbytes else "are less"
        yield (
            "memory pool",
            f"at most {nbytes_text(pool.features_nbytes)} of features, for mean samples; the encoders' segments, "
            f"{nbytes_text(pool.segments_nbytes)}, {holds}; up to {nbytes_text(pool.node_nbytes)} of a node's host "
            "memory",
        )
    if found is not None and winner.mode in APART and len(found.split_curve) > 1:
        yield "splits", _curve(found)


def _curve(found: Allocation) -> str:
    """The best rate for each number of backbone devices, as bars."""
    best: dict[int, float] = {}
    for point in found.split_curve:
        best[point.backbone_devices] = max(point.rate, best.get(point.backbone_devices, 0.0))
    every = sorted(best.items())
    if len(every) > _MAX_BARS:
        every = [every[k * (len(every) - 1) // (_MAX_BARS - 1)] for k in range(_MAX_BARS)]
    most = max(rate for _, rate in every)
    bars = "".join(_BARS[min(int(rate / most * len(_BARS)), len(_BARS) - 1)] for _, rate in every)
    return (
        f"{bars}  samples/s by formula with {every[0][0]} to {every[-1][0]} devices of the backbone, at most "
        f"{rate_text(most)}"
    )


def _left_out(found: Allocation) -> Table:
    """Numbers of configurations by module: left out, by reason, and kept."""
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
    table.add_column("by formula", justify="right")
    table.add_column("why it lost", overflow="fold")
    for each in found.alternatives:
        table.add_row(_described(each), rate_text(each.rate), each.reason)
    return table


def _described(alternative: Alternative) -> str:
    return "\n".join(f"{name} {alternative.devices[name]}: {degrees}" for name, degrees in alternative.degrees.items())


def _assumption_rows(report: PlanReport) -> Iterator[tuple[str, str]]:
    found = report.comparison.allocation
    yield ("assumed", _by_data_sheet(report)) if report.profile is None else ("measured", _by_profile(report))
    setup = report.setup
    yield (
        "",
        f"{report.budget.usable:.0%} of the memory for a process; activation checkpointing "
        f"{setup.checkpointing_text}, attention {setup.attention}, {_sharded(report)}, {setup.optimizer}",
    )
    chosen = report.winner.settings
    if report.profile is not None and chosen is not None:
        yield "", f"microbatches of up to {report.profile.most_tokens:,} tokens, which the profile reaches"
    if any(rating.mode == "colocated" for rating in report.comparison.ratings):
        factor, is_measured = report.interference
        known = "measured" if is_measured else "assumed, not measured"
        yield "", f"encoder and backbone at once on one device: {factor:.2f} of the time of both alone ({known})"
    if len(report.comparison.ratings) > 1:
        yield "search", f"{len(report.comparison.ratings)} modes in {1e3 * report.comparison.seconds:.0f} ms"
    elif found is not None:
        times = found.timings
        yield (
            "search",
            f"{counted(found.num_combinations, 'combination')} in {1e3 * times.total_s:.0f} ms: enumeration "
            f"{1e3 * times.enumeration_s:.0f}, rates {1e3 * times.surrogate_s:.0f}, {_solving(found)}, "
            f"alternatives {1e3 * times.alternatives_s:.0f}",
        )


def _sharded(report: PlanReport) -> str:
    """How the backbone shards, and when it reduces gradients; nothing to choose for a single replica."""
    backbone, sharding = report.winner.modules[-1], report.setup.sharding
    if backbone.degrees.dp == 1:
        return f"sharding {sharding}"
    among = f" among {backbone.num_shards}" if sharding == "hybrid" else ""
    when = "once a step" if backbone.gradient_reduction == "step" else "with each microbatch"
    return f"sharding {sharding}{among}, gradients reduced {when}"


def _by_data_sheet(report: PlanReport) -> str:
    share = report.rules.efficiency
    figures = "; ".join(
        _figures(device, len(report.cluster.device_types) > 1) for device in report.cluster.device_types
    )
    return (
        f"rates from data sheets, nothing was measured: {share.matmul:.0%} of the peak in the backbone's matrix "
        f"products, {share.encoder_matmul:.0%} in encoders', {share.attention:.0%} in attention; {share.norm:.0%} of "
        f"the memory's and {share.collective:.0%} of the links' bandwidth: {figures}; microbatches "
        f"{report.planned.workload.fill:.0%} full; launching kernels and decoding images take no time"
    )


def _figures(device: DeviceType, is_named: bool) -> str:
    links, name = device.links, f"{device.name} " if is_named else ""
    return (
        f"{name}{device.bandwidth / 1e12:.3g} TB/s, {links.node / 1e9:.4g} GB/s inside "
        f"a node and {links.network / 1e9:.4g} GB/s between nodes ({links.source})"
    )


def _by_profile(report: PlanReport) -> str:
    assert report.profile is not None
    links = report.cluster.device_types[0].links
    return (
        f"rates from {report.profile.source}, measured on {report.profile.device}; links: {links.node / 1e9:.4g} GB/s "
        f"inside a node and {links.network / 1e9:.4g} GB/s between nodes ({links.source}); microbatches "
        f"{report.planned.workload.fill:.0%} full"
    )


def _solving(found: Allocation) -> str:
    if found.shared:
        return "nothing to solve on one device"
    return f"{found.solver} {1e3 * found.timings.solve_s:.0f} ({found.num_variables} variables)"


def _table(first: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=first == "module")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "degrees" else "right", no_wrap=True)
    return table
