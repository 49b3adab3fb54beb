"""Cells of the papers' tables on emulated devices: a model, a number of ranks, a mix of samples, a mode or an ablation.

Shapes are those of configs/models. Pictures have true sizes, but one colour: an emulated encoder waits for as long as
the device would compute. Each cell is planned as ``flowtrain plan`` does, and runs that plan.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from _end_to_end_contest import words_of
from _end_to_end_store import Record
from _modes_data import ROOT, TOKENIZER, single_token_words
from PIL import Image
from transformers import AutoTokenizer

import flowtrain
from flowtrain.config.load import load_config
from flowtrain.controller.run import run_training
from flowtrain.observability.metrics import read_metrics

SCALES = ("vlm_6b", "vlm_32b", "vlm_72b")
RANKS = (16, 32, 64)
P480, P720, P1080 = (854, 480), (1280, 720), (1920, 1080)
LONGEST_EDGE = 1470
"""Pixels to which a picture is shrunk: one of 1080p has 6,195 tokens then, of 720p 4,641, of 480p 2,074."""
WARM_UP, ENDING = 2, 1
"""Steps that do not count."""
BATCH = 64
"""Samples of a step: a quarter of the papers', since a cell's time goes with it."""


@dataclass(frozen=True)
class PictureMix:
    """shares: of each set of pictures. text_log: mean and deviation of the logarithm of text tokens."""

    shares: dict[tuple[tuple[int, int], ...], float]
    text_log: tuple[float, float]


MIXES = {
    "infovqa": PictureMix({(P480,): 0.3, (P480, P480): 0.1, (P720,): 0.35, (P1080,): 0.25}, (4.8, 0.5)),
    "heavy_tail": PictureMix({(P480,): 0.75, (P480,) * 3: 0.1, (P720,): 0.1, (P1080,): 0.05}, (5.0, 1.0)),
}


@dataclass(frozen=True)
class CellVariant:
    """overrides: of the configuration that is planned and run. base: of an ablation, what has all parts."""

    name: str
    overrides: tuple[str, ...]
    base: str | None = None


DECOUPLED = "mode=decoupled"
CELL_VARIANTS = (
    CellVariant("auto", ("mode=auto",)),
    CellVariant("decoupled", (DECOUPLED,)),
    CellVariant("colocated", ("mode=colocated",)),
    CellVariant("monolithic", ("mode=monolithic",)),
    CellVariant("disaggregated", ("mode=disaggregated",)),
    CellVariant("llm_only", ("mode=llm_only",)),
    CellVariant("without_pool", (DECOUPLED, "pool.exchange=point_to_point"), "decoupled"),
    CellVariant("without_allocator", (DECOUPLED, "allocator.method=even"), "decoupled"),
    CellVariant(
        "without_scheduler",
        (DECOUPLED, "scheduler.packing=sequential", "scheduler.dispatch=round_robin"),
        "decoupled",
    ),
)


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
        for variant in CELL_VARIANTS
    ]


def run_cell(cell: Cell, directory: Path, *, device: str, steps: int, time_scale: float) -> Record:
    """Plan and train; rates are in the devices' time. Raises FlowTrainError if nothing of that mode fits."""
    samples = directory / f"{cell.mix}.parquet"
    if not samples.exists():
        write_pictures(MIXES[cell.mix], BATCH * steps, samples)
    path = directory / f"{cell.label}.yaml"
    path.write_text(yaml.safe_dump(_document(cell, samples, directory, device, steps, time_scale)))
    overrides = cell.variant.overrides
    report = flowtrain.plan(load_config(path, overrides), devices=cell.ranks, device=device)
    others = [each for each in overrides if not each.startswith("mode=")]  # the plan has the mode
    run_training(load_config(path, others, plan=report.plan))
    lines = list(read_metrics(directory / cell.label / "metrics.jsonl"))[WARM_UP : steps - ENDING]
    seconds = sum(line["step_time_s"] for line in lines)
    tokens_per_s = sum(line["num_tokens"] for line in lines) / seconds
    details = {
        "samples_per_s": sum(line["num_samples"] for line in lines) / seconds,
        "tokens_per_s_of_device": tokens_per_s / cell.ranks,
        "starved_share": sum(line["starved_s"] for line in lines) / seconds,
        "mfu": mean(line["mfu"] or 0.0 for line in lines),
        "predicted_samples_per_s": report.comparison.winner.rate or 0.0,
    }
    return Record(cell.model, cell.mix, cell.variant.name, 0, tokens_per_s, None, words_of(report.plan), details)


def _document(cell: Cell, samples: Path, directory: Path, device: str, steps: int, time_scale: float) -> dict[str, Any]:
    shapes = yaml.safe_load((ROOT / "configs" / "models" / f"{cell.scale}.yaml").read_text())
    vision = {
        "config": shapes["encoders"]["vision"],
        "feature_layer": -1,
        "image_processor": {"size": {"longest_edge": LONGEST_EDGE}},
        "max_batch_patches": 16384,
        "segment_nbytes": 256 << 20,
    }
    return {
        "name": cell.label,
        "runs_dir": str(directory),
        "model": {"family": "variable_llava", "tokenizer": TOKENIZER, "dtype": "bfloat16", "device": "emulated"},
        "emulated": {"device": device, "time_scale": time_scale, "feature_share": 0.01},
        "encoders": {"vision": vision},
        "backbone": {"config": shapes["backbone"]},
        "data": {"sources": [{"path": str(samples)}], "max_seq_len": 8192, "shuffle": "none"},
        "training": {"global_batch_size": BATCH, "max_steps": steps},
        "scheduler": {"microbatch_tokens": 8192},
        "checkpoint": {"every_steps": 100000},
        "observability": {"progress": "off", "dashboard": False, "trace_steps": 0},
    }


def write_pictures(mix: PictureMix, count: int, to: Path) -> None:
    """Write samples of a mix: pictures of one colour, words of one token each."""
    rng = np.random.default_rng(47)
    words = single_token_words(AutoTokenizer.from_pretrained(TOKENIZER))
    encoded = {size: _picture(size) for sizes in mix.shares for size in sizes}
    kinds = list(mix.shares)
    rows = []
    for _ in range(count):
        sizes = kinds[rng.choice(len(kinds), p=list(mix.shares.values()))]
        tokens = int(np.clip(np.exp(rng.normal(*mix.text_log)), 8, 1500))
        question, answer = np.split(rng.choice(words, tokens), [tokens // 2])
        rows.append(
            {
                "images": [{"bytes": encoded[size], "path": None} for size in sizes],
                "texts": [{"user": "<image>" * len(sizes) + "".join(question), "assistant": "ok" + "".join(answer)}],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), to, row_group_size=64)


def _picture(size: Sequence[int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", tuple(size), (90, 120, 150)).save(buffer, "JPEG")
    return buffer.getvalue()
