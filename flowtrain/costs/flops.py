"""Model FLOPs of training, from actual lengths.

Conventions:

- A multiply-add is two FLOPs. Only matrix products count (no norms, softmax, activations, embeddings).
- Causal attention counts ``len ** 2 / 2`` query-key pairs per sub-sequence, as in a kernel that skips the upper
  triangle, summed over the sub-sequences of a packed microbatch.
- The head counts for tokens that carry loss only; it is not computed for others (`flowtrain.models.loss`).
- Backward costs twice the forward if both weights and inputs need gradients, once if only one of them does.
- Recomputation (activation checkpointing) is overhead, not model FLOPs. There is no padding.
- Encoders have full attention inside one image, without a tower's pooling head (features are taken before it). Frozen
  ones only run forward. The patch embedding has no input gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.model_spec import FROZEN_ENCODERS, ConnectorSpec, ModelSpec, TransformerSpec, VisionSpec
from flowtrain.types.plan import Flops

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleFlops:
    """Training FLOPs of each sample by module; float64 ``[S]``."""

    positions: IntArray
    """Positions of the samples; int64 ``[S]``."""
    encoders: FloatArray
    connector: FloatArray
    backbone: FloatArray

    def sum(self, without: Collection[int] = ()) -> Flops:
        """Return the sums over the samples; without: positions to leave out; unknown ones are ignored."""
        kept: Any = slice(None)
        if without:
            kept = np.isin(self.positions, np.fromiter(without, np.int64), invert=True)
        return Flops(*(float(column[kept].sum()) for column in (self.encoders, self.connector, self.backbone)))


def backbone_training_flops(
    spec: TransformerSpec,
    lengths: Sequence[int],
    freeze: Collection[str] = (),
    num_target_tokens: int | None = None,
) -> float:
    """Return the FLOPs of forward and backward.

    lengths: tokens of each sub-sequence.
    num_target_tokens: tokens that carry loss; None: all do.
    freeze: modules that are not trained, as in ``config.frozen_modules``. A frozen backbone computes no weight
    gradients, but still passes gradients on to a trained connector or encoder. With all frozen there is no backward.
    Of a ``spec`` that says what is trained, that counts instead.
    """
    num_tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    num_head_tokens = num_tokens if num_target_tokens is None else num_target_tokens
    return float(_backbone_training(spec, num_tokens, squares, num_head_tokens, freeze))


def sample_flops(
    spec: ModelSpec,
    *,
    positions: IntArray,
    lengths: IntArray,
    vision_lengths: IntArray,
    target_lengths: IntArray,
    images: Mapping[str, tuple[IntArray, IntArray]],
    freeze: Collection[str] = FROZEN_ENCODERS,
) -> SampleFlops:
    """Return the training FLOPs of samples, given as columns int64 ``[S]``.

    lengths: tokens of the backbone sequence.
    vision_lengths: tokens among them that are feature rows of images.
    target_lengths: tokens among them that carry loss.
    images: by encoder, numbers of images and of patches of each sample. A sample's patches are split evenly over its
    images: exact if the images have one size, a lower bound otherwise.
    freeze: modules that are not trained, as in ``config.frozen_modules``.

    Raises KeyError for an encoder that ``spec`` does not have.
    """
    encoders = np.zeros(len(positions))
    for name, (num_images, num_patches) in images.items():
        encoders += _encoder_training(spec.encoders[name], num_images, num_patches, freeze)
    return SampleFlops(
        positions,
        encoders,
        _connector_training(spec.connector, vision_lengths, freeze),
        np.asarray(_backbone_training(spec.backbone, lengths, lengths.astype(np.float64) ** 2, target_lengths, freeze)),
    )


@dataclass(frozen=True, slots=True)
class BackbonePasses:
    """How often forward and backward compute operators, a forward being once; of layers, means over them."""

    matrices: float
    attention: float
    head: int


def backbone_passes(spec: TransformerSpec, freeze: Collection[str]) -> BackbonePasses:
    """Return the passes of a backbone; freeze: as in ``backbone_training_flops``."""
    passes, depth = _Passes.of(spec, freeze), spec.num_layers
    matrices = passes.matrices / (depth * spec.layer_matmul_parameters)
    return BackbonePasses(matrices, passes.attention / depth, passes.head)


def connector_passes(spec: ConnectorSpec, freeze: Collection[str]) -> tuple[int, int]:
    """Return how often forward and backward compute its first and its second linear layer.

    Features of frozen encoders are constants, so they get no gradient.
    """
    features_are_constant = "encoders" in freeze
    if "connector" in freeze or spec.trained == 0:
        return (1, 1) if features_are_constant else (2, 2)
    return (2 if features_are_constant else 3), 3


@dataclass(frozen=True, slots=True)
class _Passes:
    """How often forward and backward compute something, a forward being once; of layers, the sums over them."""

    matrices: int
    """Weights of the layers' matrix products, each as often as it takes part in one."""
    attention: int
    """Of the layers' attention, which has no weights."""
    head: int

    @classmethod
    def of(cls, spec: TransformerSpec, freeze: Collection[str]) -> _Passes:
        """freeze: as in ``backbone_training_flops``. A layer that gradients reach passes them on to its input."""
        trained, depth = spec.trained, spec.num_layers
        if trained is None:
            linear, attention = 2 + ("backbone" not in freeze), 3
            if {"backbone", "connector", "encoders"} <= set(freeze):
                linear = attention = 1
            return cls(depth * linear * spec.layer_matmul_parameters, depth * attention, linear)
        num_back = depth - trained.num_idle_layers
        head = trained.embedding if spec.tied_embeddings else trained.head
        gets_gradient = trained.reaches_layers or any(trained.layers) or trained.norm > 0
        matrices = (depth + num_back) * spec.layer_matmul_parameters + sum(trained.matrices)
        return cls(matrices, depth + 2 * num_back, 1 + gets_gradient + (head > 0))


