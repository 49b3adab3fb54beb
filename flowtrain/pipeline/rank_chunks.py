"""What a pipeline rank holds under 1F1B, as the cost model asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.costs.training_setup import Chunk, EncoderChunk
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.schedules.one_f_one_b import in_flight_by_chunk


@dataclass(frozen=True, slots=True)
class RankChunks:
    """The stages of one rank."""

    backbone: tuple[Chunk, ...]
    encoder: tuple[EncoderChunk, ...]


def rank_chunks(partition: Partition, rank: int, num_microbatches: int) -> RankChunks:
    """Return the chunks of a pipeline rank, with the microbatches that each keeps at once."""
    stages = partition.stages
    kept = in_flight_by_chunk(partition, rank, num_microbatches)
    backbone: list[Chunk] = []
    encoder: list[EncoderChunk] = []
    for at, stage in enumerate(stages):
        if stage.rank != rank:
            continue
        after = stages[at + 1] if at + 1 < len(stages) else None
        is_first, in_flight = stage.index == 0, kept[stage.segment]
        if stage.module is StageModule.BACKBONE:
            backbone.append(Chunk(len(stage.layers), is_first, after is None, in_flight, stage.layers.start))
            continue
        assert after is not None, "the backbone follows the encoder"
        encoder.append(
            EncoderChunk(
                len(stage.layers),
                is_first,
                is_last=after.module is StageModule.BACKBONE,
                is_trained=stage.has_backward,
                sends=after.rank != rank,
                in_flight=in_flight,
            )
        )
    return RankChunks(tuple(backbone), tuple(encoder))
