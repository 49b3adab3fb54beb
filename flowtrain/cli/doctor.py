"""``flowtrain doctor``: prints what the cluster has, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flowtrain import api
from flowtrain.cli.tables import nbytes_text

if TYPE_CHECKING:
    from flowtrain.controller.doctor.report import DoctorReport
    from flowtrain.types.memory import Link

NO_DASHBOARD = "observability.dashboard=false"
MOST_LINKS = 40
"""More are not shown: 32 nodes have a thousand."""
SLOWEST = 5


def doctor(config: Path, overrides: Sequence[str], as_json: bool, plan: Path | None = None) -> bool:
    """Look at the cluster as ``api.doctor`` does, and show it; returns whether the run can start."""
    report = api.doctor(config, [NO_DASHBOARD, *overrides], plan=plan)
    if as_json:
        print(json.dumps(report.as_record()))
    else:
        console = Console()
        for table in doctor_tables(report):
            console.print(table)
        for warning in report.warnings:
            console.print(f"warning: {warning}", style="yellow", highlight=False)
    return report.fits


def doctor_tables(report: DoctorReport) -> Iterator[Table]:
    """Nodes, transports between them, and what the run needs."""
    nodes = Table(title="nodes", title_justify="left")
    for heading in ("node", "CPUs", "devices", "memory", "available", "lockable", "tiers"):
        nodes.add_column(heading, justify="left" if heading in ("node", "devices", "tiers") else "right")
    for node in report.nodes:
        memory = node.memory
        total = memory.total_nbytes if memory.cgroup_nbytes is None else memory.cgroup_nbytes
        lockable = "unlimited" if memory.memlock_nbytes is None else nbytes_text(memory.memlock_nbytes)
        devices = f"{node.num_devices:g} {', '.join(node.devices)}".strip() if node.num_devices else "none"
        sizes = (nbytes_text(total), nbytes_text(memory.available_nbytes), lockable)
        nodes.add_row(node.name, f"{node.num_cpus:g}", devices, *sizes, ", ".join(node.tiers))
    yield nodes

    links = Table(title="transports", title_justify="left")
    for heading in ("transport", "from", "to", "latency", "speed"):
        links.add_column(heading, justify="right" if heading in ("latency", "speed") else "left", overflow="fold")
    shown = _shown(report.links)
    for link in shown:
        if link.off is not None:
            links.add_row(link.transport, link.source, link.destination, "-", f"off: {link.off}")
        elif link.latency_s is None or link.bytes_per_s is None:
            links.add_row(link.transport, link.source, link.destination, "-", f"does not work: {link.fault}")
        else:
            figures = (f"{link.latency_s * 1e6:.1f} us", f"{link.bytes_per_s / 1e9:.2f} GB/s")
            links.add_row(link.transport, link.source, link.destination, *figures)
    if len(shown) < len(report.links):
        links.caption = f"the slowest of {len(report.links)} links of each kind; --json has all"
    yield links

    title = f"run {report.run}, with a memory pool of {nbytes_text(report.pool_nbytes)}"
    checks = Table(title=title, title_justify="left")
    for heading in ("needed", "fits", "what was found"):
        checks.add_column(heading, overflow="fold")
    for check in report.checks:
        checks.add_row(check.name, "yes" if check.fits else "[bold red]no[/]", check.detail)
    yield checks


def _shown(links: Sequence[Link]) -> list[Link]:
    """All links of a few nodes; of many, those that do not work and the slowest of each transport."""
    if len(links) <= MOST_LINKS:
        return list(links)
    broken = [link for link in links if link.bytes_per_s is None]
    shown = broken[:MOST_LINKS]
    for transport in dict.fromkeys(link.transport for link in links):
        working = [link for link in links if link.transport == transport and link.bytes_per_s is not None]
        shown += sorted(working, key=lambda link: link.bytes_per_s or 0.0)[:SLOWEST]
    return shown
