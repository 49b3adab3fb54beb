"""Peak memory of a training step on one backbone rank, and of an encoder, predicted from shapes.

Not modelled: tensors that ``backbone.compile`` fuses away, the caching allocator's fragmentation, buffers of
communication libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.activations import chunk_activation_nbytes
from flowtrain.costs.encoder_memory import (
    EncoderShare,
    encoder_backward_nbytes,
    encoder_chunk_activation_nbytes,
    encoder_forward_nbytes,
    encoder_kept_nbytes,
    encoder_layer_activation_nbytes,
    encoder_levels_nbytes,
    encoder_output_nbytes,
    fused_share_nbytes,
)
from flowtrain.costs.flops import IntArray
from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec, VisionSpec
from flowtrain.costs.rank_memory import (
    OPTIMIZER_STATES,
    RankColumns,
    backward_peak_nbytes,
    rank_nbytes,
    reduction_nbytes,
    sums_whole,
)
from flowtrain.costs.training_setup import FLOAT32_NBYTES, Chunk, EncoderChunk, MicrobatchSize, TrainingSetup

USABLE_SHARE = 0.92
"""Share of a device's memory that a process can use; driver, communication and fragmentation take the rest."""


_ALWAYS = ("parameters", "optimizer_state", "frozen")
_COMPUTING = (*_ALWAYS, "accumulated", "gathered", "activations")
MOMENTS: Mapping[str, tuple[str, ...]] = {
    "loss": (*_COMPUTING, "loss"),
    "backward": (*_COMPUTING, "working"),
    "embedding": (*_ALWAYS, "accumulated", "gathered", "in_flight", "tables"),
    "reduction": (*_ALWAYS, "gradients", "remaining", "reduced"),
    "encoding": (*_ALWAYS, "accumulated", "gathered", "encoding"),
}
"""Moments of a step that can be the worst, and what of ``StepMemory`` a device holds then.

They are the loss of a microbatch, its first layer's backward, the end of that backward on a rank with the embedding,
the last reduction, which the update follows, and, on a rank with frozen encoder layers, their forward of the last
microbatch in flight."""
_SOMETIMES = {"embedding": "tables", "encoding": "encoding"}
"""Moments that a rank may not have, and what it then has nothing of."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one rank."""

    parameters: int
    """Float32 master weights, this rank's shard."""
    gradients: int
    """Float32, this rank's shard, when all are reduced."""
    optimizer_state: int
    """Float32, this rank's shard."""
    accumulated: int
    """Float32 gradients of the step's earlier microbatches: whole, or this rank's shard."""
    gathered: int
    """Parameters that are unsharded at once, in the compute type."""
    activations: int
    """Activations kept on the device between forward and backward, over all microbatches in flight."""
    working: int
    """In addition while one layer runs backward: recomputed or offloaded tensors, gradients on their way, the head's
    gradient."""
    loss: int
    """Logits of one chunk, and the tensors that the loss passes to the backward."""
    reduced: int
    """Memory of a backward's last gradient reduction, in addition to the gradients."""
    remaining: int = 0
    """What else is there while a microbatch's gradients are reduced: activations of the others in flight, parameters
    that stay gathered, a trained encoder whose backward follows. A step's last backward leaves nothing of it."""
    tables: int = 0
    """Gradients of the embedding and, if it is there, of the head, at the end of a backward: whole, in the compute
    type."""
    in_flight: int = 0
    """Activations of the other microbatches in flight at the end of a backward."""
    host: int = 0
    """Pinned host memory with offloaded activations, over all microbatches in flight; no part of ``peak``."""
    frozen: int = 0
    """Weights of frozen encoder layers, whole, in the compute type."""
    encoding: int = 0
    """What the forward of encoder layers holds, with the activations of the microbatches before."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Those of ``MOMENTS`` that the rank has."""
        return tuple(each for each in MOMENTS if each not in _SOMETIMES or getattr(self, _SOMETIMES[each]))

    @property
    def peak(self) -> int:
        """Device bytes at the worst of ``MOMENTS``."""
        return max(map(self.at, MOMENTS))

    def at(self, moment: str) -> int:
        """Device bytes at one of ``MOMENTS``."""
        return sum(getattr(self, name) for name in MOMENTS[moment])


