"""Shapes of a model, enough to count its parameters and FLOPs, without weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

FROZEN_ENCODERS = ("encoders",)
"""The modules that are not trained if nothing is configured, as in ``config.frozen_modules``."""


@dataclass(frozen=True, slots=True)
class TrainedBackbone:
    """Numbers of a backbone's parameters that are trained, where ``model.freeze`` leaves some out."""

    layers: tuple[int, ...]
    """Of each decoder layer."""
    matrices: tuple[int, ...]
    """Of each decoder layer, those among them that a token is multiplied with."""
    embedding: int
    """Of the embedding; a head that shares its weight is counted there."""
    norm: int
    """Of the final norm."""
    head: int
    """Of a head with a weight of its own."""
    reaches_layers: bool
    """Whether the first layer's input gets a gradient: embedding, connector or encoder is trained."""

    @property
    def num_parameters(self) -> int:
        """All that are trained."""
        return sum(self.layers) + self.embedding + self.norm + self.head

    @property
    def num_idle_layers(self) -> int:
        """Leading layers through which no gradient passes; they keep nothing for a backward."""
        if self.reaches_layers:
            return 0
        return next((layer for layer, count in enumerate(self.layers) if count), len(self.layers))


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """A causal language model (pre-norm, RMSNorm, rotary positions)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    num_heads: int
    num_kv_heads: int
    """Below ``num_heads`` with grouped queries."""
    head_dim: int
    vocab_size: int
    gated_mlp: bool = True
    """Three matrices in the MLP instead of two."""
    tied_embeddings: bool = False
    """The head shares the embedding's weight."""
    qkv_bias: bool = False
    """Biases in the projections of queries, keys and values."""
    out_bias: bool = False
    """A bias in the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    qk_norm: bool = False
    """Queries and keys are normalised over ``head_dim``."""
    deepstack_layers: int = 0
    """The first layers, after which feature rows are added to the hidden states; they lie in the first stage."""
    trained: TrainedBackbone | None = None
    """What is trained of it; None: all, or what ``freeze`` says where that is asked too."""

    @property
    def first_layers(self) -> int:
        """The first layers that must lie in one pipeline stage."""
        return max(1, self.deepstack_layers)

    @property
    def most_stages(self) -> int:
        """The most pipeline stages into which the layers can be cut."""
        return self.num_layers - self.first_layers + 1

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return attention + (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, also if it shares them with the embedding."""
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

    @property
    def num_trained_parameters(self) -> int:
        """Those that are trained."""
        return self.num_parameters if self.trained is None else self.trained.num_parameters

    def trained_layers(self, layers: range) -> float:
        """Return how many of these decoder layers are trained, each counted by its share of trained parameters."""
        if self.trained is None:
            return float(len(layers))
        return sum(self.trained.layers[layers.start : layers.stop]) / self.layer_parameters

    def num_idle_layers(self, layers: range) -> int:
        """Return how many of these decoder layers no gradient passes."""
        return 0 if self.trained is None else max(0, min(layers.stop, self.trained.num_idle_layers) - layers.start)


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A vision transformer (pre-norm, full attention over one image).

    Its layers have biases everywhere; those of queries, keys and values only with ``qkv_bias``.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    num_heads: int
    patch_size: int
    """Side of a square patch, in pixels."""
    num_channels: int
    """Of an image."""
    num_prefix_tokens: int
    """Class and register tokens, computed with the patches of each image."""
    outside_parameters: int
    """Parameters of embeddings, outer norms and the pooling head, if the tower has one."""
    gated_mlp: bool = False
    """The MLP has two input branches, whose weights are one matrix (``weights_in``)."""
    qkv_bias: bool = True
    layer_scale: bool = False
    """A learned scale vector after each block."""
    unused_parameters: int = 0
    """Those of ``outside_parameters`` that features do not need: the norm after the layers, the pooling head."""
    quick_gelu: bool = False
    """GELU is approximated by x sigmoid(1.702 x), whose sigmoid is kept too."""
    rms_norm: bool = False
    """Layers have RMSNorm, computed in float32, instead of LayerNorm."""
    qk_norm: bool = False
    """Queries and keys are normalised over all heads, by an RMSNorm too."""
    fused_qkv: bool = False
    """Queries, keys and values are the result of one matrix, which ranks of a tensor parallel pipeline hold whole."""
    rotary: bool = False
    """Queries and keys are turned by their positions."""
    patches_per_row: int = 1
    """Patches whose hidden states side by side are one feature row."""
    levels: int = 1
    """Layers whose hidden states are in a feature row, side by side: the last, and those of deepstack."""
    merging_matmul_parameters: int = 0
    """Weights of a frozen connector that runs with the tower, with which a feature row is multiplied."""

    @property
    def fused_parameters(self) -> int:
        """Weights of a layer's one matrix of queries, keys and values; 0 if each has its own."""
        return 3 * self.hidden_size**2 if self.fused_qkv else 0

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
        norms = (2 if self.rms_norm else 4) * hidden + 2 * hidden * self.qk_norm
        attention_bias = hidden + 3 * hidden * self.qkv_bias
        mlp_bias = self.intermediate_size * (2 if self.gated_mlp else 1) + hidden
        return self.layer_matmul_parameters + norms + attention_bias + mlp_bias + 2 * hidden * self.layer_scale

    @property
    def num_parameters(self) -> int:
        """All parameters of the tower."""
        return self.outside_parameters + self.num_layers * self.layer_parameters

    @property
    def num_computed_parameters(self) -> int:
        """Parameters that features need, with ``num_layers`` counting only the layers that are computed."""
        return self.num_parameters - self.unused_parameters


