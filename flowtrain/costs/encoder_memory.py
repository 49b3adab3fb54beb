"""What the layers of a vision encoder take on a rank of the pipeline, frozen or trained.

Activations of a trained encoder are listed tensor by tensor, as autograd keeps them for the layer that HF's SigLIP,
CLIP, ViT, DINOv2 and InternVL share (pre-norm, full attention by a fused kernel, MLP with GELU, no dropout). With
tensor parallelism heads and the MLP's width are split. With sequence parallelism a trained layer's norms and residuals
are split by tokens; the inputs of attention and MLP, and what passes between stages, are whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.costs.model_spec import VisionSpec
from flowtrain.costs.training_setup import FLOAT32_NBYTES, EncoderChunk, MicrobatchSize, TrainingSetup


@dataclass(frozen=True, slots=True)
class EncoderShare:
    """The part of an encoder that a rank holds."""

    spec: VisionSpec
    chunks: tuple[EncoderChunk, ...]

    @property
    def is_trained(self) -> bool:
        """Whether its layers are trained; they all are or none is."""
        return any(chunk.is_trained for chunk in self.chunks)

    @property
    def num_layers(self) -> int:
        """Number of its layers."""
        return sum(chunk.num_layers for chunk in self.chunks)

    def layer_parameters(self, tp: int) -> int:
        """Parameters of a layer on a rank; norms, biases of sums and a fused matrix are whole."""
        matrices = self.spec.layer_matmul_parameters - self.spec.fused_parameters
        return -(-matrices // tp) + self.spec.layer_parameters - matrices

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: those before the first one, on the rank that has it."""
        if not any(chunk.is_first for chunk in self.chunks):
            return 0
        return self.spec.outside_parameters - self.spec.unused_parameters


def encoder_forward_nbytes(spec: VisionSpec, tp: int, *, num_tokens: int, dtype_nbytes: int) -> int:
    """Return the bytes that exist at once in a forward without gradients: those of its fullest layer.

    They are hidden states, queries, keys and values, attention output and the MLP's widths.
    """
    mlp = (2 if spec.gated_mlp else 1) * spec.intermediate_size
    per_token = 3 * spec.hidden_size + (4 * spec.hidden_size + 2 * mlp) // tp
    return dtype_nbytes * per_token * num_tokens


def encoder_levels_nbytes(spec: VisionSpec, *, num_tokens: int, dtype_nbytes: int) -> int:
    """Return the bytes of the hidden states of all levels but the last, which exist beside those of a later layer."""
    return dtype_nbytes * spec.hidden_size * (spec.levels - 1) * num_tokens


def fused_share_nbytes(spec: VisionSpec, setup: TrainingSetup) -> int:
    """Return the bytes of a rank's own rows of a fused matrix, a copy that a layer computes with; 0 without ranks."""
    return setup.dtype_nbytes * spec.fused_parameters // setup.tp if setup.tp > 1 else 0


