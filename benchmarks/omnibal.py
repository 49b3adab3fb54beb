"""OmniBal's tables by the simulator: partitions, recomputation, grouped data; the paper's figures beside ours.

python benchmarks/omnibal.py [--traces CSV ...] [--json] [--report docs/results/omnibal.md]

Models have the published shapes, on A100s by data sheet. Samples are drawn with the means that the paper's tables
imply, since its data are not public; 1.2 M of them are an epoch. DistRatio and the convergence of ISF are of traces:
CSVs with the columns num_image_tiles,num_tokens. Nothing is fitted to the paper's figures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from _omnibal_models import CASES, CHAT_1_5, TOKENS_PER_TILE, Case
from _omnibal_steps import BASELINE_BATCH, Data, World, by_rank, largest, mean_work
from _page import Page
from _report import Figure, commit, emit, machine

from flowtrain.costs.flops import IntArray
from flowtrain.data.lengths_file import LengthsFile
from flowtrain.pipeline.cuts import stage_sums
from flowtrain.scheduler.grouping import device_groups, isf_groups, length_groups
from flowtrain.scheduler.packing.base import Lengths
from flowtrain.scheduler.packing.isf import draw_groups, isf_quotas
from flowtrain.scheduler.summary import dist_ratio

GIB = 2**30
DP = 8
CAPACITY = 4096
CHAT_DATA = Data(4, 1.96, 390.0, 9, 4096)
TABLE_4 = {"parameters": 42.2, "uniform": 30.6, "profile": 30.9, "balanced": 29.0}
TABLE_7 = {"baseline": 61.8, "data": 51.9, "data+model": 29.0, "data+model+memory": 21.3}
TABLE_10 = {
    1: (Data(1, 1.18, 237.0, 9, 4096), 28.6, 13.7),
    4: (CHAT_DATA, 61.8, 21.3),
    6: (Data(6, 5.2, 569.0, 14, 5120), 147.0, 72.0),
    12: (Data(12, 7.4, 808.0, 14, 5120), 209.0, 105.0),
}


def table_4(page: Page) -> None:
    world, (works, per_group) = World(CHAT_1_5), CHAT_DATA.grouped()
    costs, rows = world.costs(mean_work(works)), []
    for method, paper in TABLE_4.items():
        counts = world.cut(method, works)
        days = world.gpu_days(counts, works, per_group)
        spread = np.sqrt(np.var(_stage_seconds(costs, counts))) / _stage_seconds(costs, counts).mean()
        rows.append(f"{method} | {list(counts)} | {np.var(counts):.1f} | {100 * spread:.1f} % | {days:.2f} | {paper}")
        page.figures.append(Figure(f"table4.{method}", days, "GPU days", note=f"paper {paper}, layers {list(counts)}"))
    page.table(
        "Table 4: where layers are cut (InternVL 6+20B, tp=2, pp=4, dp=4, full recomputation, ISF groups)",
        "`pipeline.partition` | layers | variance of layers | spread of stage times | GPU days | paper",
        rows,
        "Spread: standard deviation over mean, for a mean group. The decoder layers and the tower's take similar times "
        "here, so that all cuts but the first are alike; the search simulates 32 groups of different sizes.",
    )


def _stage_seconds(costs, counts):  # type: ignore[no-untyped-def]
    return stage_sums(costs.seconds, counts)


def _parts(case: Case, data: Data) -> dict[str, tuple[tuple[int, ...], float]]:
    """Layers and GPU days of Table 7's rows."""
    world, padded, (works, per_group) = World(case), data.padded(), data.grouped()
    by_parameters = world.cut("parameters", works)
    balanced = world.cut("balanced", works)
    adaptive = world.adaptive(balanced, largest(works))
    return {
        "baseline": (by_parameters, world.gpu_days(by_parameters, padded, BASELINE_BATCH)),
        "data": (by_parameters, world.gpu_days(by_parameters, works, per_group)),
        "data+model": (balanced, world.gpu_days(balanced, works, per_group)),
        "data+model+memory": (balanced, world.gpu_days(balanced, works, per_group, adaptive)),
    }


def table_7(page: Page) -> None:
    rows = []
    for name, (counts, days) in _parts(CHAT_1_5, CHAT_DATA).items():
        rows.append(f"{name} | {list(counts)} | {days:.1f} | {TABLE_7[name]}")
        page.figures.append(Figure(f"table7.{name}", days, "GPU days", note=f"paper {TABLE_7[name]}"))
    page.table("Table 7: what each part brings (InternVL 6+20B)", "balanced | layers | GPU days | paper", rows)


