"""Whether microbatches fit the memory of pipeline ranks, by predicted bytes, and what the first rank has left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from flowtrain.costs.encoder_memory import EncoderShare
from flowtrain.costs.flops import FloatArray
from flowtrain.costs.memory import predict_step_memory
from flowtrain.costs.microbatches import MicrobatchColumns
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import MicrobatchSize, TrainingSetup
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.rank_chunks import RankChunks, rank_chunks


@dataclass(frozen=True)
class StepRoom:
    """The memory of a run's pipeline ranks.

    setup: with dp and tp. encoder: name of the encoder in the pipeline, or empty. limit_nbytes: of each device.
    """

    model: ModelSpec
    partition: Partition
    setup: TrainingSetup
    encoder: str
    limit_nbytes: int

    def fits(self, works: MicrobatchColumns, num_slots: int) -> bool:
        """Whether every rank holds a step whose microbatches are all as large as the largest in each respect."""
        size = self.largest(works)
        return all(self._left_nbytes(rank, size, num_slots) >= 0 for rank in range(self.partition.pp_size))

    def first_left_nbytes(self, works: MicrobatchColumns, num_slots: int) -> int:
        """Return the bytes that such a step leaves on the first rank; negative if it does not fit."""
        return self._left_nbytes(0, self.largest(works), num_slots)

    def held_nbytes(self, works: MicrobatchColumns, dp_size: int) -> FloatArray:
        """Return the bytes of each slot on the fullest replica, ``[K]``, from its encoding ahead to its forward.

        They are the features, and the pixels, which the rank reads with the rest of the microbatch.
        """
        spec = self.model.encoders[self.encoder]
        features = spec.hidden_size * spec.levels * spec.patches_per_row * works.vision_tokens
        pixels = spec.num_channels * spec.patch_size**2 * works.of_images(works.patches.astype(np.float64))
        return (self.setup.dtype_nbytes * (features + pixels)).reshape(dp_size, -1).max(axis=0)

    def largest(self, works: MicrobatchColumns) -> MicrobatchSize:
        """Return a size that no microbatch exceeds in any respect."""
        tower = 0
        if self.encoder:
            prefix = self.model.encoders[self.encoder].num_prefix_tokens
            tower = int(works.of_images(works.patches.astype(np.float64) + prefix).max())
        tokens, targets, rows = (
            int(each.max()) for each in (works.num_tokens, works.target_tokens, works.vision_tokens)
        )
        return MicrobatchSize(tokens, targets, rows, tower)

    def _left_nbytes(self, rank: int, size: MicrobatchSize, num_slots: int) -> int:
        model, held = self.model, _chunks(self.partition, rank, num_slots)
        encoder = EncoderShare(model.encoders[self.encoder], held.encoder) if held.encoder else None
        setup = replace(self.setup, accumulates=num_slots > 1)
        memory = predict_step_memory(model.backbone, model.connector, held.backbone, setup, size, encoder)
        return self.limit_nbytes - memory.peak


@lru_cache(maxsize=1024)
def _chunks(partition: Partition, rank: int, num_slots: int) -> RankChunks:
    return rank_chunks(partition, rank, num_slots)