_NOTHING = StepMemory(*(0 for _ in range(9)))


def predict_step_memory(
    spec: TransformerSpec,
    connector: ConnectorSpec,
    chunks: tuple[Chunk, ...],
    setup: TrainingSetup,
    microbatch: MicrobatchSize,
    encoder: EncoderShare | None = None,
) -> StepMemory:
    """Return the memory of a rank with these chunks; connector and backbone are trained.

    microbatch: the largest one. encoder: the layers of an encoder that the rank holds too.
    """
    memory = _backbone_memory(spec, connector, chunks, setup, microbatch) if chunks else _NOTHING
    if encoder is None or not encoder.chunks:
        return memory
    if encoder.is_trained:
        return _with_trained_encoder(memory, encoder, setup, microbatch)
    others = sum(
        (chunk.in_flight - 1) * chunk_activation_nbytes(spec, connector, chunk, setup, microbatch) for chunk in chunks
    )
    weights = encoder.num_layers * encoder.layer_parameters(setup.tp) + encoder.outer_parameters
    computing = max(_encoding_nbytes(encoder.spec, chunk, setup, microbatch) for chunk in encoder.chunks)
    return replace(memory, frozen=setup.dtype_nbytes * weights, encoding=others + computing)


def _backbone_memory(
    spec: TransformerSpec,
    connector: ConnectorSpec,
    chunks: tuple[Chunk, ...],
    setup: TrainingSetup,
    microbatch: MicrobatchSize,
) -> StepMemory:
    found = rank_nbytes(
        spec,
        connector,
        RankColumns.of(chunks, setup, spec),
        setup,
        (microbatch,),
        size=np.zeros(1, dtype=np.int64),
        dp=np.array([setup.dp]),
        tp=np.array([setup.tp]),
        num_shards=np.array([setup.num_shards]),
        shards_parameters=np.array([setup.sharding != "gradients"]),
        accumulates=np.array([setup.accumulates]),
        reduces_each=np.array([setup.gradient_reduction == "microbatch"]),
    )
    return StepMemory(**{name: int(each[0]) for name, each in found.items()})


def rank_peaks(
    spec: TransformerSpec,
    connector: ConnectorSpec,
    ranks: RankColumns,
    setup: TrainingSetup,
    microbatches: Sequence[MicrobatchSize],
    **scales: NDArray[Any],
) -> IntArray:
    """Return the device bytes of backbone ranks at the worst of ``MOMENTS``, ``[N]``; arguments as ``rank_nbytes``."""
    found = rank_nbytes(spec, connector, ranks, setup, microbatches, **scales)
    each = [reduce(add, (found[name] for name in names if name in found)) for names in MOMENTS.values()]
    return reduce(np.maximum, each)