def table_5(page: Page) -> None:
    world, padded, (works, _) = World(CHAT_1_5), CHAT_DATA.padded(), CHAT_DATA.grouped()
    by_parameters, balanced = world.cut("parameters", works), world.cut("balanced", works)
    adaptive = world.adaptive(balanced, largest(works))
    total = world.usable_nbytes
    small, large = (largest([sorted(padded, key=lambda each: each.num_tokens)[at]]) for at in (0, -1))
    rows = []
    for name, counts, size, chosen, paper in (
        ("baseline, largest batch", by_parameters, large, None, "13, 7.3, 7.3, 7.3"),
        ("baseline, smallest batch", by_parameters, small, None, "50.2, 40.5, 40.5, 40.5"),
        ("+ data and model", balanced, largest(works), None, "58.2, 56.2, 32.5, 32.7"),
        ("+ memory", balanced, largest(works), adaptive, "12.3, 21.7, 24.7, 30.0"),
    ):
        left = [(total - each.peak) / GIB for each in world.memory(counts, size, chosen)]
        rows.append(f"{name} | {', '.join(f'{each:.1f}' for each in left)} | {paper}")
        page.figures += [
            Figure(f"table5.{name.replace(' ', '_')}.stage{stage}", each, "GiB") for stage, each in enumerate(left, 1)
        ]
    page.table(
        "Table 5: GiB left of the usable memory of each stage",
        "balanced | ours, stages 1 to 4 | paper",
        rows,
        "Ours is of 92 % of 80 GB, the paper's of all; it is predicted, for the largest group.",
    )


def table_9(page: Page) -> None:
    rows = []
    for case in CASES:
        world, (works, _) = World(case), CHAT_DATA.grouped()
        found = _parts(case, CHAT_DATA)
        counts, days = found["data+model+memory"]
        adaptive = world.adaptive(counts, largest(works))
        recomputed = by_rank(world.partition(counts), adaptive)
        ratio, paper = found["baseline"][1] / days, case.baseline_days / case.days
        fits = all(rank.fits for rank in adaptive.ranks)
        rows.append(
            f"{case.name} | {case.tp}, {case.pp}, {case.dp} | {list(counts)} | {list(case.layers)} | {recomputed}"
            f"{'' if fits else ' (does not fit)'} | {list(case.recomputed)} | {ratio:.2f} | {paper:.2f}"
        )
        page.figures.append(Figure(f"table9.{case.name}.speedup", ratio, "x", note=f"paper {paper:.2f}"))
    page.table(
        "Table 9: layouts and speed-ups",
        "model | tp, pp, dp | layers, ours | paper | recomputed, ours | paper | speed-up, ours | paper",
        rows,
        "Speed-up: of all three parts over the baseline. The data are those of InternVL 6+20B for all models. Ours "
        "counts float32 gradients, whole bfloat16 weights and states in shards, and the largest group in all "
        "microbatches in flight; what the paper's ranks keep is not known.",
    )


def table_10(page: Page) -> None:
    rows = []
    for most, (data, before, after) in TABLE_10.items():
        found = _parts(CHAT_1_5, data)
        ours = found["baseline"][1], found["data+model+memory"][1]
        _, per_group = data.grouped()
        ours_text = f"{ours[0]:.1f} to {ours[1]:.1f} ({ours[0] / ours[1]:.2f}x)"
        rows.append(f"{most} | {per_group:.1f} | {ours_text} | {before} to {after} ({before / after:.2f}x)")
        page.figures.append(
            Figure(f"table10.{most}.speedup", ours[0] / ours[1], "x", note=f"paper {before / after:.2f}")
        )
    page.table("Table 10: resolutions", "most tiles | samples a group | GPU days, ours | paper", rows)


def _ratios(lengths: Lengths, slots: list[list[IntArray]], *, padded: bool) -> tuple[float, float, float]:
    """Pad ratio, DistRatio of the vision encoder and of the language model."""
    tokens = np.array([[int(lengths.tokens[each].sum()) for each in slot] for slot in slots])
    vision = np.array([[int(lengths.vision[each].sum()) for each in slot] for slot in slots])
    if not padded:
        return 0.0, dist_ratio(vision), dist_ratio(tokens)
    computed = np.array([[int(lengths.tokens[each].max()) * len(each) for each in slot] for slot in slots])
    return float(np.mean(1.0 - tokens / computed)), dist_ratio(vision), dist_ratio(computed)


def _slots(groups: list[IntArray]) -> list[list[IntArray]]:
    return [groups[start : start + DP] for start in range(0, len(groups) - DP + 1, DP)]


