"""The lengths of the packing benchmark: traces, PipeTune's mixtures, and log-normal lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.data.lengths_file import LengthsFile
from flowtrain.scheduler.packing.base import Lengths

STEP_SAMPLES = 256
TOKENS_PER_IMAGE = 576
"""Of the mixtures, as in PipeTune 3.2: a 336-pixel image in patches of 14."""
TOKENS_PER_TILE = 256
"""Of the traces: a 448-pixel tile in patches of 14, with four patches merged to one, as in InternVL."""


@dataclass(frozen=True)
class Workload:
    """Steps to pack at one capacity.

    tokens_per_image: backbone tokens of one image or tile; ``Lengths.vision`` counts images or tiles. is_trace: targets
    of the traces apply. treatment: how the samples were made to fit the capacity.
    """

    name: str
    capacity: int
    steps: tuple[Lengths, ...]
    tokens_per_image: int
    is_trace: bool = False
    treatment: str = ""

    @property
    def label(self) -> str:
        """Name and capacity."""
        return f"{self.name}.{self.capacity // 1024}k"

    def joined(self) -> Lengths:
        """The samples of all steps as one set."""
        return Lengths(*(np.concatenate([getattr(step, kind) for step in self.steps]) for kind in ("tokens", "vision")))


@dataclass(frozen=True)
class Statistics:
    """Mean, median and maximum of a count per sample, as a paper's table gives them."""

    mean: float
    median: float
    maximum: int

    def draw(self, rng: np.random.Generator, number: int) -> IntArray:
        """Draw from the log-normal that has this mean and median, rounded, cut off at 1 and the maximum.

        Its median is ``exp(mu)`` and its mean ``exp(mu + sigma**2 / 2)``, so the two give both parameters.
        """
        sigma = math.sqrt(2.0 * math.log(self.mean / self.median))
        values = self.median * np.exp(sigma * rng.standard_normal(number))
        return np.clip(np.rint(values), 1, self.maximum).astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """A data set, described by the statistics of its samples; images: None if it has none."""

    name: str
    images: Statistics | None
    text: Statistics

    def draw(self, rng: np.random.Generator, number: int) -> tuple[IntArray, IntArray]:
        """Images and text tokens of ``number`` samples, drawn independently (Table 1 gives no more)."""
        images = np.zeros(number, dtype=np.int64)
        if self.images is not None:
            images[:] = 1 if self.images.maximum == 1 else self.images.draw(rng, number)
        return images, self.text.draw(rng, number)


# PipeTune Table 1.
MMC4 = Corpus("MMC4-Core", Statistics(4.08, 3, 15), Statistics(408.94, 362, 16_470))
COYO = Corpus("COYO-700M", Statistics(1, 1, 1), Statistics(17.24, 13, 1_523))
FLAN = Corpus("FLAN", None, Statistics(154.68, 52, 222_109))
CORPORA = (MMC4, COYO, FLAN)
# PipeTune 5: shares of MMC4, COYO and FLAN.
MIXTURES = {"DataMix1": (0.05, 0.05, 0.90), "DataMix2": (0.30, 0.30, 0.40), "DataMix3": (0.45, 0.45, 0.10)}
LOG_NORMAL = Corpus("log-normal", None, Statistics(660, 400, 1 << 30))


def drawn_statistics(seed: int = 0, number: int = 1_000_000) -> list[tuple[str, Statistics, Statistics]]:
    """Return each row of Table 1: its name, the table's statistics, and those of the drawn numbers."""
    rows = []
    for corpus in CORPORA:
        for kind, wanted in (("images", corpus.images), ("text tokens", corpus.text)):
            if wanted is not None and wanted.maximum > 1:
                drawn = wanted.draw(np.random.default_rng(seed), number)
                seen = Statistics(fmean(drawn.tolist()), median(drawn.tolist()), int(drawn.max()))
                rows.append((f"{corpus.name} {kind}", wanted, seen))
    return rows


def mixture(
    name: str, shares: tuple[float, ...], corpora: tuple[Corpus, ...], num_steps: int, capacity: int, seed: int = 17
) -> Workload:
    """Draw a mixture whose samples fit ``capacity``, which is also the limit of one sample.

    Text is cut at its end. A sample whose images leave no room for a token of text is rejected and drawn again, from
    the whole mixture.
    """
    rng = np.random.default_rng(seed)
    wanted = num_steps * STEP_SAMPLES
    images, tokens = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    num_rejected = num_cut = 0
    while len(tokens) < wanted:
        missing = wanted - len(tokens)
        source = rng.choice(len(corpora), size=missing, p=shares)
        drawn = [corpus.draw(rng, missing) for corpus in corpora]
        new_images = np.choose(source, [each[0] for each in drawn])
        new_tokens = np.choose(source, [each[1] for each in drawn]) + TOKENS_PER_IMAGE * new_images
        fits = TOKENS_PER_IMAGE * new_images < capacity
        num_rejected += int(np.count_nonzero(~fits))
        num_cut += int(np.count_nonzero(new_tokens[fits] > capacity))
        images = np.append(images, new_images[fits])
        tokens = np.append(tokens, np.minimum(new_tokens[fits], capacity))
    treatment = (
        f"{wanted} samples; {num_rejected} others, whose images alone fill {capacity} tokens, rejected, drawn again; "
        f"text cut: {num_cut}"
    )
    return Workload(name, capacity, _in_steps(tokens, images), TOKENS_PER_IMAGE, treatment=treatment)


def trace(path: Path, num_steps: int | None, capacity: int) -> Workload:
    """Read a trace and take its samples in the order of a run with ``data.shuffle: rows``, epoch after epoch.

    num_steps: None for 100, or for one epoch if that has more. Samples beyond the capacity are rejected.
    """
    file = LengthsFile.read(path)
    tokens, tiles = file.lengths.tokens, file.lengths.vision
    wanted = (num_steps or max(100, -(-len(tokens) // STEP_SAMPLES))) * STEP_SAMPLES
    rows = np.array([draw.ref.row for draw in file.sampler(17, "rows", 1).take(wanted)], dtype=np.int64)
    rows = rows[tokens[rows] <= capacity]
    treatment = (
        f"{wanted} samples, {wanted / len(tokens):.2f} epochs; {wanted - len(rows)} longer than {capacity} rejected"
    )
    return Workload(path.stem, capacity, _in_steps(tokens[rows], tiles[rows]), TOKENS_PER_TILE, True, treatment)


def workload_makers(traces: list[Path], num_steps: int | None) -> list[Callable[[int], Workload]]:
    """For each workload, the function that builds it for a capacity."""
    drawn = [(name, shares, CORPORA) for name, shares in MIXTURES.items()]
    drawn.append(("lognormal", (1.0,), (LOG_NORMAL,)))
    return [
        *(partial(trace, path, num_steps) for path in traces),
        *(partial(mixture, name, shares, corpora, num_steps or 100) for name, shares, corpora in drawn),
    ]


def log_normal_set(number: int, capacity: int) -> Lengths:
    """One large set of text lengths, cut at the capacity."""
    return Lengths.of(np.minimum(LOG_NORMAL.text.draw(np.random.default_rng(5), number), capacity).tolist())


def _in_steps(tokens: IntArray, images: IntArray) -> tuple[Lengths, ...]:
    starts = range(0, len(tokens), STEP_SAMPLES)
    return tuple(Lengths(tokens[k : k + STEP_SAMPLES], images[k : k + STEP_SAMPLES]) for k in starts)