@dataclass(frozen=True, slots=True)
class ConnectorSpec:
    """Two linear layers with an activation between them, or some such pairs side by side."""

    feature_dim: int
    """Width of a feature row."""
    hidden_size: int
    """Width between the two layers, of each pair."""
    out_dim: int
    """The backbone's hidden size."""
    bias: bool = True
    norm: bool = False
    """A LayerNorm before the two layers."""
    norm_parameters: int | None = None
    """Of all norms; None: as of one over the whole row."""
    levels: int = 1
    """Pairs of layers; each has an equal part of the row."""
    trained: int | None = None
    """Parameters that are trained; None: all."""

    @property
    def matmul_parameters(self) -> int:
        """Weights with which a feature row is multiplied."""
        return self.feature_dim * self.hidden_size + self.levels * self.hidden_size * self.out_dim

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        biases = self.levels * (self.hidden_size + self.out_dim) * self.bias
        norms = 2 * self.feature_dim if self.norm_parameters is None else self.norm_parameters
        return self.matmul_parameters + biases + norms * self.norm

    @property
    def num_trained_parameters(self) -> int:
        """Those that are trained."""
        return self.num_parameters if self.trained is None else self.trained


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole vision-language model."""

    encoders: dict[str, VisionSpec]
    """By the name in the configuration."""
    connector: ConnectorSpec
    backbone: TransformerSpec
    merged: ConnectorSpec | None = None
    """A frozen connector that runs with the encoder, which counts its weights; ``connector`` then only separates rows.
    None: the connector is in the backbone."""

    @property
    def num_parameters(self) -> int:
        """All parameters, frozen ones included."""
        encoders = sum(encoder.num_parameters for encoder in self.encoders.values())
        return encoders + self.connector.num_parameters + self.backbone.num_parameters

    @property
    def trained_share(self) -> float:
        """Share of the parameters of connector and backbone that are trained."""
        every, trained = self.connector.num_parameters, self.connector.num_trained_parameters
        return (trained + self.backbone.num_trained_parameters) / (every + self.backbone.num_parameters)

    def with_merging_encoder(self) -> ModelSpec:
        """Return the same model with its connector, a frozen one, beside its only encoder."""
        connector, (name, vision) = self.connector, *self.encoders.items()
        vision = replace(
            vision,
            outside_parameters=vision.outside_parameters + connector.num_parameters,
            merging_matmul_parameters=connector.matmul_parameters,
        )
        rows = ConnectorSpec(connector.levels * connector.out_dim, 0, 0, bias=False)
        return replace(self, encoders={name: vision}, connector=rows, merged=connector)

    def shapes(self) -> dict[str, Any]:
        """Return the shapes as nested plain values, without what is trained; the same wherever the connector runs."""
        values = asdict(self)
        if self.merged is not None:
            values["connector"] = asdict(self.merged)
            (vision,) = values["encoders"].values()
            vision["outside_parameters"] -= self.merged.num_parameters
            vision["merging_matmul_parameters"] = 0
        del values["merged"]
        for part in ("backbone", "connector"):
            del values[part]["trained"]
        return values

    def num_trainable_parameters(self, freeze: Collection[str]) -> int:
        """Parameters that are trained. freeze: modules that are not, as in ``config.frozen_modules``."""
        encoders = sum(encoder.num_computed_parameters for encoder in self.encoders.values())
        backbone, connector = self.backbone.num_trained_parameters, self.connector.num_trained_parameters
        modules = {"encoders": encoders, "connector": connector, "backbone": backbone}
        return sum(count for name, count in modules.items() if name not in freeze)
