"""The model's answers to held-out samples, by the ranks of a run at any parallel sizes.

Each token is a forward pass over prompt and answer so far, with the stages, tensor parallel layers and shards of an
evaluation: there is no cache that each of them would have to split. The likeliest token is always taken, so nothing is
drawn, and training goes on as if there had been no answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import torch
import torch.distributed as dist

from flowtrain.training.batch import IGNORED_LABEL, ImageBatch, PackedBatch
from flowtrain.training.trainer import Trainer

RowsOf = Callable[[tuple[int, int]], int]
"""Feature rows of an image of this height and width (pixels) in the tower."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sample up to its first answer."""

    position: int
    batch: PackedBatch
    """The sample alone."""
    reference: tuple[int, ...]
    """Tokens of the answer in the data."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.batch.input_ids)

    def asking(self, answer: Sequence[int]) -> PackedBatch:
        """Return the microbatch that asks for the token after the prompt and the answer so far."""
        batch, device = self.batch, self.batch.input_ids.device
        ids = torch.cat([batch.input_ids, torch.tensor(answer, dtype=torch.int64, device=device)])
        later = batch.position_ids.max() + 1 + torch.arange(len(answer), device=device)
        positions = [batch.position_ids, later.expand(*batch.position_ids.shape[:-1], -1)]  # alike on all axes
        length = len(ids)
        return replace(
            batch,
            input_ids=ids,
            targets=torch.full_like(ids, IGNORED_LABEL),
            weights=torch.zeros(length, dtype=torch.float32, device=device),
            position_ids=torch.cat(positions, dim=-1),
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32, device=device),
            max_seqlen=length,
            target_index=torch.zeros(0, dtype=torch.int64, device=device),
            sequence_lengths=(length,),
            num_tokens=length,
            next_index=torch.tensor([length - 1], device=device),
        )


def prompt_of(batch: PackedBatch, index: int, image_token_id: int, rows_of: RowsOf | None = None) -> Prompt:
    """Cut the prompt of a sample out of its microbatch; it keeps no other sample in memory.

    index: the sample's place in the microbatch. rows_of: needed where the pipeline has the encoder.
    """
    start = sum(batch.sequence_lengths[:index])
    targets = batch.targets[start : start + batch.sequence_lengths[index]].tolist()
    first = next(place for place, target in enumerate(targets) if target != IGNORED_LABEL)
    stop = start + first + 1  # the token before the answer has its first token as target
    ids = batch.input_ids[start:stop].clone()
    is_mine = (batch.feature_index >= start) & (batch.feature_index < stop)
    has_features = len(batch.features) == len(is_mine)  # not where features come from the pipeline's encoder
    images = None
    if batch.images is not None:
        assert rows_of is not None
        before, mine = (int((each == image_token_id).sum()) for each in (batch.input_ids[:start], ids))
        images = _images_of_rows(batch.images, before, before + mine, rows_of)
    whole = replace(
        batch,
        input_ids=ids,
        position_ids=batch.position_ids[..., start:stop].clone(),
        features=batch.features[is_mine] if has_features else batch.features,
        feature_index=batch.feature_index[is_mine] - start,
        num_samples=0,
        num_target_tokens=0,
        images=images,
        positions=(),
        targets_per_sample=(),
    )
    answer = takewhile(lambda target: target != IGNORED_LABEL, targets[first:])
    return Prompt(batch.positions[index], whole, tuple(answer))


def _images_of_rows(images: ImageBatch, start: int, stop: int, rows_of: RowsOf) -> ImageBatch:
    """Return the images whose rows are ``start`` to ``stop`` of the microbatch's."""
    ends = list(accumulate(map(rows_of, images.sizes)))
    mine = slice(bisect_right(ends, start), bisect_right(ends, stop))
    return ImageBatch(images.sizes[mine], images.pixels[mine])


def answers_to(
    prompts: Sequence[Prompt],
    num_prompts: int,
    limits: Sequence[int],
    stops: Sequence[Collection[int]],
    idle: PackedBatch,
    trainer: Trainer,
) -> list[list[int]]:
    """Return the tokens of the answer to each of a replica's prompts; collective.

    prompts: the same on all ranks of a replica. num_prompts: the most that a replica has. limits: of each prompt, the
    most tokens of its answer. stops: of each prompt, the tokens that end it; they are part of the answer. idle: what a
    replica runs while others answer.
    """
    group, answers = trainer.group, [list[int]() for _ in prompts]
    idle = replace(idle, next_index=torch.zeros(1, dtype=torch.int64, device=group.device))
    running = torch.zeros(group.degrees.dp, num_prompts, dtype=torch.int64)
    running[group.dp_rank, : len(prompts)] = torch.tensor([limit > 0 for limit in limits], dtype=torch.int64)
    dist.all_reduce(running, dist.ReduceOp.MAX, group.process_group)
    while (columns := running.any(dim=0).nonzero().flatten().tolist()) != []:
        mine = [column for column in columns if running[group.dp_rank, column]]
        asked = [prompts[column].asking(answers[column]) if column in mine else idle for column in columns]
        # Of each prompt, twice the token, plus one if another follows. Ranks of other replicas know no more.
        told = torch.full_like(running, -1)
        for column, token in zip(columns, trainer.next_tokens(asked), strict=False):  # only the last stage has tokens
            if column in mine:
                goes_on = token not in stops[column] and len(answers[column]) + 1 < limits[column]
                told[group.dp_rank, column] = 2 * token + goes_on
        dist.all_reduce(told, dist.ReduceOp.MAX, group.process_group)
        for column in mine:
            answers[column].append(int(told[group.dp_rank, column]) // 2)
        running = ((told >= 0) & (told % 2 == 1)).to(running.dtype)
    trainer.model.reshard()
    return answers
