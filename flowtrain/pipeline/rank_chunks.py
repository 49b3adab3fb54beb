"""What a pipeline rank holds under 1F1B, as the cost model asks for it, and the memory that this takes."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.costs.encoder_memory import EncoderShare
from flowtrain.costs.memory import StepMemory, predict_step_memory
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import Chunk, EncoderChunk, MicrobatchSize, TrainingSetup
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
                first_layer=stage.layers.start,
            )
        )
    return RankChunks(tuple(backbone), tuple(encoder))


def memory_of_rank(model: ModelSpec, held: RankChunks, setup: TrainingSetup, size: MicrobatchSize) -> StepMemory:
    """Return the predicted memory of a rank that holds these chunks. size: of the largest microbatch."""
    encoder = EncoderShare(next(iter(model.encoders.values())), held.encoder) if held.encoder else None
    return predict_step_memory(model.backbone, model.connector, held.backbone, setup, size, encoder)
