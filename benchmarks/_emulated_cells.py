"""Cells of the papers' tables on emulated devices: a model, a number of ranks, a mix of samples, a mode or an ablation.

Shapes and lengths are those of configs/models. Each cell is planned as ``flowtrain plan`` does, and runs that plan.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from _end_to_end_contest import words_of
from _end_to_end_store import Record
from _modes_data import ROOT, TOKENIZER

import flowtrain
from flowtrain.config.allocator import PLANNER_CHOICES
from flowtrain.controller.emulated_model import emulated_run
from flowtrain.controller.resolve import resolve
from flowtrain.controller.run import run_training
from flowtrain.observability.metrics import read_metrics
from flowtrain.types.run_plan import Plan

SCALES = ("vlm_6b", "vlm_32b", "vlm_72b")
RANKS = (16, 32, 64)
WARM_UP, ENDING = 2, 1
"""Steps that do not count."""
MOST_HOST, LONGER, TRIES = 0.05, 4.0, 3
"""A cell of whose time the hosts take more than this share runs again, with waits so many times as long."""
SEGMENTS_NBYTES = 4 << 30
"""Of all encoders together, at most: a step's features take 60 MB."""
BATCH = 256
"""Samples of a step: a quarter of the model files', since a cell's time goes with it."""
INFOVQA, HEAVY_TAIL = "infovqa", "heavy_tail"
MIXES = (INFOVQA, HEAVY_TAIL)
"""The model files' own mixture of 480p to 1080p, and one in which few samples have most of the tokens."""
HEAVY_KINDS = [
    {"size": [854, 480], "weight": 8},
    {"size": [1280, 720], "weight": 1},
    {"size": [1920, 1080], "weight": 1},
]
HEAVY_COUNT = {"median": 1, "mean": 1.3, "most": 6}
CHOICES = f"allocator.choose=[{', '.join(PLANNER_CHOICES)}]"
"""All modes choose the same settings; without it only ``auto`` would."""
OLDER = "a100"
OLDER_SHARE = 4
"""With two kinds of devices, one in so many ranks is an older one."""


@dataclass(frozen=True)
class CellVariant:
    """overrides: of the configuration that is planned and run. kinds: of devices; only the newer ones if there are two
    and ``newer_alone``.
    """

    name: str
    overrides: tuple[str, ...]
    kinds: int = 1
    newer_alone: bool = False

    def devices(self, ranks: int, device: str) -> tuple[str, ...]:
        """What ``flowtrain plan --device`` gets."""
        older = ranks // OLDER_SHARE if self.kinds == 2 else 0
        newer = f"{device}={ranks - older}"
        return (newer,) if not older or self.newer_alone else (newer, f"{OLDER}={older}")


DECOUPLED = "mode=decoupled"
CELL_VARIANTS = (
    CellVariant("auto", ("mode=auto",)),
    CellVariant("decoupled", (DECOUPLED, CHOICES)),
    CellVariant("colocated", ("mode=colocated", CHOICES)),
    CellVariant("monolithic", ("mode=monolithic", CHOICES)),
    CellVariant("disaggregated", ("mode=disaggregated", CHOICES)),
    CellVariant("llm_only", ("mode=llm_only", CHOICES)),
    CellVariant("without_pool", (DECOUPLED, CHOICES, "pool.exchange=point_to_point")),
    CellVariant("without_allocator", (DECOUPLED, CHOICES, "allocator.method=even")),
    CellVariant(
        "without_scheduler", (DECOUPLED, CHOICES, "scheduler.packing=sequential", "scheduler.dispatch=round_robin")
    ),
)
TWO_KINDS = (
    CellVariant("two_kinds", ("mode=auto",), kinds=2),
    CellVariant("two_kinds_newer_alone", ("mode=auto",), kinds=2, newer_alone=True),
)
"""A quarter of the devices are older ones; the second leaves them idle, as all modes but the decoupled ones do."""


@dataclass(frozen=True)
class Cell:
    """One entry of the tables."""

    scale: str
    ranks: int
    mix: str
    variant: CellVariant

    @property
    def model(self) -> str:
        """The model with its number of ranks."""
        return f"{self.scale}.{self.ranks}"

    @property
    def label(self) -> str:
        """As figures and --cells name it."""
        return f"{self.model}.{self.mix}.{self.variant.name}"


