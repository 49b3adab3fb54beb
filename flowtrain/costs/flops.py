"""Model FLOPs of training, from actual lengths.

Conventions. A multiply-add is two FLOPs; only matrix products count (no norms, softmax, activations, embeddings).
Causal attention counts what a kernel that skips the upper triangle computes: ``len ** 2 / 2`` query-key pairs per
sub-sequence, summed over the sub-sequences of a packed microbatch. The head is computed over all tokens, whether they
carry loss or not. Backward costs twice the forward where weights and inputs need gradients, once where only one of them
does. Recomputation (activation checkpointing) is overhead, not model FLOPs, and padding does not exist. Encoders are
frozen: forward only, full attention inside one image, without a tower's pooling head (features are taken before it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec, TransformerSpec, VisionSpec
from flowtrain.types import SizedSample


@dataclass(frozen=True, slots=True)
class Flops:
    """Model FLOPs by module."""

    encoders: float
    connector: float
    backbone: float

    @property
    def total(self) -> float:
        """FLOPs over all modules."""
        return self.encoders + self.connector + self.backbone


def backbone_forward_flops(spec: TransformerSpec, lengths: Sequence[int]) -> float:
    """Return the FLOPs of one forward pass, head included; lengths: tokens of each sub-sequence."""
    return _backbone_linear(spec, sum(lengths)) + _causal_attention(spec, lengths)


def backbone_training_flops(spec: TransformerSpec, lengths: Sequence[int], freeze: Collection[str] = ()) -> float:
    """Return the FLOPs of forward and backward; freeze: modules that are not trained, as in ``model.freeze``.

    A frozen backbone still carries gradients down to a trained connector: no weight gradients then. With both frozen
    there is no backward.
    """
    if {"backbone", "connector"} <= set(freeze):
        return backbone_forward_flops(spec, lengths)
    linear_passes = 2 if "backbone" in freeze else 3
    return linear_passes * _backbone_linear(spec, sum(lengths)) + 3 * _causal_attention(spec, lengths)


def connector_forward_flops(spec: ConnectorSpec, num_rows: int) -> float:
    """Return the FLOPs of one forward pass over ``num_rows`` feature rows."""
    return 2.0 * num_rows * (spec.feature_dim * spec.hidden_size + spec.hidden_size * spec.out_dim)


def connector_training_flops(spec: ConnectorSpec, num_rows: int, freeze: Collection[str] = ()) -> float:
    """Return the FLOPs of forward and backward over ``num_rows`` feature rows.

    The features are constants, so the first layer has no input gradient; a frozen connector has no backward at all.
    """
    if "connector" in freeze:
        return connector_forward_flops(spec, num_rows)
    return 2.0 * num_rows * (2 * spec.feature_dim * spec.hidden_size + 3 * spec.hidden_size * spec.out_dim)


def encoder_forward_flops(spec: VisionSpec, image_patches: Sequence[int]) -> float:
    """Return the FLOPs of one tower over images of the given numbers of patches."""
    total = 0.0
    for num_patches in image_patches:
        num_tokens = num_patches + spec.num_prefix_tokens
        layer = 2.0 * num_tokens * spec.layer_matmul_parameters + 4.0 * num_tokens**2 * spec.hidden_size
        total += 2.0 * num_patches * spec.patch_matmul_parameters + spec.num_layers * layer
    return total


def unit_flops(spec: ModelSpec, samples: Sequence[SizedSample], freeze: Collection[str] = ()) -> Flops:
    """Return the training FLOPs of samples by module.

    A part knows its patches as a sum over images; they are split evenly, which is exact where a sample's images are of
    one size and a lower bound otherwise. Parts of encoders that ``spec`` lacks raise KeyError.
    """
    parts = Counter([(part.name, part.num_patches, part.num_items) for sample in samples for part in sample.parts])
    num_rows = sum([part.num_rows for sample in samples for part in sample.parts if part.num_patches])
    encoders = 0.0
    for (name, num_patches, num_items), count in parts.items():
        if num_patches:
            encoders += count * encoder_forward_flops(spec.encoders[name], _even_split(num_patches, num_items))
    return Flops(
        encoders=encoders,
        connector=connector_training_flops(spec.connector, num_rows, freeze),
        backbone=backbone_training_flops(spec.backbone, [sample.num_tokens for sample in samples], freeze),
    )


def _backbone_linear(spec: TransformerSpec, num_tokens: int) -> float:
    return 2.0 * num_tokens * (spec.num_layers * spec.layer_matmul_parameters + spec.head_parameters)


def _causal_attention(spec: TransformerSpec, lengths: Sequence[int]) -> float:
    # Scores and weighted values: 2 products, 2 FLOPs each, over half of len x len.
    return 2.0 * spec.num_layers * spec.num_heads * spec.head_dim * sum(length**2 for length in lengths)


def _even_split(num_patches: int, num_items: int) -> list[int]:
    each, more = divmod(num_patches, num_items)
    return [each + 1] * more + [each] * (num_items - more)
