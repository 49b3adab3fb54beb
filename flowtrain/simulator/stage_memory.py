"""Bytes that the stages of a pipeline rank take, by the rules of ``costs``: always, for a step, for a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain.costs.activations import layer_activation_nbytes
from flowtrain.costs.encoder_memory import EncoderShare, encoder_layer_activation_nbytes, encoder_output_nbytes
from flowtrain.costs.flops import IntArray
from flowtrain.costs.memory import StepMemory, predict_step_memory
from flowtrain.costs.model_spec import ModelSpec, VisionSpec
from flowtrain.costs.rank_memory import sums_whole, trains_head
from flowtrain.costs.training_setup import FLOAT32_NBYTES, Chunk, EncoderChunk, MicrobatchSize, TrainingSetup
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.rank_chunks import rank_chunks

_NO_DATA = MicrobatchSize(0, 0)


@dataclass(frozen=True, slots=True)
class PassBytes:
    """What a microbatch, or a part of one, takes on a stage."""

    kept: int
    """From the start of its forward to the end of its backward."""
    forward: int
    """In addition during the forward."""
    backward: int
    """In addition during the backward."""
    output: int
    """Of the tensor that goes to the next stage, and of its gradient."""


@dataclass(frozen=True, slots=True)
class StageModel:
    """One stage, with all that its memory depends on besides the data; stages that are alike are equal."""

    chunk: Chunk | EncoderChunk
    setup: TrainingSetup
    vision: VisionSpec | None
    """The encoder whose layers it has; None: layers of the backbone."""

    def memory(self, model: ModelSpec, size: MicrobatchSize) -> StepMemory:
        """Return the memory of a rank with this stage alone and one microbatch in flight."""
        chunks = (self.chunk,) if isinstance(self.chunk, Chunk) else ()
        share = (
            EncoderShare(self.vision, (self.chunk,)) if isinstance(self.chunk, EncoderChunk) and self.vision else None
        )
        return predict_step_memory(model.backbone, model.connector, chunks, self.setup, size, share)

    def asked(self, sizes: IntArray) -> IntArray:
        """Return sizes, ``[N, 4]`` as in ``MicrobatchSize``, with zeros where its bytes do not depend on them."""
        if isinstance(self.chunk, EncoderChunk):
            return sizes * np.array([0, 0, 1, 1])
        return sizes * np.array([1, self.chunk.is_last, self.chunk.is_first, 0])

    def of_step(self, model: ModelSpec) -> StepMemory:
        """Return its gradients and their sums and reduction, which no data change."""
        return self.memory(model, _NO_DATA)

    def first_tables(self, model: ModelSpec) -> int:
        """Return what ``StepMemory.tables`` adds at the end of a step's first backward, beside the sums that begin.

        In float32 a gradient is its own sum; of a tied table the embedding's is added to the head's. In another type a
        table is there while its sum is made.
        """
        tables = self.of_step(model).tables
        if not tables or not sums_whole(self.setup):
            return tables
        is_both = self.chunk.is_last and trains_head(model.backbone)
        table = tables // 2 if is_both else tables
        in_float32 = self.setup.dtype_nbytes == FLOAT32_NBYTES
        return table if not in_float32 or (is_both and model.backbone.tied_embeddings) else 0

    def pass_bytes(self, model: ModelSpec, size: MicrobatchSize) -> PassBytes:
        """Return the bytes of one microbatch."""
        found, setup = self.memory(model, size), self.setup
        if isinstance(self.chunk, EncoderChunk):
            return self._of_encoder(self.chunk, found, size)
        spec = model.backbone
        # Of offloaded layers the one called last stays on the device; in the backward its place is the next one's.
        layer = layer_activation_nbytes(spec, setup, size.num_tokens) if found.host else 0
        vocabulary = -(-spec.vocab_size // setup.tp)
        # The loss leaves the gradient of the head's weight for the backward.
        head = setup.dtype_nbytes * vocabulary * spec.hidden_size if self.chunk.is_last and trains_head(spec) else 0
        return PassBytes(
            kept=found.activations - layer + head,
            forward=layer + max(found.loss - head, 0),
            backward=layer + found.working - head,
            output=setup.dtype_nbytes * spec.hidden_size * setup.sliced(size.num_tokens),
        )

    def _of_encoder(self, chunk: EncoderChunk, found: StepMemory, size: MicrobatchSize) -> PassBytes:
        assert self.vision is not None
        output = encoder_output_nbytes(self.vision, chunk, self.setup, size)
        if not chunk.is_trained:
            return PassBytes(0, found.encoding, 0, output)
        tokens = size.num_tower_tokens
        layer = encoder_layer_activation_nbytes(self.vision, self.setup, tokens) if found.host else 0
        return PassBytes(found.activations - layer, layer, layer + found.working, output)


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a pipeline rank holds whatever it computes."""

    parameters: int
    """With weights of frozen encoder layers."""
    optimizer_state: int
    gathered: int
    """Parameters that are unsharded during a step, until the last backward."""


def stage_models(
    model: ModelSpec, partition: Partition, setup: TrainingSetup, vision: VisionSpec | None
) -> tuple[StageModel, ...]:
    """Return each stage of the partition. vision: the encoder whose stages it may have."""
    # With one strategy for all layers, and all trained, the numbers of a chunk's layers do not matter.
    is_even = isinstance(setup.activation_checkpointing, str) and model.backbone.trained is None
    remaining = [rank_chunks(partition, rank, 1) for rank in range(partition.pp_size)]
    backbone = [iter(each.backbone) for each in remaining]
    encoder = [iter(each.encoder) for each in remaining]
    found: list[StageModel] = []
    for stage in partition.stages:
        if stage.module is StageModule.BACKBONE:
            chunk = replace(next(backbone[stage.rank]), in_flight=1)
            found.append(StageModel(replace(chunk, first_layer=0) if is_even else chunk, setup, None))
        else:
            found.append(StageModel(replace(next(encoder[stage.rank]), in_flight=1), setup, vision))
    return tuple(found)


def rank_models(
    model: ModelSpec, partition: Partition, stages: Sequence[StageModel], setup: TrainingSetup
) -> tuple[RankModel, ...]:
    """Return what each pipeline rank holds. stages: those of the partition."""
    found = []
    for rank in range(partition.pp_size):
        mine = [each for each, stage in zip(stages, partition.stages, strict=True) if stage.rank == rank]
        chunks = tuple(each.chunk for each in mine if isinstance(each.chunk, Chunk))
        layers = tuple(each.chunk for each in mine if isinstance(each.chunk, EncoderChunk))
        vision = next((each.vision for each in mine if each.vision is not None), None)
        share = EncoderShare(vision, layers) if vision is not None else None
        memory = predict_step_memory(model.backbone, model.connector, chunks, setup, _NO_DATA, share)
        found.append(RankModel(memory.parameters + memory.frozen, memory.optimizer_state, memory.gathered))
    return tuple(found)
