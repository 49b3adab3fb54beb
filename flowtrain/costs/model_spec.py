"""Shapes of a model, enough to count its parameters and FLOPs; no weights, no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """A causal language model (pre-norm, RMSNorm, rotary positions).

    num_kv_heads: below ``num_heads`` with grouped queries. gated_mlp: three matrices instead of two. tied_embeddings:
    the head shares the embedding's weight. qk_norm: queries and keys are normalised over ``head_dim``.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return attention + (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, also where it shares them with the embedding."""
        return self.hidden_size * self.vocab_size

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        total = self.layer_matmul_parameters + 2 * self.hidden_size
        total += (queries + 2 * keys) * self.qkv_bias + self.hidden_size * self.out_bias
        total += (self.intermediate_size * (2 if self.gated_mlp else 1) + self.hidden_size) * self.mlp_bias
        return total + 2 * self.head_dim * self.qk_norm

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        embeddings = self.head_parameters * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A vision transformer (pre-norm, LayerNorm, full attention over one image, biases everywhere in its layers).

    patch_size: side of a square patch in pixels. num_prefix_tokens: class token and the like, computed beside the
    patches. gated_mlp: the two branches are one matrix (``weights_in``). layer_scale: a vector after each block.
    outside_parameters: those of embeddings, outer norms and, where the tower has one, its pooling head.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    num_channels: int
    num_prefix_tokens: int
    outside_parameters: int
    gated_mlp: bool = False
    qkv_bias: bool = True
    layer_scale: bool = False

    @property
    def patch_matmul_parameters(self) -> int:
        """Weights of the patch embedding."""
        return self.num_channels * self.patch_size**2 * self.hidden_size

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        return 4 * self.hidden_size**2 + mlp

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        hidden = self.hidden_size
        norms = 4 * hidden
        attention_bias = hidden + 3 * hidden * self.qkv_bias
        mlp_bias = self.intermediate_size * (2 if self.gated_mlp else 1) + hidden
        return self.layer_matmul_parameters + norms + attention_bias + mlp_bias + 2 * hidden * self.layer_scale

    @property
    def num_parameters(self) -> int:
        """All parameters of the tower."""
        return self.outside_parameters + self.num_layers * self.layer_parameters


@dataclass(frozen=True, slots=True)
class ConnectorSpec:
    """Two linear layers with an activation between: feature width -> hidden width -> backbone width."""

    feature_dim: int
    hidden_size: int
    out_dim: int
    bias: bool = True

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        weights = self.feature_dim * self.hidden_size + self.hidden_size * self.out_dim
        return weights + (self.hidden_size + self.out_dim) * self.bias


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole vision-language model; ``encoders`` by the name that the configuration gives them."""

    encoders: dict[str, VisionSpec]
    connector: ConnectorSpec
    backbone: TransformerSpec

    @property
    def num_parameters(self) -> int:
        """All parameters, frozen ones included."""
        encoders = sum(encoder.num_parameters for encoder in self.encoders.values())
        return encoders + self.connector.num_parameters + self.backbone.num_parameters

    def num_trainable_parameters(self, freeze: Collection[str]) -> int:
        """Parameters that are trained. freeze: as in ``model.freeze``; encoders are always frozen."""
        modules = {"connector": self.connector.num_parameters, "backbone": self.backbone.num_parameters}
        return sum(count for name, count in modules.items() if name not in freeze)
