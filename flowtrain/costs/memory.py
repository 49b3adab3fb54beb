"""Peak memory of a training step on one backbone rank, and of an encoder, predicted from shapes.

Activations are listed tensor by tensor, as autograd keeps them for the decoder layer that HF's Qwen3, Qwen2, Llama and
Mistral share (pre-norm, RMSNorm computed in float32, rotary positions, gated MLP, no dropout). Not modelled: tensors
that ``backbone.compile`` fuses away, the caching allocator's fragmentation, buffers of communication libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec, VisionSpec

FLOAT32_NBYTES = 4
USABLE_SHARE = 0.92
"""Share of a device's memory that a process can use; driver, communication and fragmentation take the rest."""
LOSS_CHUNK_TOKENS = 2048
"""Rows of logits that exist at once; the same value as in ``flowtrain.models.loss``."""

DTYPE_NBYTES = {"float32": FLOAT32_NBYTES, "bfloat16": 2}
"""Bytes per number, by ``model.dtype``."""
_OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The settings of backbone training that memory depends on; names and values as in the configuration."""

    dp: int = 1
    """Data parallel degree."""
    tp: int = 1
    """Tensor parallel degree."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    sharding: Literal["full", "gradients", "hybrid"] = "full"
    shard_size: int | None = None
    """DP ranks that share one set of shards; None: all."""
    gradient_reduction: Literal["microbatch", "step"] = "step"
    sequence_parallel: bool = True
    activation_checkpointing: Literal["none", "full", "selective", "every_n", "offload"] = "none"
    checkpoint_every: int = 2
    optimizer: Literal["adamw", "sgd"] = "adamw"
    attention: Literal["flash_attn", "torch_varlen", "sdpa"] = "flash_attn"
    """``sdpa`` keeps its output twice, because it copies the sequences' outputs into one tensor."""
    repeats_kv: bool = False
    """The attention kernel needs as many heads of keys and values as of queries (an older ``varlen_attn``)."""
    accumulates: bool = True
    """Several microbatches per step: gradients are unsharded on every DP rank until the last one's backward."""
    loss_chunk_tokens: int = LOSS_CHUNK_TOKENS

    @property
    def dtype_nbytes(self) -> int:
        """Bytes per number in the compute type."""
        return DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of decoder layers that a rank holds."""

    num_layers: int
    is_first: bool = True
    """It includes the embedding and the connector."""
    is_last: bool = True
    """It includes the final norm, the head and the loss."""
    in_flight: int = 1
    """Microbatches whose activations it keeps at once (1F1B: the pipeline ranks from this one to the last)."""


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """Size of a packed microbatch."""

    num_tokens: int
    num_target_tokens: int
    """Tokens that carry loss."""
    num_rows: int = 0
    """Feature rows from encoders."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one rank."""

    parameters: int
    """Float32 master weights, this rank's shard."""
    gradients: int
    """Float32, this rank's shard."""
    optimizer_state: int
    """Float32, this rank's shard."""
    accumulated: int
    """Gradients of the step's earlier microbatches."""
    gathered: int
    """Parameters that are unsharded at once, in the compute type."""
    activations: int
    """Activations kept between forward and backward, over all microbatches in flight."""
    working: int
    """In addition while one layer runs backward, with a recomputed layer and the head's gradient."""
    loss: int
    """Logits of one chunk, and the tensors that the loss passes to the backward."""
    reduced: int
    """Memory of one gradient reduction, in addition to the gradients."""

    @property
    def peak(self) -> int:
        """Bytes at the worst moment: the loss or the first layer's backward, the last reduction, or the update."""
        held = self.parameters + self.optimizer_state
        computing = self.accumulated + self.gathered + self.activations + max(self.working, self.loss)
        return held + max(computing, self.gradients + self.gathered + self.reduced)


