"""``end_to_end.py --emulated``: the papers' models on emulated devices, cell by cell, and the page of it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import ray
from _emulated_cells import (
    CELL_VARIANTS,
    INFOVQA,
    MIXES,
    MOST_HOST,
    OLDER,
    OLDER_SHARE,
    RANKS,
    SCALES,
    TWO_KINDS,
    Cell,
    all_cells,
    run_cell,
)
from _end_to_end_contest import say
from _end_to_end_store import Record, Setting, Store, code_version
from _modes_data import ROOT
from _report import Figure, at_least, at_most, commit, emit, machine

from flowtrain.errors import FlowTrainError

STORE = "emulated.jsonl"
PAGE = ROOT / "docs" / "results" / "end_to_end_emulated.md"
OVER_MONOLITHIC = {"vlm_6b": 1.304, "vlm_32b": 1.337, "vlm_72b": 1.691}
"""FlowTrain, figure 6, InfoVQA, 256 NPUs of 64 GB: over Megatron-LM."""
PAPERS_PARTS = {
    "without_pool": {"vlm_6b": 2118 / 5125, "vlm_32b": 717 / 884, "vlm_72b": 399 / 448},
    "without_allocator": {"vlm_6b": 3879 / 5125, "vlm_32b": 809 / 884, "vlm_72b": 415 / 448},
    "without_scheduler": {"vlm_6b": 4531 / 5125, "vlm_32b": 793 / 884, "vlm_72b": 400 / 448},
}
"""FlowTrain, table 1: throughput over that of the whole."""
PAPERS_MFU = {"flowtrain": 0.529, "megatron": 0.312}
"""FlowTrain, figure 7: VLM-72B on InfoVQA."""
WITHIN = 0.97
"""Of the fastest mode's rate, which ``auto`` must reach."""
OVERHEAD = 0.02
"""Of the time, which the runtime itself may take at most at time scale 1."""
BOUND = "llm_only"
WHY = (
    "Where a ratio is below the paper's: figure 6 compares with Megatron-LM, whose MFU for VLM-72B is 31.2 % (figure "
    "7). `monolithic` here is FlowTrain's own: the same packing and dispatch, and degrees, recomputation and sharding "
    "that the same planner searched; its MFU stands in the tables above. `llm_only` encodes nothing, so *bound* is "
    "what no mode can exceed by far, however well it hides the encoder. Also, an H200 has 141 GB where the paper's "
    "devices have 64: most of these backbones need no pipeline, so there are few bubbles to fill. Table 1's runs "
    "without the pool fall back to synchronising whole batches; `pool.exchange: point_to_point` hands whole steps "
    "over too, but encoders work a step ahead of them, which hides most of it at these scales. An even split of the "
    "devices (`without_allocator`) costs more here than in table 1, since it gives the encoders half of the devices."
)
TWO, ALONE = (each.name for each in TWO_KINDS)
INTRODUCTION = (
    "EMULATED devices: coordinator, flow, step planner, feeder, pool and bytes are real; computing, transfers and "
    "collectives are timed waits by data sheets. Rates are in the devices' time. `infovqa` is the mixture of the model "
    "files, pictures of 480p to 1080p; in `heavy_tail` few samples have most of the tokens. Both are ours, since the "
    "paper gives no lengths. All waits of a cell are stretched or shortened so that a step takes about {step_s:g} s "
    "here, since two cores do the work of all ranks' hosts; four or sixteen times as long where these would take more "
    "than {most_host:.0%} of it."
)


def run_emulated(args: argparse.Namespace) -> None:
    """Run the chosen cells that are missing, and print, or write, what there is."""
    words = (args.device, f"{args.steps} steps", f"{args.step_s:g} s a step")
    also = [" ".join([tree, *words]) for tree in args.also]
    store = Store(args.directory / STORE, code_version(*words), also)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for cell in chosen(args.cells):
            if store.has(Setting(cell.model, cell.mix), cell.variant.name, 0):
                continue
            if not ray.is_initialized():
                ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
            try:
                found = run_cell(cell, Path(scratch), device=args.device, steps=args.steps, step_s=args.step_s)
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
    figures = figures_of(records)
    if args.report:
        PAGE.write_text("\n".join(page(records, figures, args, failed)) + "\n", encoding="utf-8")
    emit("end_to_end_emulated", figures, args.json)
    if failed:
        sys.exit("cells without a figure:\n" + "\n".join(failed))


def chosen(parts: Sequence[str] | None) -> list[Cell]:
    """The cells whose name has one of the parts; all without any."""
    return [each for each in all_cells() if not parts or any(part in each.label for part in parts)]


