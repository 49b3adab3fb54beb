"""A frozen encoder over images of natural sizes: one packed forward, against what one would use instead.

python benchmarks/encoder.py [--model NAME ...] [--dtype float32 bfloat16] [--images N] [--repeats N] [--json]

All contenders have the same weights, type, threads and batches (consecutive images up to ``--patches`` patches), take
turns, and must give the same features; else the benchmark fails.

- ``natural``: 480p to 1080p, not shrunk. For a Qwen3-VL tower against Hugging Face's own call with all patches of a
  batch; for the others against one forward for each shape of a batch, as ``variable_llava`` had it before.
- ``fitted``: the same images, shrunk to the tower's own size, as ``variable_llava`` shrinks them unless asked
  otherwise; against one forward for each shape too.
- ``small``: the same images shrunk to at most 16 patches a side, against one forward for each image.

Then how many such images a core decodes, resizes and normalises in a second, by several decoders, each with its
difference from the Hugging Face processor's pixels.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _encoder_decode import HF, Decoded, decoders, llava_std, measure, photo
from _encoder_qwen3_vl import TOWER, PackedTower, hf_patches, qwen3_vl_decoders, qwen3_vl_family
from _encoder_towers import MODELS, VISION, PlainTower, batches, family_of, natural_sizes, patches_of, pixels_of
from _report import Figure, at_least, commit, emit
from rich.console import Console
from torch import Tensor

from flowtrain.models.families.base import Family

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
QWEN3_VL = "qwen3-vl"
SIDE = 16
"""Patches of the longer side in case ``small``."""


class WrongResult(Exception):
    """Two encoders disagree on the same images."""


@dataclass(frozen=True)
class Case:
    """A size of images, and whom packing must beat by how much."""

    name: str
    rival: str
    target: float


CASES = (Case("natural", "by_shape", 1.2), Case("fitted", "by_shape", 1.2), Case("small", "one_by_one", 1.5))
QWEN3_VL_CASES = (Case("natural", "hf_packed", 0.95),)


@dataclass(frozen=True)
class Contender:
    """An encoder. prepare: turns a batch of images into what ``encode`` takes, outside of the measured time."""

    encode: Callable[[Any], list[Tensor]]
    prepare: Callable[[Sequence[np.ndarray]], Any] = list


@dataclass
class Measured:
    """Rounds over the same images; packed first in each pair. wall_s, busy_s: wall and processor seconds."""

    num_images: int
    num_patches: int
    wall_s: list[tuple[float, float]] = field(default_factory=list)
    busy_s: list[tuple[float, float]] = field(default_factory=list)


def contenders(case: Case, model: str, dtype: str, longest: int) -> tuple[Family, tuple[Contender, Contender]]:
    """The family, its packed encoder, and the rival."""
    if model == QWEN3_VL:
        qwen = qwen3_vl_family(dtype)
        theirs = PackedTower(qwen)
        return qwen, (Contender(qwen.load_encoder(VISION).encode), Contender(theirs.encode, theirs.prepare))
    tower = MODELS[model]
    sides = {"natural": longest, "fitted": tower["image_size"], "small": SIDE * tower["patch_size"]}
    family = family_of(model, dtype, sides[case.name])
    plain = PlainTower(family)
    rival = plain.by_shape if case.rival == "by_shape" else plain.one_by_one
    return family, (Contender(family.load_encoder(VISION).encode), Contender(rival))


def contest(case: Case, model: str, dtype: str, args: argparse.Namespace, console: Console) -> Measured:
    """Both contenders in turn; the first round only warms up."""
    family, pair = contenders(case, model, dtype, args.longest)
    images = pixels_of(family, natural_sizes(args.images, args.seed), args.seed)
    cut = list(batches(family, images, args.patches))
    works = [[each.prepare(batch) for batch in cut] for each in pair]
    measured = Measured(len(images), sum(patches_of(family, image) for image in images))
    for number in range(args.repeats + 1):
        rows: list[list[Tensor]] = [[], []]
        wall_s, busy_s = [0.0, 0.0], [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            gc.collect()
            wall, busy = time.perf_counter(), time.process_time()
            rows[index] = [features for batch in works[index] for features in pair[index].encode(batch)]
            wall_s[index], busy_s[index] = time.perf_counter() - wall, time.process_time() - busy
        check(rows, f"{model} {dtype} {case.name}", TOLERANCE[dtype])
        console.print(
            f"{model} {dtype} {case.name}: {measured.num_patches} patches of {len(images)} images in {len(cut)} "
            f"batches; packed and {case.rival} {wall_s[0]:.2f} and {wall_s[1]:.2f} s by the clock, {busy_s[0]:.2f} "
            f"and {busy_s[1]:.2f} s of the processor" + ("" if number else " (warming up)"),
            highlight=False,
            soft_wrap=True,
        )
        if number:
            measured.wall_s.append((wall_s[0], wall_s[1]))
            measured.busy_s.append((busy_s[0], busy_s[1]))
    return measured


def check(rows: Sequence[Sequence[Tensor]], name: str, tolerance: float) -> None:
    """Raise WrongResult if the features of an image differ."""
    for index, (found, expected) in enumerate(zip(*rows, strict=True)):
        if found.shape != expected.shape:
            shapes = f"{tuple(found.shape)}, not {tuple(expected.shape)}"
            raise WrongResult(f"{name}: features of image {index} are {shapes}")
        difference = ((found - expected).float().norm() / expected.float().norm()).item()
        if not difference <= tolerance:
            raise WrongResult(f"{name}: features of image {index} differ by {difference:.2g}, above {tolerance:g}")


def figures(label: str, case: Case, measured: Measured) -> list[Figure]:
    """Rates of both, and packing over its rival."""
    wall_s, busy_s = np.array(measured.wall_s), np.array(measured.busy_s)
    note = f"{measured.num_patches / measured.num_images:.0f} patches an image"
    found = []
    for index, who in enumerate(("packed", case.rival)):
        rates = measured.num_patches / wall_s[:, index]
        found.append(figure(f"{label}.{case.name}.{who}.patches_per_s", rates, "patches/s", note))
    over = f"{label}.{case.name}.packed_over_{case.rival}"
    found.append(figure(over, wall_s[:, 1] / wall_s[:, 0], "1", f"by the clock; {note}", case.target))
    found.append(figure(f"{over}.busy", busy_s[:, 1] / busy_s[:, 0], "1", f"by processor time; {note}"))
    return found


def decoder_figure(label: str, each: Decoded, num_images: int) -> Figure:
    """Images a second of one core."""
    mean, largest = each.steps
    note = f"from HF's pixels, in 8-bit steps: {mean:.2g} on average, {largest:.3g} at most"
    return figure(f"decode.{label}.{each.name}", num_images / np.array(each.seconds), "images/s/core", note)


def figure(name: str, values: np.ndarray, unit: str, note: str, least: float | None = None) -> Figure:
    """The median, with the quartiles in the note."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    note = f"quartiles {low:.4g} to {high:.4g} of {len(values)}; {note}"
    if least is None:
        return Figure(name, float(middle), unit, note=note)
    return at_least(name, float(middle), unit, least, note)


