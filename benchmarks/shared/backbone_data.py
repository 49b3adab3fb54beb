"""Data of the backbone's benchmarks: samples of a real mix of lengths, packed, padded, or with nothing to pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from _lengths import LOG_NORMAL
from torch import Tensor

from flowtrain.data.lengths_file import LengthsFile
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.step_planner import StepPlanner
from flowtrain.training.batch import IGNORED_LABEL, PackedBatch, SampleArrays, build_batch
from flowtrain.types.plan import StepPlan, Unit, UnitKind
from flowtrain.types.samples import SampleRef, SizedSample

IMAGE_TOKEN_ID = 0
"""Never drawn: the benchmarks' samples are text alone, since the backbone treats features and text alike."""

FEATURE_DIM = 64


@dataclass(frozen=True)
class Mix:
    """The samples of a benchmark.

    lengths: tokens of each sample in order, step after step. target_share: share of a sample's tokens, its last ones,
    that carry loss. vocab_size: token ids are drawn below it.
    """

    lengths: tuple[tuple[int, ...], ...]
    vocab_size: int
    target_share: float = 1.0

    def samples(self, step: int) -> list[SampleArrays]:
        """The samples of one step; ids are a function of position alone."""
        first = sum(len(lengths) for lengths in self.lengths[:step])
        return [self._sample(first + k, length) for k, length in enumerate(self.lengths[step])]

    def _sample(self, position: int, length: int) -> SampleArrays:
        ids = np.random.default_rng(position).integers(1, self.vocab_size, size=length)
        has_loss = np.arange(length) >= length - max(2, round(self.target_share * length))
        return SampleArrays(position, np.stack([ids, np.where(has_loss, ids, IGNORED_LABEL)]).astype(np.int32), None)


def draw_lengths(
    trace: Path | None, num_steps: int, num_samples: int, longest: int, scale: float
) -> tuple[tuple[int, ...], ...]:
    """Lengths of each step: from a trace in the order of ``data.shuffle: rows``, or log-normal as in instruction sets.

    scale: factor of the lengths, so that a CPU can run them. longest: longer samples are cut to it.
    """
    count = num_steps * num_samples
    if trace is None:
        drawn = LOG_NORMAL.text.draw(np.random.default_rng(29), count)
    else:
        file = LengthsFile.read(trace)
        drawn = file.lengths.tokens[[draw.ref.row for draw in file.sampler(17, "rows", 1).take(count)]]
    lengths = np.clip(np.rint(drawn * scale), 4, longest).astype(int).tolist()
    return tuple(tuple(lengths[k : k + num_samples]) for k in range(0, count, num_samples))


def made_equal(lengths: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    """A step's lengths, made equal in each batch of about ``capacity`` tokens, so that no batch needs padding.

    Samples are sorted by length and joined to batches; each gets its batch's mean length, rounded down. The number of
    tokens and the mix of lengths stay nearly the same, and the step can be trained packed, padded, and in full batches.
    """
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        if not batches or sum(lengths[each] for each in batches[-1]) + lengths[position] > capacity:
            batches.append([])
        batches[-1].append(position)
    equal = list(lengths)
    for batch in batches:
        for position in batch:
            equal[position] = sum(lengths[each] for each in batch) // len(batch)
    return tuple(equal)


def packed_step(mix: Mix, step: int, capacity: int, device: torch.device) -> tuple[StepPlan, list[PackedBatch]]:
    """One step as a run would plan it on one rank, with its microbatches in their order."""
    samples = {sample.position: sample for sample in mix.samples(step)}
    sized = [
        SizedSample(
            SampleRef(position, 0, position, 0),
            sample.text.shape[1],
            0,
            int((sample.text[1, 1:] != IGNORED_LABEL).sum()),
            (),
        )
        for position, sample in samples.items()
    ]
    planner = StepPlanner(1, capacity, "best_fit_balanced", eq3(capacity), 4, "lpt", {}, 256)
    unit = Unit(step, UnitKind.TRAIN, step + 1, min(samples), len(samples))
    plan = planner.plan(unit, sized)
    batches = [
        build_batch(
            [samples[position] for position in plan.microbatch_positions(slot, 0)],
            image_token_id=IMAGE_TOKEN_ID,
            feature_dim=FEATURE_DIM,
            dtype=torch.float32,
            loss_normalization="token",
            device=device,
        )
        for slot in range(plan.num_slots)
    ]
    return plan, batches


@dataclass(frozen=True)
class PlainBatch:
    """Input of an HF model, int64 ``[B, T]``; attention_mask: None if nothing is padded. labels: unshifted."""

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    num_tokens: int


def padded_step(mix: Mix, step: int, batch_size: int) -> list[PlainBatch]:
    """The step's samples as they come, ``batch_size`` at a time, padded to the longest of each batch."""
    texts = [torch.from_numpy(sample.text.astype(np.int64)) for sample in mix.samples(step)]
    return [_padded(texts[k : k + batch_size]) for k in range(0, len(texts), batch_size)]


def full_step(mix: Mix, step: int, capacity: int) -> list[PlainBatch]:
    """The step's samples in batches of equal sequences, at most ``capacity`` tokens each: nothing to pad, no mask."""
    texts = sorted((torch.from_numpy(sample.text.astype(np.int64)) for sample in mix.samples(step)), key=_length)
    batches = []
    for length, equal in groupby(texts, key=_length):
        rows = torch.stack(list(equal))
        batches += [
            PlainBatch(part[:, 0], part[:, 1], None, part[:, 0].numel()) for part in rows.split(capacity // length)
        ]
    return batches


def _length(text: Tensor) -> int:
    return text.shape[1]


def _padded(texts: Sequence[Tensor]) -> PlainBatch:
    longest = max(text.shape[1] for text in texts)
    ids, labels = torch.zeros(len(texts), longest).long(), torch.full((len(texts), longest), IGNORED_LABEL)
    mask = torch.zeros(len(texts), longest).long()
    for row, text in enumerate(texts):
        length = text.shape[1]
        ids[row, :length], labels[row, :length], mask[row, :length] = text[0], text[1], 1
    return PlainBatch(ids, labels, mask, int(mask.sum()))