def _record(store: Store, cell: Cell) -> Record | None:
    return store.rounds(Setting(cell.model, cell.mix)).get(cell.variant.name, {}).get(0)


Records = dict[tuple[str, str, str], Record]
"""By model with ranks, mix, and variant."""


def rate(record: Record) -> float:
    """Samples/s in the devices' time."""
    return record.details["samples_per_s"]


def over_best(found: dict[str, Record]) -> tuple[str, float]:
    """Return the fastest mode of a setting, ``auto``'s own run included, and the rate of ``auto`` over its."""
    names = [each.name for each in CELL_VARIANTS if each.name in found and each.name not in (BOUND, *PAPERS_PARTS)]
    best = max(names, key=lambda name: rate(found[name]))
    return best, rate(found["auto"]) / rate(found[best])


def figures_of(records: Records) -> list[Figure]:
    """Rates, the ratios that the paper has too, and over all cells the errors of predictions and the host's work."""
    figures = []
    for (model, mix, name), record in records.items():
        label = f"emulated.{model}.{mix}.{name}"
        predicted = record.details["predicted_samples_per_s"]
        shares = f"starved {record.details['starved_share']:.3f}, host {record.details['host_share']:.4f}"
        note = f"predicted {predicted:.2f}; {shares}; {record.how}"
        figures.append(Figure(label, rate(record), "samples/s", note=note))
    for scale, ranks, mix, found in _settings(records):
        label = f"emulated.{scale}.{ranks}.{mix}"
        if "auto" in found:
            best, over = over_best(found)
            figures.append(at_least(f"{label}.auto_over_best", over, "1", WITHIN, f"best: {best}"))
        if "auto" in found and "monolithic" in found:
            ratio = rate(found["auto"]) / rate(found["monolithic"])
            note = f"figure 6: {OVER_MONOLITHIC[scale]:.3f} on 256 NPUs"
            figures.append(Figure(f"{label}.auto_over_monolithic", ratio, "1", note=note))
        for name in PAPERS_PARTS:
            if name in found and "decoupled" in found:
                ratio = rate(found[name]) / rate(found["decoupled"])
                note = f"table 1: {PAPERS_PARTS[name][scale]:.3f}"
                figures.append(Figure(f"{label}.{name}_over_decoupled", ratio, "1", note=note))
        if TWO in found and ALONE in found:
            ratio = rate(found[TWO]) / rate(found[ALONE])
            figures.append(Figure(f"{label}.{TWO}_over_newer_alone", ratio, "1", note=found[TWO].how))
    return figures + list(_over_all(records))


def _over_all(records: Records) -> Iterator[Figure]:
    if not records:
        return
    errors = [abs(each.details["predicted_samples_per_s"] / rate(each) - 1.0) for each in records.values()]
    yield Figure("emulated.prediction_error.median", median(errors), "1")
    yield Figure("emulated.prediction_error.worst", max(errors), "1")
    details = [each.details for each in records.values()]
    host = [each["host_ms_of_microbatch"] for each in details]
    yield Figure("emulated.host.median", median(host), "ms a microbatch and rank", note=f"most {max(host):.2f}")
    shares = [each["host_ms_of_microbatch"] / each["microbatch_ms"] for each in details]
    note = f"of a microbatch's time on the device, that is at time scale 1; most {max(shares):.4f}"
    yield at_most("emulated.host_share.median", median(shares), "1", OVERHEAD, note)
    worst = max(records, key=lambda key: records[key].details["host_share"])
    share = records[worst].details["host_share"]
    yield Figure("emulated.host_share.as_run", share, "1", note=f"the most of all cells, {'.'.join(worst)}")


def _settings(records: Records) -> Iterator[tuple[str, int, str, dict[str, Record]]]:
    for scale in SCALES:
        for ranks in RANKS:
            for mix in MIXES:
                model = f"{scale}.{ranks}"
                found = {name: each for (at, on, name), each in records.items() if (at, on) == (model, mix)}
                if found:
                    yield scale, ranks, mix, found


