"""The simulator on PipeWeaver's Table 1, figure 13 and VLM-XL, and on FlowTrain's scaling curve, beside the papers.

python benchmarks/pipeweaver.py [--json] [--report FILE.md]

Nothing is calibrated: times are those of data sheets with the assumed efficiencies (`Efficiency`). All of a model is
trained, its sequences are packed in the order of drawing, and a pipeline runs 1F1B. Table 1: one pipeline of four
ranks, stages of even parameters, about 12.8 PFLOPs a step. Figure 13: VLM-M on 64 H800 with every DP, TP and PP, the
encoder in stages of its own, each with the fastest memory settings that fit. VLM-XL: a step of 16,384 H100, from drawn
sequences to times and memory. FlowTrain: VLM-32B on 910B, planned and simulated in every mode. One core.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np
from _pipeweaver_report import Cell, Grid, Scale, Table1, report
from _pipeweaver_steps import (
    ENCODER,
    MODELS,
    Pipeline,
    even_sequence,
    flops,
    model_file,
    parameter_cost,
    sequences,
    with_patches,
)
from _report import Figure, at_most, emit

import flowtrain
from flowtrain.allocator.model_file import ModelFile
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.types.plan import Degrees

BUDGET_FLOPS, ITERATIONS = 12.8e15, 8
PATCHES = 2704
PAPER_LAYERS = 6.75 / 10.5
PAPER_OPTIMUM = Degrees(8, 4, 2)
BATCHES = (128, 256)
GRID_DEVICES, MOST_RANKS = 64, 32
XL = Degrees(128, 16, 8)
XL_SEQUENCES = 32
SCALES = (32, 64, 128, 256)


def layers_ratio(patches: int) -> float:
    """Time of an encoder layer for 8 images over that of a decoder layer for 8,192 tokens, forward, in VLM-M."""
    model = with_patches(model_file("pipeweaver_vlm_m"), patches).model
    times = Pipeline(model, Degrees()).simulator.times.times
    images = times.each_image_s(ENCODER, np.full(8, patches), 1, together=8.0)
    encoder = float(images.sum()) / model.encoders[ENCODER].num_layers
    sequence = MicrobatchColumns.of([MicrobatchWork((8192,), 0, 0)])
    return encoder / float(times.of_any_data.microbatches_s(sequence, 1).layer[0])


def of_budget(model: ModelSpec, works: Iterator[MicrobatchWork]) -> list[MicrobatchWork]:
    """Sequences with about the FLOPs of Table 1."""
    found: list[MicrobatchWork] = []
    total = 0.0
    for work in works:
        each = float(flops(model, [work])[0])
        if total + each / 2 > BUDGET_FLOPS:
            return found
        found.append(work)
        total += each
    raise AssertionError("sequences have no end")


def table_1() -> Table1:
    """MFU of LM 7B, and of ViT 2B + LM 5B with even and with drawn sequences."""
    file = model_file("pipeweaver_7b")
    language = ModelSpec({}, file.model.connector, _deeper(file.model, 32).backbone)
    samples = 3
    text = Pipeline(language, Degrees(1, 4, 2)).step(of_budget(language, _endless(even_sequence(0, PATCHES, samples))))
    pipeline = Pipeline(file.model, Degrees(1, 4, 2), layer_cost=parameter_cost(file.model))
    drawn = list(islice(sequences(file.workload, 0), 256))
    images = fmean(len(work.patches) for work in drawn)
    work = flops(file.model, drawn)
    static = pipeline.step(of_budget(file.model, _endless(even_sequence(round(images), PATCHES, samples))))
    denser = pipeline.step(of_budget(file.model, _endless(even_sequence(2 * round(images), PATCHES, samples))))
    dynamic = [
        pipeline.step(of_budget(file.model, sequences(file.workload, seed))) for seed in range(1, ITERATIONS + 1)
    ]
    few = _of_few_patches(file, round(images), samples, text.mfu)
    return Table1(text, static, denser, dynamic, few, images, float(work.max() / work.min()), pipeline.partition.text)


def _of_few_patches(file: ModelFile, num_images: int, samples: int, of_text: float) -> tuple[float, float]:
    """Static and dynamic ratios with 169 patches an image."""
    other = with_patches(file, 169)
    pipeline = Pipeline(other.model, Degrees(1, 4, 2), layer_cost=parameter_cost(other.model))
    static = pipeline.step(of_budget(other.model, _endless(even_sequence(num_images, 169, samples))))
    dynamic = [pipeline.step(of_budget(other.model, sequences(other.workload, seed))) for seed in (1, 2)]
    return static.mfu / of_text, fmean(step.mfu for step in dynamic) / of_text


def _deeper(model: ModelSpec, num_layers: int) -> ModelSpec:
    return replace(model, backbone=replace(model.backbone, num_layers=num_layers))


def _endless(work: MicrobatchWork) -> Iterator[MicrobatchWork]:
    while True:
        yield work


def grid(batch: int) -> Grid:
    """MFU of VLM-M with every DP, TP and PP."""
    file = with_patches(model_file("pipeweaver_vlm_m"), PATCHES)
    works = list(islice(sequences(file.workload, 0), batch))
    cells = []
    for tp in (1, 2, 4, 8):
        for dp in (1, 2, 4, 8, 16, 32, 64):
            pp = GRID_DEVICES // (tp * dp)
            if not 1 <= pp <= MOST_RANKS:
                continue
            degrees = Degrees(dp, pp, tp)
            found = Pipeline(file.model, degrees, place="own" if pp > 1 else "first").fitting_step(works)
            cells.append(Cell(degrees, *(found if found is not None else (None, None))))
    paper = Pipeline(file.model, PAPER_OPTIMUM, place="own", words="full")
    return Grid(batch, cells, paper.step(works), replace(paper, sequence_parallel=False).step(works))


def vlm_xl() -> tuple[Cell, float]:
    """A step of VLM-XL-16k, and the seconds that its simulation takes from drawn sequences on."""
    file = model_file("pipeweaver_vlm_xl")
    drawn = list(islice(sequences(file.workload, 0), XL.dp * XL_SEQUENCES))
    started = time.perf_counter()
    words = "full"
    step = Pipeline(file.model, XL, device="h100", place="own", words=words).step(drawn)
    return Cell(XL, words, step), time.perf_counter() - started


def scaling() -> list[Scale]:
    """MFU of VLM-32B by mode and number of devices."""
    found = []
    for devices in SCALES:
        simulated = flowtrain.simulate(MODELS / "vlm_32b.yaml", device="910b", devices=devices, compare=True)
        found.append(Scale(devices, {mode.rating.mode: mode.mfu for mode in simulated.modes}))
    return found


def figures_of(
    table: Table1, layers: dict[int, float], grids: list[Grid], xl: tuple[Cell, float], scales: list[Scale]
) -> Iterator[Figure]:
    """The papers' figures are in the notes; where a requirement has a target, it is a figure's own."""
    for patches, ratio in layers.items():
        yield Figure(f"layers/{patches} patches", ratio, "1", note=f"paper: {PAPER_LAYERS:.3f}")
    yield Figure("table 1/LM 7B", table.text.mfu, "1", note="MFU; paper: 0.400")
    yield Figure("table 1/static over LM", table.static.mfu / table.text.mfu, "1", note="paper: 0.877")
    note = f"paper: 0.597; {min(table.ratios):.3f} to {max(table.ratios):.3f} in {ITERATIONS} steps"
    yield Figure("table 1/dynamic over LM", fmean(table.ratios), "1", note=note)
    for each in grids:
        best, paper = each.best, each.of(PAPER_OPTIMUM)
        assert best.step is not None
        share = paper.step.mfu / best.step.mfu if paper.step is not None else 0.0
        note = f"best {best.degrees}, MFU {best.step.mfu:.3f}; paper: {PAPER_OPTIMUM}, 0.297"
        yield Figure(f"figure 13/batch {each.batch}: its optimum over ours", share, "1", 1.0, share == 1.0, note)
        free = each.unlimited
        note = f"needs {free.peak_nbytes / 2**30:.0f} GiB; gradients summed once a step"
        name = f"figure 13/batch {each.batch}: its optimum without memory's limit over ours"
        yield Figure(name, free.mfu / best.step.mfu, "1", note=note)
    cell, seconds = xl
    assert cell.step is not None
    yield at_most("VLM-XL-16k/simulated in", seconds, "s", 60.0, f"{XL_SEQUENCES} sequences a replica, 16,384 devices")
    yield Figure("VLM-XL-16k/MFU", cell.step.mfu, "1", note="1F1B; paper, searched: 0.36")
    for scale in scales:
        for mode, mfu in scale.mfu.items():
            yield Figure(f"scaling/{scale.devices} devices/{mode}", mfu, "1", note="MFU")
    for mode, paper_gap in (("monolithic", 18.7), ("disaggregated", 12.1), ("decoupled", 5.0)):
        gap = 100 * fmean(scale.mfu["llm_only"] - scale.mfu[mode] for scale in scales)
        yield Figure(f"scaling/mean gap of {mode} to llm_only", gap, "points", note=f"paper: {paper_gap}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, help="also write a page with the tables")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    table, layers = table_1(), {patches: layers_ratio(patches) for patches in (169, PATCHES)}
    grids, xl, scales = [grid(batch) for batch in BATCHES], vlm_xl(), scaling()
    figures = list(figures_of(table, layers, grids, xl, scales))
    if args.report is not None:
        args.report.write_text(report(table, layers, grids, xl, scales), encoding="utf-8")
    emit("pipeweaver", figures, args.json)


if __name__ == "__main__":
    main()