def predict_step_memory(
    spec: TransformerSpec,
    connector: ConnectorSpec,
    chunks: tuple[Chunk, ...],
    setup: TrainingSetup,
    microbatch: MicrobatchSize,
) -> StepMemory:
    """Return the memory of a rank with these chunks; microbatch: the largest one. All modules are trained."""
    dtype, tokens = setup.dtype_nbytes, microbatch.num_tokens
    layer = layer_activation_nbytes(spec, setup) * tokens
    has_first, has_last = any(chunk.is_first for chunk in chunks), any(chunk.is_last for chunk in chunks)
    num_layers = sum(chunk.num_layers for chunk in chunks)
    per_layer, outer = _layer_parameters(spec, setup.tp), _outer_parameters(spec, connector, chunks, setup.tp)
    whole = num_layers * per_layer + outer
    shard = -(-whole // setup.dp)
    # In each chunk, FSDP gathers the next layer while one computes, and keeps the root's own parameters gathered. A
    # single replica keeps all parameters.
    shards_parameters = setup.sharding == "full" and setup.dp > 1
    num_gathered = min(num_layers, 2 * len(chunks)) if shards_parameters else num_layers
    whole_nbytes = FLOAT32_NBYTES if setup.accumulates else dtype  # per number of an unsharded gradient
    head = dtype * -(-spec.vocab_size // setup.tp) * spec.hidden_size  # its gradient waits for the root's reduction
    recomputed = 0 if setup.activation_checkpointing == "none" else layer
    return StepMemory(
        parameters=FLOAT32_NBYTES * shard,
        gradients=FLOAT32_NBYTES * shard,
        optimizer_state=FLOAT32_NBYTES * shard * _OPTIMIZER_STATES[setup.optimizer],
        accumulated=FLOAT32_NBYTES * whole if setup.accumulates else 0,
        gathered=dtype * (num_gathered * per_layer + outer),
        activations=sum(
            chunk.in_flight * chunk_activation_nbytes(spec, connector, chunk, setup, microbatch) for chunk in chunks
        ),
        working=recomputed + _backward_nbytes(spec, setup) * tokens + (head if has_last else 0),
        loss=_loss_nbytes(spec, setup, microbatch) if has_last else 0,
        reduced=(FLOAT32_NBYTES + whole_nbytes) * (outer if has_first or has_last else per_layer),
    )


def chunk_activation_nbytes(
    spec: TransformerSpec, connector: ConnectorSpec, chunk: Chunk, setup: TrainingSetup, microbatch: MicrobatchSize
) -> int:
    """Return the bytes that one microbatch keeps on one chunk from forward to backward, without those of the loss."""
    dtype, tokens = setup.dtype_nbytes, microbatch.num_tokens
    num_recomputed = {
        "none": 0,
        "selective": 0,
        "full": chunk.num_layers,
        "every_n": -(-chunk.num_layers // setup.checkpoint_every),
    }[setup.activation_checkpointing]
    kept = layer_activation_nbytes(spec, setup)
    if setup.activation_checkpointing == "selective":
        kept = selective_activation_nbytes(spec, setup)
    per_token = (chunk.num_layers - num_recomputed) * kept + num_recomputed * dtype * spec.hidden_size
    per_token += 2 * dtype * spec.head_dim  # cosines and sines of the positions
    if chunk.is_last:
        per_token += _norm_nbytes(spec.hidden_size, 1, dtype)
    else:
        per_token += dtype * spec.hidden_size  # the output that is sent on, the root of the backward
    if not chunk.is_first and dtype != FLOAT32_NBYTES:
        per_token += dtype * spec.hidden_size  # the received input; in float32 the first norm keeps it anyway
    rows_nbytes = 0
    if chunk.is_first:
        rows_nbytes = dtype * (connector.feature_dim + 2 * -(-connector.hidden_size // setup.tp))
    return per_token * tokens + rows_nbytes * microbatch.num_rows


def encoder_peak_nbytes(spec: VisionSpec, tp: int, *, max_batch_patches: int, dtype_nbytes: int) -> int:
    """Return the predicted peak of a frozen encoder: weights, and one layer's activations of the largest batch.

    Without gradients no activations are kept. Hidden states, queries, keys and values, attention output and the MLP's
    widths exist at once, in addition to a batch's features until they are in the pool. tp: tensor parallel degree.
    """
    weights = spec.outside_parameters + spec.num_layers * -(-spec.layer_parameters // tp)
    mlp = (2 if spec.gated_mlp else 1) * spec.intermediate_size
    per_patch = 3 * spec.hidden_size + (4 * spec.hidden_size + 2 * mlp) // tp
    return dtype_nbytes * (weights + per_patch * max_batch_patches)


def layer_activation_nbytes(spec: TransformerSpec, setup: TrainingSetup) -> int:
    """Return the bytes per token that autograd keeps for one decoder layer without recomputation.

    Norms run on whole hidden states on every tensor parallel rank; heads and the MLP's width are split over the ranks.
    """
    return sum(_layer_tensors(spec, setup).values())


def selective_activation_nbytes(spec: TransformerSpec, setup: TrainingSetup) -> int:
    """Return the bytes per token of a layer that keeps only its input and the results of matmuls and attention."""
    dtype, widths = setup.dtype_nbytes, _Widths.of(spec, setup.tp)
    num_results = (
        1 if setup.tp == 1 else 2
    )  # the two products that are summed over ranks exist before and after the sum
    projections = widths.query + 2 * widths.key + num_results * spec.hidden_size
    mlp = (2 if spec.gated_mlp else 1) * widths.mlp + num_results * spec.hidden_size
    attention = dtype * widths.query + FLOAT32_NBYTES * widths.num_heads
    return dtype * (spec.hidden_size + projections + mlp) + attention


@dataclass(frozen=True, slots=True)
class _Widths:
    """One tensor parallel rank's share of a layer: widths of queries, keys and the MLP, and numbers of heads."""

    query: int
    key: int
    mlp: int
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, spec: TransformerSpec, tp: int) -> _Widths:
        num_heads, num_kv_heads = spec.num_heads // tp, spec.num_kv_heads // tp
        return cls(
            num_heads * spec.head_dim,
            num_kv_heads * spec.head_dim,
            spec.intermediate_size // tp,
            num_heads,
            num_kv_heads,
        )


def _layer_tensors(spec: TransformerSpec, setup: TrainingSetup) -> dict[str, int]:
    """Bytes per token of every tensor that autograd keeps of one layer, by name."""
    dtype, hidden, widths = setup.dtype_nbytes, spec.hidden_size, _Widths.of(spec, setup.tp)
    attended = widths.query if setup.repeats_kv else widths.key
    tensors = {
        "input_norm": _norm_nbytes(hidden, 1, dtype),
        "attention_input": dtype * hidden,
        "query": dtype * widths.query,
        "key": dtype * attended,
        "value": dtype * attended,
        "attention_output": dtype * widths.query,
        "log_sum_exp": FLOAT32_NBYTES * widths.num_heads,
        "post_attention_norm": _norm_nbytes(hidden, 1, dtype),
        "mlp_input": dtype * hidden,
        "up": dtype * widths.mlp,
        "activated": dtype * widths.mlp,
    }
    if spec.qk_norm:
        tensors["query_norm"] = _norm_nbytes(widths.query, widths.num_heads, dtype)
        tensors["key_norm"] = _norm_nbytes(widths.key, widths.num_kv_heads, dtype)
    if setup.attention == "sdpa":
        tensors["attention_output_joined"] = dtype * widths.query
    if spec.gated_mlp:
        tensors["gate"] = dtype * widths.mlp
        tensors["gated"] = dtype * widths.mlp
    return tensors


def _norm_nbytes(width: int, num_rows: int, dtype_nbytes: int) -> int:
    """Bytes that a norm keeps.

    These are its input in float32, the normalised input in the compute type (for the weight's gradient), and one scale
    per row.
    """
    return (FLOAT32_NBYTES + dtype_nbytes) * width + FLOAT32_NBYTES * num_rows


def _backward_nbytes(spec: TransformerSpec, setup: TrainingSetup) -> int:
    """Bytes per token of the gradients that exist at once in one layer's backward; the maximum is in MLP or norm."""
    dtype, widths = setup.dtype_nbytes, _Widths.of(spec, setup.tp)
    mlp = (3 if spec.gated_mlp else 2) * dtype * widths.mlp
    norm = 3 * FLOAT32_NBYTES * spec.hidden_size
    return dtype * spec.hidden_size + max(mlp, norm)


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
