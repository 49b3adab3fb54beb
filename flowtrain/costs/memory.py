"""Peak memory of a training step on one backbone rank, and of an encoder, predicted from shapes.

Not modelled: tensors that ``backbone.compile`` fuses away, the caching allocator's fragmentation, buffers of
communication libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowtrain.costs.activations import (
    backward_nbytes,
    chunk_activation_nbytes,
    layer_activation_nbytes,
    offloaded_nbytes,
    selective_activation_nbytes,
)
from flowtrain.costs.encoder_memory import (
    EncoderShare,
    encoder_backward_nbytes,
    encoder_chunk_activation_nbytes,
    encoder_forward_nbytes,
    encoder_kept_nbytes,
    encoder_layer_activation_nbytes,
    encoder_output_nbytes,
)
from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec, VisionSpec
from flowtrain.costs.training_setup import FLOAT32_NBYTES, Chunk, EncoderChunk, MicrobatchSize, TrainingSetup

USABLE_SHARE = 0.92
"""Share of a device's memory that a process can use; driver, communication and fragmentation take the rest."""
_OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}


_ALWAYS = ("parameters", "optimizer_state", "frozen")
_COMPUTING = (*_ALWAYS, "accumulated", "gathered", "activations")
MOMENTS: Mapping[str, tuple[str, ...]] = {
    "loss": (*_COMPUTING, "loss"),
    "backward": (*_COMPUTING, "working"),
    "reduction": (*_ALWAYS, "gradients", "gathered", "reduced"),
    "encoding": (*_ALWAYS, "accumulated", "gathered", "encoding"),
}
"""Moments of a step that can be the worst, and what of ``StepMemory`` a device holds then.

They are the loss of a microbatch, its first layer's backward, the last reduction, which the update follows, and, on a
rank with frozen encoder layers, their forward of the last microbatch in flight."""


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
    host: int = 0
    """Pinned host memory with offloaded activations, over all microbatches in flight; no part of ``peak``."""
    frozen: int = 0
    """Weights of frozen encoder layers, whole, in the compute type."""
    encoding: int = 0
    """What the forward of encoder layers holds, with the activations of the microbatches before."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Those of ``MOMENTS`` that the rank has."""
        return tuple(moment for moment in MOMENTS if self.encoding or moment != "encoding")

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
    dtype, tokens = setup.dtype_nbytes, microbatch.num_tokens
    has_first, has_last = any(chunk.is_first for chunk in chunks), any(chunk.is_last for chunk in chunks)
    num_layers = sum(chunk.num_layers for chunk in chunks)
    per_layer, outer = _layer_parameters(spec, setup.tp), _outer_parameters(spec, connector, chunks, setup.tp)
    whole = num_layers * per_layer + outer
    shard = -(-whole // setup.num_shards)
    # In each chunk, FSDP gathers the next layer while one computes, and keeps the root's own parameters gathered. A
    # single replica keeps all parameters.
    shards_parameters = setup.sharding != "gradients" and setup.dp > 1
    num_gathered = min(num_layers, 2 * len(chunks)) if shards_parameters else num_layers
    reduces_each = setup.gradient_reduction == "microbatch"
    accumulated = shard if reduces_each else whole
    last_reduced = outer if has_first or has_last else per_layer
    head = dtype * -(-spec.vocab_size // setup.tp) * spec.hidden_size  # its gradient waits for the root's reduction
    # With offloading the layer called last stays on the device; in the backward its place is that of the layer before.
    return StepMemory(
        parameters=FLOAT32_NBYTES * shard,
        gradients=FLOAT32_NBYTES * shard,
        optimizer_state=FLOAT32_NBYTES * shard * _OPTIMIZER_STATES[setup.optimizer],
        accumulated=FLOAT32_NBYTES * accumulated if setup.accumulates else 0,
        gathered=dtype * (num_gathered * per_layer + outer),
        activations=sum(
            chunk.in_flight * chunk_activation_nbytes(spec, connector, chunk, setup, microbatch) for chunk in chunks
        )
        + (layer_activation_nbytes(spec, setup, tokens) if "offload" in _words(chunks, setup) else 0),
        working=_working_nbytes(spec, chunks, setup, tokens, per_layer) + (head if has_last else 0),
        loss=_loss_nbytes(spec, setup, microbatch) if has_last else 0,
        reduced=_reduction_nbytes(setup, last_reduced),
        host=sum(chunk.in_flight * offloaded_nbytes(spec, chunk, setup, tokens) for chunk in chunks),
    )


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
    return replace(
        memory,
        parameters=memory.parameters + FLOAT32_NBYTES * shard,
        gradients=memory.gradients + FLOAT32_NBYTES * shard,
        optimizer_state=memory.optimizer_state + FLOAT32_NBYTES * shard * _OPTIMIZER_STATES[setup.optimizer],
        accumulated=memory.accumulated + (FLOAT32_NBYTES * accumulated if setup.accumulates else 0),
        gathered=memory.gathered + dtype * (num_gathered * per_layer + encoder.outer_parameters),
        activations=memory.activations + kept + (layer if any(num_offloaded) else 0),
        working=max(memory.working, _backward_peak_nbytes(setup, [(restored, freed)] * 2, backward, per_layer)),
        reduced=max(memory.reduced, _reduction_nbytes(setup, encoder.outer_parameters or per_layer)),
        host=memory.host
        + sum(chunk.in_flight * layer * count for chunk, count in zip(encoder.chunks, num_offloaded, strict=True)),
    )


def _encoding_nbytes(spec: VisionSpec, chunk: EncoderChunk, setup: TrainingSetup, microbatch: MicrobatchSize) -> int:
    """What the forward of a frozen chunk holds: pixels or received states, its fullest layer, and its output."""
    tokens, dtype = microbatch.num_tower_tokens, setup.dtype_nbytes
    computing = encoder_forward_nbytes(spec, setup.tp, num_tokens=tokens, dtype_nbytes=dtype)
    received = spec.num_channels * spec.patch_size**2 if chunk.is_first else spec.hidden_size
    return computing + dtype * received * tokens + encoder_output_nbytes(spec, chunk, setup, microbatch)


def encoder_peak_nbytes(spec: VisionSpec, tp: int, *, max_batch_patches: int, dtype_nbytes: int) -> int:
    """Return the predicted peak of a frozen encoder: weights, and one layer's activations of the largest batch.

    Without gradients no activations are kept, only a batch's features until they are in the pool. tp: tensor parallel
    degree.
    """
    weights = spec.outside_parameters + spec.num_layers * -(-spec.layer_parameters // tp)
    computing = encoder_forward_nbytes(spec, tp, num_tokens=max_batch_patches, dtype_nbytes=dtype_nbytes)
    return dtype_nbytes * weights + computing


def _working_nbytes(
    spec: TransformerSpec, chunks: tuple[Chunk, ...], setup: TrainingSetup, num_tokens: int, per_layer: int
) -> int:
    """The most that the backward of decoder layers holds in addition to all activations."""
    layer, words = layer_activation_nbytes(spec, setup, num_tokens), [w for chunk in chunks for w in chunk.words(setup)]
    if isinstance(setup.activation_checkpointing, str):
        words = words[-1 - setup.checkpoint_every :]  # one more period has no other peak
    freed = {"none": layer, "full": 0, "offload": 0}
    if "selective" in words:
        freed["selective"] = selective_activation_nbytes(spec, setup, num_tokens)
    # While an offloaded layer runs, the one before it is fetched.
    first = words.index("offload") if "offload" in words else -1
    layers = [(0 if word == "none" or at == first else layer, freed[word]) for at, word in enumerate(words)]
    return _backward_peak_nbytes(setup, layers[::-1], backward_nbytes(spec, setup, num_tokens), per_layer)


def _backward_peak_nbytes(
    setup: TrainingSetup, layers: Sequence[tuple[int, int]], gradients: int, per_layer: int
) -> int:
    """The most that a backward holds in addition to all activations, with gradients of weights on their way.

    FSDP reduces a layer's gradients once its activations are gone, and the buffer of that waits for the next
    reduction, so it is there during the next layer's backward. layers: in the order of the backward, what each one
    restores, and the activations that it frees. gradients: of activations.
    """
    # A float32 run adds each gradient to the accumulated one at once.
    adds_at_once = _sums_whole(setup) and setup.dtype_nbytes == FLOAT32_NBYTES
    of_weights = 0 if adds_at_once else setup.dtype_nbytes * per_layer
    peak = gone = buffer = 0
    for restored, freed in layers:
        computing = restored + gradients + of_weights
        # With the last microbatch the buffer takes the place of the layer's accumulated gradient.
        held = max(computing, buffer) if _sums_whole(setup) else computing + buffer
        peak, gone, buffer = max(peak, held - gone), gone + freed, FLOAT32_NBYTES * per_layer
    return max(peak, buffer - gone)


def _words(chunks: Sequence[Chunk | EncoderChunk], setup: TrainingSetup) -> set[str]:
    """Memory strategies of the chunks' layers."""
    return {word for chunk in chunks for word, count in chunk.layers_by_strategy(setup).items() if count}


def _reduction_nbytes(setup: TrainingSetup, num_parameters: int) -> int:
    """One unit's gradient, the buffer that the ranks reduce, and the result where it is added to a shard."""
    gradient = FLOAT32_NBYTES if _sums_whole(setup) else setup.dtype_nbytes
    adds = setup.accumulates and setup.gradient_reduction == "microbatch"
    result = FLOAT32_NBYTES * -(-num_parameters // setup.num_shards) if adds else 0
    return (FLOAT32_NBYTES + gradient) * num_parameters + result


def _sums_whole(setup: TrainingSetup) -> bool:
    """Whether whole float32 gradients wait for a step's last microbatch."""
    return setup.accumulates and setup.gradient_reduction == "step"


def _loss_nbytes(spec: TransformerSpec, setup: TrainingSetup, microbatch: MicrobatchSize) -> int:
    """The most that the fused loss holds at once, either with a chunk's probabilities or with the head's gradient.

    Logits are in the compute type and are overwritten by their gradient. Probabilities are float32 (a CPU computes few
    of them at once and needs less). With several chunks, the head's gradient is summed in float32.
    """
    dtype, vocabulary = setup.dtype_nbytes, -(-spec.vocab_size // setup.tp)
    num_rows = max(1, microbatch.num_target_tokens)
    num_logits, head = min(num_rows, setup.loss_chunk_tokens) * vocabulary, vocabulary * spec.hidden_size
    rows = 2 * dtype * num_rows * spec.hidden_size  # rows with a target, and their gradient
    summed = FLOAT32_NBYTES * head if num_rows > setup.loss_chunk_tokens else 0
    computing = (FLOAT32_NBYTES + dtype) * num_logits + summed
    adding = dtype * (num_logits + head) + summed
    return rows + max(computing, adding)


def _layer_parameters(spec: TransformerSpec, tp: int) -> int:
    return (spec.layer_parameters - 2 * spec.hidden_size) // tp + 2 * spec.hidden_size


def _outer_parameters(spec: TransformerSpec, connector: ConnectorSpec, chunks: tuple[Chunk, ...], tp: int) -> int:
    """Parameters outside the layers: embedding, connector, final norm, head; tied ones once per rank."""
    has_first, has_last = any(chunk.is_first for chunk in chunks), any(chunk.is_last for chunk in chunks)
    num_tables = has_first + has_last
    if has_first and has_last and spec.tied_embeddings:
        num_tables = 1
    tables = num_tables * -(-spec.vocab_size // tp) * spec.hidden_size
    return tables + has_first * -(-connector.num_parameters // tp) + has_last * spec.hidden_size