def _with_trained_encoder(
    memory: StepMemory, encoder: EncoderShare, setup: TrainingSetup, microbatch: MicrobatchSize
) -> StepMemory:
    """Add encoder layers, which are sharded, gathered and reduced as the backbone's are."""
    dtype, tokens, per_layer = setup.dtype_nbytes, microbatch.num_tower_tokens, encoder.layer_parameters(setup.tp)
    whole = encoder.num_layers * per_layer + encoder.outer_parameters
    shard = -(-whole // setup.num_shards)
    shards_parameters = setup.sharding != "gradients" and setup.dp > 1
    num_gathered = min(encoder.num_layers, 2 * len(encoder.chunks)) if shards_parameters else encoder.num_layers
    accumulated = shard if setup.gradient_reduction == "microbatch" else whole
    kept = sum(
        chunk.in_flight * encoder_chunk_activation_nbytes(encoder.spec, chunk, setup, microbatch)
        for chunk in encoder.chunks
    )
    # As for decoder layers: what is recomputed or fetched exists while a layer runs backward.
    layer, words = encoder_layer_activation_nbytes(encoder.spec, setup, tokens), _words(encoder.chunks, setup)
    backward, restored = encoder_backward_nbytes(encoder.spec, setup, tokens), 0 if words <= {"none"} else layer
    freed = min(
        (0 if word == "full" else encoder_kept_nbytes(encoder.spec, setup, tokens, word) for word in words), default=0
    )
    num_offloaded = [chunk.layers_by_strategy(setup).get("offload", 0) for chunk in encoder.chunks]
    gathered = dtype * (num_gathered * per_layer + encoder.outer_parameters)
    # The encoder's backward follows the backbone's: until then it has all, otherwise less by one microbatch.
    follows = memory.parameters > 0
    ended = encoder_chunk_activation_nbytes(encoder.spec, encoder.chunks[0], setup, microbatch)
    in_flight = kept if follows else kept - ended
    reduces_each = setup.accumulates and setup.gradient_reduction == "microbatch"
    remaining = in_flight + (gathered if follows or not shards_parameters else 0) if reduces_each else 0
    return replace(
        memory,
        parameters=memory.parameters + FLOAT32_NBYTES * shard,
        gradients=memory.gradients + FLOAT32_NBYTES * shard,
        optimizer_state=memory.optimizer_state + FLOAT32_NBYTES * shard * OPTIMIZER_STATES[setup.optimizer],
        accumulated=memory.accumulated + (FLOAT32_NBYTES * accumulated if setup.accumulates else 0),
        gathered=memory.gathered + gathered,
        activations=memory.activations + kept + (layer if any(num_offloaded) else 0),
        working=max(memory.working, backward_peak_nbytes(setup, [(restored, freed)] * 2, backward, per_layer)),
        reduced=max(memory.reduced, _reduction_nbytes(setup, encoder.outer_parameters or per_layer)),
        remaining=memory.remaining + remaining,
        in_flight=memory.in_flight + in_flight,
        host=memory.host
        + sum(chunk.in_flight * layer * count for chunk, count in zip(encoder.chunks, num_offloaded, strict=True)),
    )


def _encoding_nbytes(spec: VisionSpec, chunk: EncoderChunk, setup: TrainingSetup, microbatch: MicrobatchSize) -> int:
    """What the forward of a frozen chunk holds: pixels or received states, its fullest layer, and its output."""
    tokens, dtype = microbatch.num_tower_tokens, setup.dtype_nbytes
    computing = encoder_forward_nbytes(spec, setup.tp, num_tokens=tokens, dtype_nbytes=dtype)
    received = spec.num_channels * spec.patch_size**2 if chunk.is_first else spec.levels * spec.hidden_size
    computing += fused_share_nbytes(spec, setup) + dtype * received * tokens
    return computing + encoder_output_nbytes(spec, chunk, setup, microbatch)


def encoder_peak_nbytes(spec: VisionSpec, tp: int, *, max_batch_patches: int, dtype_nbytes: int) -> int:
    """Return the predicted peak of a frozen encoder: weights, and activations of the largest batch.

    Without gradients only those of one layer exist, and what becomes features: hidden states of all levels, which are
    joined at the end. A batch's features are kept until they are in the pool. tp: tensor parallel degree.
    """
    weights = spec.outside_parameters + spec.num_layers * -(-spec.layer_parameters // tp)
    computing = encoder_forward_nbytes(spec, tp, num_tokens=max_batch_patches, dtype_nbytes=dtype_nbytes)
    levels = encoder_levels_nbytes(spec, num_tokens=max_batch_patches, dtype_nbytes=dtype_nbytes)
    joining = 2 * (levels + dtype_nbytes * spec.hidden_size * max_batch_patches)
    return dtype_nbytes * weights + max(computing + levels, joining)


def _words(chunks: Sequence[Chunk | EncoderChunk], setup: TrainingSetup) -> set[str]:
    """Memory strategies of the chunks' layers."""
    return {word for chunk in chunks for word, count in chunk.layers_by_strategy(setup).items() if count}


def _reduction_nbytes(setup: TrainingSetup, num_parameters: int) -> int:
    adds = setup.accumulates and setup.gradient_reduction == "microbatch"
    last, shards = np.array([num_parameters]), np.array([setup.num_shards])
    whole = np.array([sums_whole(setup)])
    return int(reduction_nbytes(setup.dtype_nbytes, last, shards, whole, np.array([adds]))[0])