def encoder_chunk_activation_nbytes(
    spec: VisionSpec, chunk: EncoderChunk, setup: TrainingSetup, microbatch: MicrobatchSize
) -> int:
    """Return the device bytes that one microbatch keeps on a trained chunk until its backward."""
    tokens = microbatch.num_tower_tokens
    kept = sum(
        count * encoder_kept_nbytes(spec, setup, tokens, word)
        for word, count in chunk.layers_by_strategy(setup).items()
    )
    if chunk.is_first:
        kept += (
            setup.dtype_nbytes * spec.num_channels * spec.patch_size**2 * tokens
        )  # pixels, for the embedding's weight
    if not chunk.is_first:
        # Received hidden states are a part of what came, and keep all of it: at most so many levels.
        kept += encoder_levels_nbytes(spec, num_tokens=tokens, dtype_nbytes=setup.dtype_nbytes)
        if chunk.num_layers and setup.sliced(tokens) < tokens:  # the first layer keeps a slice of them
            kept += setup.dtype_nbytes * spec.hidden_size * tokens
    if spec.rotary and chunk.num_layers:
        kept += 2 * FLOAT32_NBYTES * (spec.hidden_size // spec.num_heads) * tokens  # cosines and sines of the positions
    if chunk.sends:
        kept += encoder_output_nbytes(spec, chunk, setup, microbatch)  # the root of the backward
    return kept


def encoder_output_nbytes(
    spec: VisionSpec, chunk: EncoderChunk, setup: TrainingSetup, microbatch: MicrobatchSize
) -> int:
    """Return the bytes of a chunk's output: features, or hidden states for the next one, of all levels at most."""
    if chunk.is_last:
        return setup.dtype_nbytes * spec.hidden_size * spec.levels * spec.patches_per_row * microbatch.num_rows
    return setup.dtype_nbytes * spec.hidden_size * spec.levels * microbatch.num_tower_tokens


def encoder_layer_activation_nbytes(spec: VisionSpec, setup: TrainingSetup, num_tokens: int) -> int:
    """Return the bytes that autograd keeps for one layer of the tower."""
    return sum(_layer_tensors(spec, setup, num_tokens).values()) + fused_share_nbytes(spec, setup)


def encoder_kept_nbytes(spec: VisionSpec, setup: TrainingSetup, num_tokens: int, word: str) -> int:
    """Return the device bytes that a layer with a memory strategy keeps, as ``activation_checkpointing`` names it.

    ``full``: its input. ``selective``: also the results of matrix products and attention; what is summed over ranks
    exists before and after the sum.
    """
    dtype, hidden = setup.dtype_nbytes, spec.hidden_size
    sliced = dtype * hidden * setup.sliced(num_tokens)
    if word == "offload":
        return 0
    if word == "full":
        return sliced
    if word == "selective":
        heads = (4 * dtype * hidden + FLOAT32_NBYTES * spec.num_heads) // setup.tp
        mlp = (2 if spec.gated_mlp else 1) * dtype * spec.intermediate_size // setup.tp
        kept = (heads + mlp + 2 * dtype * hidden) * num_tokens + sliced
        return kept if setup.tp == 1 else kept + 2 * sliced
    return encoder_layer_activation_nbytes(spec, setup, num_tokens)


def encoder_backward_nbytes(spec: VisionSpec, setup: TrainingSetup, num_tokens: int) -> int:
    """Return the bytes of gradients that exist at once in one layer's backward; the maximum is in the MLP."""
    dtype, sliced, widths = setup.dtype_nbytes, setup.sliced(num_tokens), 3 if spec.gated_mlp else 2
    nbytes = dtype * (spec.hidden_size * sliced + widths * spec.intermediate_size // setup.tp * num_tokens)
    if sliced < num_tokens:
        nbytes += dtype * spec.hidden_size * num_tokens  # the gathered gradient of the output
    return nbytes


def _layer_tensors(spec: VisionSpec, setup: TrainingSetup, num_tokens: int) -> dict[str, int]:
    """Bytes of every tensor that autograd keeps of one layer, by name."""
    dtype, hidden = setup.dtype_nbytes, spec.hidden_size
    heads, mlp = dtype * hidden // setup.tp, dtype * spec.intermediate_size // setup.tp
    regions = {
        "normed_input": dtype * hidden,
        "query": heads,
        "key": heads,
        "value": heads,
        "attention_output": heads,
        "log_sum_exp": FLOAT32_NBYTES * spec.num_heads // setup.tp,
        "normed_residual": dtype * hidden,
        "mlp_input": (2 if spec.gated_mlp else 1) * mlp,
        "activated": mlp,
    }
    if spec.fused_qkv and spec.rotary:
        regions["value"] = 3 * heads  # a view of the fused result; queries and keys are other tensors once turned
    if spec.gated_mlp:
        regions["gated"] = mlp
    if spec.quick_gelu:
        regions["sigmoid"] = mlp
    if spec.qk_norm:
        regions["query_and_key_norms"] = 2 * (FLOAT32_NBYTES + dtype) * hidden // setup.tp
    between = {
        "input": dtype * hidden,
        "residual": dtype * hidden,
        "norms": 4 * FLOAT32_NBYTES,  # a mean and a scale each
    }
    if spec.layer_scale:
        between |= {"attention_scaled": dtype * hidden, "mlp_scaled": dtype * hidden}
    # An RMSNorm keeps its input in float32, in the place of the input in the compute type, and what it normalised.
    if spec.rms_norm:
        between["norm_results"] = 2 * FLOAT32_NBYTES * hidden
    sliced = setup.sliced(num_tokens)
    return {name: nbytes * num_tokens for name, nbytes in regions.items()} | {
        name: nbytes * sliced for name, nbytes in between.items()
    }