def _members(bins) -> list[IntArray]:  # type: ignore[no-untyped-def]
    return [each for each in np.split(bins.members, bins.offsets[1:-1]) if len(each)]


def table_3(page: Page, trace: Path) -> None:
    file = LengthsFile.read(trace)
    kept = file.lengths.tokens <= CAPACITY
    lengths = Lengths(file.lengths.tokens[kept], file.lengths.vision[kept])
    order = np.random.default_rng(0).permutation(len(lengths))
    whole = len(order) - len(order) % BASELINE_BATCH
    found = {
        "baseline": (np.split(order[:whole], whole // BASELINE_BATCH), True),
        "length-group": (_members(length_groups(lengths, BASELINE_BATCH, 0)), True),
        "device-group": (_members(device_groups(lengths, BASELINE_BATCH, DP, 0)), True),
        "isf": (_members(isf_groups(lengths, CAPACITY, 0)), False),
    }
    paper = {
        "baseline": "0.31, 0.34, 0.30",
        "length-group": "0.20, 0.26, 0.13",
        "device-group": "0.378, 0.125, 0.15",
        "isf": "0, 0.02, 0.14",
    }
    rows = []
    for name, (groups, is_padded) in found.items():
        if name != "device-group":
            groups = [each for each in groups if not is_padded or len(each) == BASELINE_BATCH]
        values = _ratios(lengths, _slots(groups), padded=is_padded)
        size = float(np.mean([len(each) for each in groups]))
        rows.append(f"{name} | {size:.1f} | {', '.join(f'{each:.3f}' for each in values)} | {paper[name]}")
        for key, value in zip(("pad_ratio", "dist_ratio_vision", "dist_ratio_tokens"), values, strict=True):
            page.figures.append(Figure(f"{trace.stem}.{name}.{key}", value, "1"))
    page.table(
        f"Table 3 on the lengths of {trace.stem}",
        "method | samples a group | pad ratio, DistRatio ViT, LLM | paper (InternVL-1.2M)",
        rows,
        f"{len(lengths)} samples of at most {CAPACITY} tokens, {TOKENS_PER_TILE} a tile, {DP} ranks. ISF: groups over "
        "the whole set, what is left by best fit. The length-group sorts the whole set, so it has no padding and the "
        "most uneven slots.",
    )
    _convergence(page, trace.stem, lengths)


def _convergence(page: Page, name: str, lengths: Lengths) -> None:
    """Appendix G: DistRatio of the groups that ISF has drawn after so many iterations."""
    rows = []
    for iterations in (1, 2, 3, 5, 10):
        number, _ = draw_groups(lengths, *isf_quotas(lengths, CAPACITY), 0, iterations)
        of_all = isf_groups(lengths, CAPACITY, 0, iterations)
        values = _ratios(lengths, _slots(_members(of_all)), padded=False)
        rows.append(f"{iterations} | {(number >= 0).mean():.3f} | {values[1]:.4f} | {values[2]:.4f}")
        page.figures.append(Figure(f"{name}.isf_after_{iterations}.drawn", float((number >= 0).mean()), "1"))
        page.figures.append(Figure(f"{name}.isf_after_{iterations}.dist_ratio_tokens", values[2], "1"))
    page.table(
        f"Convergence of ISF on {name} (appendix G)",
        "iterations | share of samples in full groups | DistRatio ViT | DistRatio LLM",
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="+", action="extend", default=[], metavar="CSV")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the tables there, as Markdown")
    args = parser.parse_args()
    page = Page()
    for section in (table_4, table_5, table_7, table_9, table_10):
        section(page)
    for trace in args.traces:
        table_3(page, trace)
    if args.report is not None:
        args.report.write_text(_report(page), encoding="utf-8")
    emit("omnibal", page.figures, args.json)


def _report(page: Page) -> str:
    on = machine()
    head = [
        "# OmniBal's tables",
        "",
        "```",
        ".venv/bin/python benchmarks/omnibal.py --traces ai2d.csv synthdog.csv --report docs/results/omnibal.md",
        "```",
        "",
        f"Commit {commit()}. Machine: {on['cpu']}, {on['cores']} cores; figures are simulated, so it does not matter.",
        "",
        "All steps are simulated for A100s by data sheet, with the published shapes of the models; the paper's are "
        "measured. Samples are drawn with the means that the paper's tables imply, since its data are not public. "
        "Nothing is fitted to the paper's figures.",
    ]
    return "\n".join([*head, *page.lines]) + "\n"


if __name__ == "__main__":
    main()
