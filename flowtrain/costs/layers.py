"""The operators of one forward of a layer, head or connector on one device of a tensor parallel group.

A backward repeats matrix products and attention as often as gradients of weights and inputs ask for; callers count that
in passes. Numbers of tokens may be arrays, of microbatches or samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec, VisionSpec
from flowtrain.costs.operators import Operator
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup

_NORM, _RESIDUAL = 2, 3
"""Numbers moved for each: a norm reads and writes, a residual reads two."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Operators by how a backward repeats them."""

    matrices: tuple[Operator, ...]
    attention: tuple[Operator, ...]
    moves: tuple[Operator, ...]
    """Norms, activations, residuals."""


def decoder_layer(spec: TransformerSpec, setup: TrainingSetup, tp: int, num_tokens: Any, squares: Any) -> Layer:
    """Return the operators of a decoder layer. squares: sum over sequences of their squared lengths.

    Causal attention counts half of the query-key pairs. Sequence parallelism slices norms and residuals.
    """
    dtype, hidden = setup.dtype_nbytes, spec.hidden_size
    queries, keys = spec.num_heads * spec.head_dim / tp, spec.num_kv_heads * spec.head_dim / tp
    width, branches = spec.intermediate_size / tp, 2 if spec.gated_mlp else 1
    sliced = num_tokens / tp if setup.sequence_parallel else num_tokens
    turned = (queries + keys) * (_NORM * (1 + spec.qk_norm))
    return Layer(
        (
            _product("matmul", dtype, num_tokens, hidden, queries + 2 * keys),
            _product("matmul", dtype, num_tokens, queries, hidden),
            _product("matmul", dtype, num_tokens, hidden, branches * width),
            _product("matmul", dtype, num_tokens, width, hidden),
        ),
        (Operator("attention", 2.0 * queries * squares, dtype * 2.0 * (queries + keys) * num_tokens),),
        (
            Operator("norm", nbytes=dtype * 2.0 * (_NORM + _RESIDUAL) * hidden * sliced),
            Operator("norm", nbytes=dtype * (turned + (branches + 1) * width) * num_tokens),
        ),
    )


def head(spec: TransformerSpec, setup: TrainingSetup, tp: int, num_target_tokens: Any) -> Layer:
    """Return the operators of the head and the loss over tokens that carry loss."""
    dtype, width = setup.dtype_nbytes, spec.vocab_size / tp
    loss = Operator("norm", nbytes=FLOAT32_NBYTES * width * num_target_tokens)
    return Layer((_product("matmul", dtype, num_target_tokens, spec.hidden_size, width),), (), (loss,))


def connector(spec: ConnectorSpec, setup: TrainingSetup, tp: int, num_rows: Any) -> tuple[Layer, Layer]:
    """Return the operators of both linear layers over feature rows, the activation with the first."""
    dtype, between = setup.dtype_nbytes, spec.levels * spec.hidden_size / tp
    norm = Operator("norm", nbytes=dtype * (_NORM * spec.feature_dim * spec.norm + _NORM * between) * num_rows)
    first = _product("matmul", dtype, num_rows, spec.feature_dim, spec.hidden_size / tp)
    second = _product("matmul", dtype, num_rows, between, spec.out_dim)
    return Layer((first,), (), (norm,)), Layer((second,), (), ())


def encoder_layer(
    spec: VisionSpec, setup: TrainingSetup, tp: int, num_tokens: Any, squares: Any, *, is_trained: bool
) -> Layer:
    """Return the operators of an encoder's layer; arguments are as in ``decoder_layer``. Attention is full.

    Weights are read once for a batch of many images, which counts as nothing.
    """
    dtype, hidden, width = setup.dtype_nbytes, spec.hidden_size, spec.intermediate_size / tp
    heads, branches = hidden / tp, 2 if spec.gated_mlp else 1
    # All products together: their widths count the numbers that they read and write for a token.
    widths = hidden + 3 * heads + heads + hidden + hidden + branches * width + width + hidden
    products = Operator(
        "encoder_matmul",
        2.0 * spec.layer_matmul_parameters / tp * num_tokens,
        dtype * widths * num_tokens,
    )
    turned = 2 * heads * _NORM * (spec.qk_norm + spec.rotary)
    between = 2 * (_NORM + _RESIDUAL) * hidden / (tp if is_trained and setup.sequence_parallel else 1)
    moved = between + turned + (branches + 1) * width
    return Layer(
        (products,),
        (Operator("attention", 4.0 * heads * squares, dtype * 4.0 * heads * num_tokens),),
        (Operator("norm", nbytes=dtype * moved * num_tokens),),
    )


def patch_embedding(spec: VisionSpec, setup: TrainingSetup, tp: int, num_patches: Any) -> Layer:
    """Return the operators that embed patches."""
    width = spec.patch_matmul_parameters / spec.hidden_size + spec.hidden_size
    flops = 2.0 * spec.patch_matmul_parameters / tp * num_patches
    return Layer((Operator("encoder_matmul", flops, setup.dtype_nbytes * width / tp * num_patches),), (), ())


def merging(spec: VisionSpec, setup: TrainingSetup, tp: int, num_patches: Any) -> Layer:
    """Return the operators of a frozen connector that runs with the tower."""
    flops = 2.0 * spec.merging_matmul_parameters / tp / spec.patches_per_row * num_patches
    return Layer((Operator("encoder_matmul", flops),), (), ())


def _product(kind: Any, dtype: int, num_tokens: Any, inputs: float, outputs: float) -> Operator:
    """A matrix product that reads its weights, and reads and writes each token's numbers."""
    nbytes = dtype * (inputs * outputs + (inputs + outputs) * num_tokens)
    return Operator(kind, 2.0 * inputs * outputs * num_tokens, nbytes)