def page(records: Records, figures: Sequence[Figure], args: argparse.Namespace, failed: Sequence[str]) -> list[str]:
    """Lines of the page."""
    seen = machine()
    lines = ["# The papers' models on emulated devices", "", "```"]
    lines += [shlex.join([".venv/bin/python", "benchmarks/end_to_end.py", *sys.argv[1:]]), "```", ""]
    lines += [INTRODUCTION.format(step_s=args.step_s, most_host=MOST_HOST), ""]
    host = f"{seen['cpu']}, {seen['cores']} cores, {seen['memory_gib']} GiB"
    trees = f"; cells are also of flowtrain/ at the trees {', '.join(args.also)}" if args.also else ""
    lines.append(f"Commit {commit()}{trees}. Emulated device: {args.device}, {args.steps} steps a cell. Host: {host}.")
    lines += [f"[Records](end_to_end/{STORE}) of all cells.", "", "Samples/s (MFU):"]
    for mix in MIXES:
        for scale in SCALES:
            rows = _rows(records, mix, scale)
            if rows:
                lines += ["", f"## {scale}, {mix}", "", *rows]
    lines += _two_kinds(records, args.device) + _papers(records) + _chosen_plans(records)
    over_all = [
        [each.name, f"{each.value:.4f}", each.unit, "-" if each.target is None else f"{each.target:g}", each.note]
        for each in figures
        if each.name.startswith(("emulated.prediction_error", "emulated.host"))
    ]
    lines += ["", "## Over all cells", "", *_table(["figure", "value", "unit", "target", "note"], over_all)]
    if failed:
        lines += ["", "## Without a figure", "", *(f"- {each}" for each in failed)]
    return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(each) + " |" for each in (header, ["---"] * len(header), *rows)]


def _rows(records: Records, mix: str, scale: str) -> list[str]:
    rows = []
    for variant in CELL_VARIANTS:
        cells = [_entry(records.get((f"{scale}.{ranks}", mix, variant.name))) for ranks in RANKS]
        if any(cell != "-" for cell in cells):
            rows.append([f"`{variant.name}`", *cells])
    return _table(["", *(f"{ranks} ranks" for ranks in RANKS)], rows) if rows else []


def _entry(record: Record | None) -> str:
    return "-" if record is None else f"{rate(record):.1f} ({record.details['mfu']:.1%})"


def _two_kinds(records: Records, device: str) -> list[str]:
    rows = []
    for scale, ranks, mix, found in _settings(records):
        if mix == INFOVQA and TWO in found and ALONE in found:
            older = ranks // OLDER_SHARE
            ratio = rate(found[TWO]) / rate(found[ALONE])
            kinds = f"{ranks - older} {device} + {older} {OLDER}"
            rates = [f"{rate(found[name]):.1f}" for name in (TWO, ALONE)]
            rows.append([scale, kinds, *rates, f"{ratio:.3f}", found[TWO].how])
    if not rows:
        return []
    header = ["model", "devices", "both kinds", f"{device} alone", "ratio", "plan"]
    return ["", "## Two kinds of devices", "", *_table(header, rows)]


def _papers(records: Records) -> list[str]:
    rows = []
    for scale, ranks, mix, found in _settings(records):
        if mix != INFOVQA or not {"auto", "monolithic", "decoupled"} <= found.keys():
            continue
        row = [scale, str(ranks)]
        for name in ("auto", "decoupled", BOUND):
            row.append(f"{rate(found[name]) / rate(found['monolithic']):.3f}" if name in found else "-")
        row.append(f"{OVER_MONOLITHIC[scale]:.3f}")
        for name, papers in PAPERS_PARTS.items():
            ours = f"{rate(found[name]) / rate(found['decoupled']):.3f}" if name in found else "-"
            row += [ours, f"{papers[scale]:.3f}"]
        rows.append(row)
    if not rows:
        return []
    parts = [f"{name}, {whose}" for name in PAPERS_PARTS for whose in ("ours", "table 1")]
    header = [
        "model",
        "ranks",
        "auto / monolithic",
        "decoupled / monolithic",
        f"bound: {BOUND} / monolithic",
        "figure 6",
        *parts,
    ]
    mfu = f"Figure 7: VLM-72B has an MFU of {PAPERS_MFU['flowtrain']:.1%}, Megatron-LM of {PAPERS_MFU['megatron']:.1%}."
    return ["", "## Beside the paper (infovqa)", "", *_table(header, rows), "", mfu, "", WHY]


def _chosen_plans(records: Records) -> list[str]:
    rows = []
    for scale, ranks, mix, found in _settings(records):
        if "auto" in found:
            best, over = over_best(found)
            met = "yes" if over >= WITHIN else "no"
            rows.append([f"{scale}, {ranks} ranks, {mix}", f"{over:.3f}", best, met, found["auto"].how])
    header = ["setting", "auto / fastest", "fastest", f"at least {WITHIN:g}", "plan"]
    return ["", "## What auto chose", "", *_table(header, rows)] if rows else []