def decoding(args: argparse.Namespace, console: Console) -> Iterator[Figure]:
    """All decoders, for towers that see whole images and for one that sees small ones."""
    sizes = natural_sizes(args.decoded_images, args.seed)
    images = [photo(*size, seed) for seed, size in enumerate(sizes)]
    megapixels = sum(width * height for width, height in sizes) / len(sizes) / 1e6
    mean_nbytes = sum(map(len, images)) / len(images)
    console.print(f"{len(images)} JPEGs of {megapixels:.2f} megapixels and {mean_nbytes / 1e3:.0f} kB on average")
    if QWEN3_VL in args.model:
        for each in decoding_of_qwen3_vl(images, args.repeats):
            yield decoder_figure(QWEN3_VL, each, len(images))
    for longest in sorted({args.longest, 448}, reverse=True):
        family = family_of("dinov2-s14", "float32", longest)
        for each in measure(decoders(family), images, args.repeats, llava_std(family)):
            yield decoder_figure(f"to_{longest}", each, len(images))


def decoding_of_qwen3_vl(images: Sequence[bytes], repeats: int) -> Iterator[Decoded]:
    """Decoders of Qwen3-VL, whose processor also cuts the pixels into patches."""
    family = qwen3_vl_family("float32")
    sides = (TOWER["patch_size"], TOWER["spatial_merge_size"], TOWER["temporal_patch_size"])

    def aligned(name: str, pixels: np.ndarray) -> np.ndarray:
        return pixels if name == HF else hf_patches(pixels, *sides)

    std = np.float32(family.image_processor.image_std[0])  # all channels have the same
    return measure(qwen3_vl_decoders(family), images, repeats, std, aligned)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = sorted([*MODELS, QWEN3_VL])
    parser.add_argument("--model", nargs="+", default=["dinov2-s14", QWEN3_VL], choices=models)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--decoded-images", type=int, default=24)
    parser.add_argument("--patches", type=int, default=4096, help="most patches of a batch (max_batch_patches)")
    parser.add_argument("--longest", type=int, default=1920, help="pixels of the longer side in case natural")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, plus one to warm up")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    console = Console(stderr=args.json)
    console.print(f"encoder ({commit()}), {args.threads} threads")
    found = []
    try:
        for model in args.model:
            for dtype in args.dtype:
                for case in QWEN3_VL_CASES if model == QWEN3_VL else CASES:
                    measured = contest(case, model, dtype, args, console)
                    found += figures(f"{model}.{dtype}", case, measured)
    except WrongResult as error:
        sys.exit(f"wrong result: {error}")
    emit("encoder", [*found, *decoding(args, console)], args.json)


if __name__ == "__main__":
    main()
