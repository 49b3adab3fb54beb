"""Peak memory of a training step on one backbone rank, and of an encoder, predicted from shapes.

Not modelled: tensors that ``backbone.compile`` fuses away, the caching allocator's fragmentation, buffers of
communication libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowtrain.costs.activations import (
    backward_nbytes,
    chunk_activation_nbytes,
    layer_activation_nbytes,
    num_recomputed_layers,
    offloaded_nbytes,
    selective_activation_nbytes,
)
from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec, VisionSpec
from flowtrain.costs.training_setup import FLOAT32_NBYTES, Chunk, MicrobatchSize, TrainingSetup

USABLE_SHARE = 0.92
"""Share of a device's memory that a process can use; driver, communication and fragmentation take the rest."""
_OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}


_ALWAYS = ("parameters", "optimizer_state")
_COMPUTING = (*_ALWAYS, "accumulated", "gathered", "activations")
MOMENTS: Mapping[str, tuple[str, ...]] = {
    "loss": (*_COMPUTING, "loss"),
    "backward": (*_COMPUTING, "working"),
    "reduction": (*_ALWAYS, "gradients", "gathered", "reduced"),
}
"""Moments of a step that can be the worst, and what of ``StepMemory`` a device holds then.

They are the loss of a microbatch, its first layer's backward, and the last reduction, which the update follows."""


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

    @property
    def peak(self) -> int:
        """Device bytes at the worst of ``MOMENTS``."""
        return max(map(self.at, MOMENTS))

    def at(self, moment: str) -> int:
        """Device bytes at one of ``MOMENTS``."""
        return sum(getattr(self, name) for name in MOMENTS[moment])


def predict_step_memory(
    spec: TransformerSpec,
    connector: ConnectorSpec,
    chunks: tuple[Chunk, ...],
    setup: TrainingSetup,
    microbatch: MicrobatchSize,
) -> StepMemory:
    """Return the memory of a rank with these chunks; microbatch: the largest one. All modules are trained."""
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
    return StepMemory(
        parameters=FLOAT32_NBYTES * shard,
        gradients=FLOAT32_NBYTES * shard,
        optimizer_state=FLOAT32_NBYTES * shard * _OPTIMIZER_STATES[setup.optimizer],
        accumulated=FLOAT32_NBYTES * accumulated if setup.accumulates else 0,
        gathered=dtype * (num_gathered * per_layer + outer),
        activations=sum(
            chunk.in_flight * chunk_activation_nbytes(spec, connector, chunk, setup, microbatch) for chunk in chunks
        )
        + _last_offloaded_nbytes(spec, setup, tokens),
        working=_working_nbytes(spec, chunks, setup, tokens, per_layer) + (head if has_last else 0),
        loss=_loss_nbytes(spec, setup, microbatch) if has_last else 0,
        reduced=_reduction_nbytes(setup, last_reduced),
        host=sum(chunk.in_flight * offloaded_nbytes(spec, chunk, setup, tokens) for chunk in chunks),
    )


def encoder_peak_nbytes(spec: VisionSpec, tp: int, *, max_batch_patches: int, dtype_nbytes: int) -> int:
    """Return the predicted peak of a frozen encoder: weights, and one layer's activations of the largest batch.

    Without gradients no activations are kept. Hidden states, queries, keys and values, attention output and the MLP's
    widths exist at once, in addition to a batch's features until they are in the pool. tp: tensor parallel degree.
    """
    weights = spec.outside_parameters + spec.num_layers * -(-spec.layer_parameters // tp)
    mlp = (2 if spec.gated_mlp else 1) * spec.intermediate_size
    per_patch = 3 * spec.hidden_size + (4 * spec.hidden_size + 2 * mlp) // tp
    return dtype_nbytes * (weights + per_patch * max_batch_patches)


def _working_nbytes(
    spec: TransformerSpec, chunks: tuple[Chunk, ...], setup: TrainingSetup, num_tokens: int, per_layer: int
) -> int:
    """The most that one layer's backward holds in addition to activations, with gradients of weights on their way.

    FSDP reduces a layer's gradients once its activations are gone, and the buffer of that waits for the next
    reduction, so it is there during the next layer's backward.
    """
    layer = layer_activation_nbytes(spec, setup, num_tokens)
    restored = 0 if setup.activation_checkpointing == "none" else layer
    # A float32 run adds each gradient to the accumulated one at once.
    adds_at_once = _sums_whole(setup) and setup.dtype_nbytes == FLOAT32_NBYTES
    of_weights = 0 if adds_at_once else setup.dtype_nbytes * per_layer
    computing = restored + backward_nbytes(spec, setup, num_tokens) + of_weights
    buffer = FLOAT32_NBYTES * per_layer - _freed_nbytes(spec, chunks, setup, num_tokens, layer)
    if _sums_whole(setup):
        # With the last microbatch the buffer takes the place of the layer's accumulated gradient.
        return max(computing, buffer)
    return computing + max(0, buffer)


def _last_offloaded_nbytes(spec: TransformerSpec, setup: TrainingSetup, num_tokens: int) -> int:
    """The layer called last stays on the device; in the backward its place is that of the layer before."""
    return layer_activation_nbytes(spec, setup, num_tokens) if setup.activation_checkpointing == "offload" else 0


def _freed_nbytes(
    spec: TransformerSpec, chunks: tuple[Chunk, ...], setup: TrainingSetup, num_tokens: int, layer: int
) -> int:
    """Activations of one layer that its backward frees."""
    if setup.activation_checkpointing == "selective":
        return selective_activation_nbytes(spec, setup, num_tokens)
    if setup.activation_checkpointing == "offload" or any(num_recomputed_layers(each, setup) for each in chunks):
        return 0
    return layer


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
