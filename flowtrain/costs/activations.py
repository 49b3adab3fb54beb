"""What a backbone rank keeps from forward to backward, and what a backward needs in addition.

Activations are listed tensor by tensor, as autograd keeps them for the decoder layer that HF's Qwen3, Qwen2, Llama and
Mistral share (pre-norm, RMSNorm computed in float32, rotary positions, gated MLP, no dropout). With sequence
parallelism a rank has its slice of the tokens of whatever lies between attention and MLP; their inputs are gathered
and kept whole, because the gradients of their weights need all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec
from flowtrain.costs.training_setup import FLOAT32_NBYTES, Chunk, MicrobatchSize, TrainingSetup


def chunk_activation_nbytes(
    spec: TransformerSpec, connector: ConnectorSpec, chunk: Chunk, setup: TrainingSetup, microbatch: MicrobatchSize
) -> int:
    """Return the device bytes that one microbatch keeps on one chunk until its backward, without those of the loss."""
    dtype, tokens = setup.dtype_nbytes, microbatch.num_tokens
    slice_nbytes = dtype * spec.hidden_size * setup.sliced(tokens)
    kept = sum(
        count * kept_nbytes(spec, setup, tokens, word)
        for word, count in without_idle_layers(chunk, spec).layers_by_strategy(setup).items()
    )
    kept += 2 * dtype * spec.head_dim * tokens  # cosines and sines of the positions
    if chunk.is_last:
        kept += _norm_nbytes(spec.hidden_size, 1, dtype) * setup.sliced(tokens)
    else:
        kept += slice_nbytes  # the output that is sent on, the root of the backward
    if not chunk.is_first and dtype != FLOAT32_NBYTES:
        kept += slice_nbytes  # the received input; in float32 the first norm keeps it anyway
    if chunk.is_first:
        inputs = connector.feature_dim * (2 if connector.norm else 1)
        between = 2 * connector.levels * -(-connector.hidden_size // setup.tp)
        kept += dtype * (inputs + between) * microbatch.num_rows
    return kept


def without_idle_layers(chunk: Chunk, spec: TransformerSpec) -> Chunk:
    """Return a chunk without its layers that no gradient passes: they keep nothing."""
    idle = spec.num_idle_layers(chunk.layers)
    return replace(chunk, num_layers=chunk.num_layers - idle, first_layer=chunk.first_layer + idle) if idle else chunk


def layer_activation_nbytes(spec: TransformerSpec, setup: TrainingSetup, num_tokens: int) -> int:
    """Return the bytes that autograd keeps for one decoder layer without recomputation.

    Heads and the MLP's width are split over the tensor parallel ranks; norms and residuals are split by tokens with
    sequence parallelism, and whole on every rank without.
    """
    return sum(_layer_tensors(spec, setup, num_tokens).values())


def selective_activation_nbytes(spec: TransformerSpec, setup: TrainingSetup, num_tokens: int) -> int:
    """Return the bytes of a layer that keeps only its input and the results of matmuls and attention."""
    dtype, widths, sliced = setup.dtype_nbytes, _Widths.of(spec, setup.tp), setup.sliced(num_tokens)
    hidden = dtype * spec.hidden_size
    results = dtype * (widths.query + 2 * widths.key + (2 if spec.gated_mlp else 1) * widths.mlp) + 2 * hidden
    attention = dtype * widths.query + FLOAT32_NBYTES * widths.num_heads
    kept = (results + attention) * num_tokens + hidden * sliced
    # The two products that are summed over ranks exist before and after the sum.
    return kept if setup.tp == 1 else kept + 2 * hidden * sliced


def backward_nbytes(spec: TransformerSpec, setup: TrainingSetup, num_tokens: int) -> int:
    """Return the bytes of gradients that exist at once in one layer's backward; the maximum is in MLP or norm."""
    dtype, widths, sliced = setup.dtype_nbytes, _Widths.of(spec, setup.tp), setup.sliced(num_tokens)
    residual = dtype * spec.hidden_size * sliced
    mlp = (3 if spec.gated_mlp else 2) * dtype * widths.mlp * num_tokens
    if sliced < num_tokens:
        mlp += dtype * spec.hidden_size * num_tokens  # the gathered gradient of the output
    norm = 3 * FLOAT32_NBYTES * spec.hidden_size * sliced
    return residual + max(mlp, norm)


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


def kept_nbytes(spec: TransformerSpec, setup: TrainingSetup, num_tokens: int, word: str) -> int:
    """Device bytes that a layer with a strategy keeps; a recomputed one keeps its input."""
    if word == "offload":
        return 0
    if word == "full":
        return setup.dtype_nbytes * spec.hidden_size * setup.sliced(num_tokens)
    if word == "selective":
        return selective_activation_nbytes(spec, setup, num_tokens)
    return layer_activation_nbytes(spec, setup, num_tokens)


def _layer_tensors(spec: TransformerSpec, setup: TrainingSetup, num_tokens: int) -> dict[str, int]:
    """Bytes of every tensor that autograd keeps of one layer, by name."""
    dtype, hidden, widths = setup.dtype_nbytes, spec.hidden_size, _Widths.of(spec, setup.tp)
    attended = widths.query if setup.repeats_kv else widths.key
    norm = _norm_nbytes(hidden, 1, dtype) * setup.sliced(num_tokens)
    per_token = {
        "attention_input": dtype * hidden,
        "query": dtype * widths.query,
        "key": dtype * attended,
        "value": dtype * attended,
        "attention_output": dtype * widths.query,
        "log_sum_exp": FLOAT32_NBYTES * widths.num_heads,
        "mlp_input": dtype * hidden,
        "up": dtype * widths.mlp,
        "activated": dtype * widths.mlp,
    }
    if spec.qk_norm:
        per_token["query_norm"] = _norm_nbytes(widths.query, widths.num_heads, dtype)
        per_token["key_norm"] = _norm_nbytes(widths.key, widths.num_kv_heads, dtype)
    if setup.attention == "sdpa":
        per_token["attention_output_joined"] = dtype * widths.query
    if spec.gated_mlp:
        per_token["gate"] = dtype * widths.mlp
        per_token["gated"] = dtype * widths.mlp
    norms = {"input_norm": norm, "post_attention_norm": norm}
    return norms | {name: nbytes * num_tokens for name, nbytes in per_token.items()}


def _norm_nbytes(width: int, num_rows: int, dtype_nbytes: int) -> int:
    """Bytes that a norm keeps.

    These are its input in float32, the normalised input in the compute type (for the weight's gradient), and one scale
    per row.
    """
    return (FLOAT32_NBYTES + dtype_nbytes) * width + FLOAT32_NBYTES * num_rows
