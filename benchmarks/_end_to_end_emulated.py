"""``end_to_end.py --emulated``: the papers' models on emulated devices, cell by cell, and the page of it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ray
from _emulated_cells import CELL_VARIANTS, MIXES, RANKS, SCALES, Cell, all_cells, run_cell
from _end_to_end_contest import say
from _end_to_end_store import Record, Setting, Store, code_version
from _modes_data import ROOT
from _report import Figure, at_least, commit, emit, machine

from flowtrain.errors import FlowTrainError

PAGE = ROOT / "docs" / "results" / "end_to_end_emulated.md"
OVER_MONOLITHIC = {"vlm_6b": 1.304, "vlm_32b": 1.337, "vlm_72b": 1.691}
"""FlowTrain, figure 6, InfoVQA, 256 NPUs of 64 GB: over Megatron-LM."""
HOST_SHARE = 0.02
"""Share of the time above which this machine's own work is named: it is not the devices'."""
PAPERS_PARTS = {
    "without_pool": {"vlm_6b": 2118 / 5125, "vlm_32b": 717 / 884, "vlm_72b": 399 / 448},
    "without_allocator": {"vlm_6b": 3879 / 5125, "vlm_32b": 809 / 884, "vlm_72b": 415 / 448},
    "without_scheduler": {"vlm_6b": 4531 / 5125, "vlm_32b": 793 / 884, "vlm_72b": 400 / 448},
}
"""FlowTrain, table 1: throughput over that of the whole."""
INTRODUCTION = (
    "EMULATED devices: coordinator, flow, step planner, feeder, pool and bytes are real; computing, transfers and "
    "collectives are timed waits by data sheets. Rates are in the devices' time. `infovqa` is the mixture of the model "
    "files, pictures of 480p to 1080p; in `heavy_tail` few samples have most of the tokens. Both are ours, since the "
    "paper gives no lengths."
)


def run_emulated(args: argparse.Namespace) -> None:
    """Run the chosen cells that are missing, and print, or write, what there is."""
    store = Store(args.directory / "emulated.jsonl", code_version(args.device, f"{args.steps} steps"))
    failed = []
    chosen = [each for each in all_cells() if not args.cells or any(part in each.label for part in args.cells)]
    with tempfile.TemporaryDirectory() as scratch:
        for cell in chosen:
            if store.has(Setting(cell.model, cell.mix), cell.variant.name, 0):
                continue
            if not ray.is_initialized():
                ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
            try:
                found = run_cell(cell, Path(scratch), device=args.device, steps=args.steps, time_scale=args.time_scale)
            except FlowTrainError as error:  # nothing fits, or the run failed: the other cells go on
                failed.append(f"{cell.label}: {error}")
                say(failed[-1])
                continue
            finally:
                shutil.rmtree(Path(scratch) / cell.label, ignore_errors=True)
            store.add(found)
            say(f"{cell.label}: {found.details['samples_per_s']:.2f} samples/s, {found.how}")
    if ray.is_initialized():
        ray.shutdown()
    results = {(each.model, each.mix, each.variant.name): each for each in all_cells()}
    records = {key: record for key, cell in results.items() if (record := _record(store, cell)) is not None}
    if args.report:
        PAGE.write_text("\n".join(page(records, args, failed)) + "\n", encoding="utf-8")
    emit("end_to_end_emulated", figures_of(records), args.json)
    if failed:
        sys.exit("cells without a figure:\n" + "\n".join(failed))


def _record(store: Store, cell: Cell) -> Record | None:
    return store.rounds(Setting(cell.model, cell.mix)).get(cell.variant.name, {}).get(0)


Records = dict[tuple[str, str, str], Record]
"""By model with ranks, mix, and variant."""


def figures_of(records: Records) -> list[Figure]:
    """Rates, and the ratios that the paper has too."""
    figures = []
    for (model, mix, name), record in records.items():
        label = f"emulated.{model}.{mix}.{name}"
        rate, predicted = record.details["samples_per_s"], record.details["predicted_samples_per_s"]
        shares = f"starved {record.details['starved_share']:.3f}, host {record.details['host_share']:.4f}"
        note = f"predicted {predicted:.2f}; {shares}; {record.how}"
        figures.append(Figure(label, rate, "samples/s", note=note))
        scale = model.split(".")[0]
        if name == "monolithic" and (auto := records.get((model, mix, "auto"))) is not None:
            ratio, papers = auto.tokens_per_s / record.tokens_per_s, OVER_MONOLITHIC[scale]
            figures.append(at_least(f"{label}.auto_over_it", ratio, "1", 1.0, f"figure 6: {papers:.3f}"))
        if name in PAPERS_PARTS and (whole := records.get((model, mix, "decoupled"))) is not None:
            note = f"table 1: {PAPERS_PARTS[name][scale]:.3f}"
            figures.append(Figure(f"{label}.over_decoupled", record.tokens_per_s / whole.tokens_per_s, "1", note=note))
    return figures


def page(records: Records, args: argparse.Namespace, failed: Sequence[str]) -> list[str]:
    """Lines of the page: a table for each mix and number of ranks."""
    seen = machine()
    lines = ["# The papers' models on emulated devices", "", "```"]
    lines += [shlex.join([".venv/bin/python", "benchmarks/end_to_end.py", *sys.argv[1:]]), "```", "", INTRODUCTION, ""]
    how = f"Emulated device: {args.device}, {args.steps} steps, waits times {args.time_scale:g}"
    host = f"{seen['cpu']}, {seen['cores']} cores, {seen['memory_gib']} GiB"
    lines.append(f"Commit {commit()}. {how}. Host: {host}.")
    for mix in MIXES:
        for ranks in RANKS:
            rows = _rows(records, mix, ranks)
            if rows:
                lines += ["", f"## {mix}, {ranks} ranks", "", *rows]
    if failed:
        lines += ["", "## Without a figure", "", *(f"- {each}" for each in failed)]
    return lines


def _rows(records: Records, mix: str, ranks: int) -> list[str]:
    rows = ["| | " + " | ".join(SCALES) + " |", "| --- |" + " --- |" * len(SCALES)]
    for variant in CELL_VARIANTS:
        cells = [_entry(records, scale, ranks, mix, variant.name) for scale in SCALES]
        if any(cell != "-" for cell in cells):
            rows.append(f"| `{variant.name}` | " + " | ".join(cells) + " |")
    return rows if len(rows) > 2 else []


def _entry(records: Records, scale: str, ranks: int, mix: str, name: str) -> str:
    record = records.get((f"{scale}.{ranks}", mix, name))
    if record is None:
        return "-"
    found = record.details
    words = [f"{found['tokens_per_s_of_device']:.0f} tokens/s/device", f"MFU {found['mfu']:.1%}"]
    words.append(f"{found['samples_per_s']:.1f} samples/s of {found['predicted_samples_per_s']:.1f} predicted")
    if found["host_share"] > HOST_SHARE:
        words.append(f"this machine's own work {found['host_share']:.1%}")
    auto = records.get((f"{scale}.{ranks}", mix, "auto"))
    if auto is not None and name != "auto":
        words.append(f"`auto` {auto.tokens_per_s / record.tokens_per_s:.3f}x")
    return ", ".join(words)