def all_cells() -> list[Cell]:
    """Every entry, scale by scale."""
    return [
        Cell(scale, ranks, mix, variant)
        for scale in SCALES
        for ranks in RANKS
        for mix in MIXES
        for variant in (*CELL_VARIANTS, *(TWO_KINDS if mix == INFOVQA else ()))
    ]


def run_cell(cell: Cell, directory: Path, *, device: str, steps: int, step_s: float) -> Record:
    """Plan and train; rates are in the devices' time. Raises FlowTrainError if nothing of that mode fits.

    step_s: wall time of a step, by which all waits are stretched or shortened, as the plan predicts it; longer where
    the ranks' hosts would take a part of it that shows.
    """
    found = _run_cell(cell, directory, device, steps, step_s)
    for number in range(1, TRIES):
        if found.details["host_share"] <= MOST_HOST:
            break
        shutil.rmtree(directory / cell.label, ignore_errors=True)
        found = _run_cell(cell, directory, device, steps, step_s * LONGER**number)
    return found


def _run_cell(cell: Cell, directory: Path, device: str, steps: int, step_s: float) -> Record:
    base = emulated_run(
        write_model_file(cell, directory),
        directory / "data",
        TOKENIZER,
        (
            f"name={cell.label}",
            f"runs_dir={directory}",
            f"emulated={{device: {device}, feature_share: 0.01}}",
            f"training={{global_batch_size: {BATCH}, max_steps: {steps}}}",
            "data.shuffle=none",
            "checkpoint.every_steps=100000",
            "observability.progress=off",
            "observability.trace.steps=0",
        ),
        num_samples=BATCH * steps,
    )
    overrides = cell.variant.overrides
    report = flowtrain.plan(base, overrides, device=cell.variant.devices(cell.ranks, device))
    time_scale = step_s * report.rate / BATCH
    # The plan has the mode, and a network that joins nodes; emulated ones are all on this machine.
    others = [each for each in overrides if not each.startswith("mode=")]
    others += ["pool.network=none", f"emulated.time_scale={time_scale}"]
    plan = _with_room(report.plan)
    run_training(resolve(base, others, plan=plan), plan=plan)
    lines = list(read_metrics(directory / cell.label / "metrics.jsonl"))[WARM_UP : steps - ENDING]
    seconds, host_s = (sum(line[key] for line in lines) for key in ("step_time_s", "host_s"))
    microbatches = sum(line["num_microbatches"] for line in lines) / report.plan.backbone.degrees.dp
    tokens_per_s = sum(line["num_tokens"] for line in lines) / seconds
    details = {
        "samples_per_s": sum(line["num_samples"] for line in lines) / seconds,
        "starved_share": sum(line["starved_s"] for line in lines) / seconds,
        "mfu": fmean(line["mfu"] or 0.0 for line in lines),
        "time_scale": time_scale,
        "host_share": host_s / (seconds * time_scale),
        "host_ms_of_microbatch": 1e3 * host_s / microbatches,
        "microbatch_ms": 1e3 * seconds / microbatches,
        "predicted_samples_per_s": report.rate,
    }
    return Record(cell.model, cell.mix, cell.variant.name, 0, tokens_per_s, None, words_of(report.plan), details)


def _with_room(plan: Plan) -> Plan:
    """The plan, with segments of the encoders that this machine can hold together; a share of each row is in them."""
    encoders = {
        name: replace(each, segment_nbytes=min(each.segment_nbytes, SEGMENTS_NBYTES // each.data_parallel_size))
        for name, each in plan.encoders.items()
    }
    return replace(plan, encoders=encoders)


def write_model_file(cell: Cell, directory: Path) -> Path:
    """Write the model file of a cell: the shipped one, with its mix."""
    document: Any = yaml.safe_load((ROOT / "configs" / "models" / f"{cell.scale}.yaml").read_text())
    if cell.mix == HEAVY_TAIL:
        for component in document["workload"]["mixture"]["components"]:
            for images in component.get("images", {}).values():
                images["kinds"] = HEAVY_KINDS
                images["count"] = HEAVY_COUNT
    path = directory / f"{cell.scale}_{cell.mix}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