def _backbone_training(
    spec: TransformerSpec, num_tokens: Any, squares: Any, num_head_tokens: Any, freeze: Collection[str]
) -> Any:
    """Training FLOPs of the backbone; the arguments are numbers, or arrays of one shape."""
    passes = _Passes.of(spec, freeze)
    linear = 2.0 * num_tokens * passes.matrices
    # Scores and weighted values: 2 products, 2 FLOPs each, over half of len x len.
    attention = 2.0 * passes.attention * spec.num_heads * spec.head_dim * squares
    return linear + attention + 2.0 * num_head_tokens * (passes.head * spec.head_parameters)


def _connector_training(spec: ConnectorSpec, num_rows: Any, freeze: Collection[str]) -> Any:
    first_passes, second_passes = connector_passes(spec, freeze)
    first, second = spec.feature_dim * spec.hidden_size, spec.levels * spec.hidden_size * spec.out_dim
    return 2.0 * num_rows * (first_passes * first + second_passes * second)


def images_tokens(spec: VisionSpec, num_images: IntArray, num_patches: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the tokens of samples' images in an encoder's layers, and the sums of each image's squared, ``[S]``."""
    each, more = np.divmod(num_patches, np.maximum(num_images, 1))
    tokens = (each + spec.num_prefix_tokens).astype(np.float64)
    squares = more * (tokens + 1) ** 2 + (num_images - more) * tokens**2
    return (num_patches + spec.num_prefix_tokens * num_images).astype(np.float64), squares


def _encoder_training(
    spec: VisionSpec, num_images: IntArray, num_patches: IntArray, freeze: Collection[str]
) -> FloatArray:
    patch_passes, layer_passes = (1, 1) if "encoders" in freeze else (2, 3)
    num_tokens, squares = images_tokens(spec, num_images, num_patches)
    layer = 2.0 * num_tokens * spec.layer_matmul_parameters + 4.0 * squares * spec.hidden_size
    outside = 2.0 * patch_passes * num_patches * spec.patch_matmul_parameters
    merging = 2.0 * num_patches / spec.patches_per_row * spec.merging_matmul_parameters
    return outside + merging + layer_passes * spec.num_layers * layer
