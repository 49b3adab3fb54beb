"""A vision tower, or some of its layers, from images to feature rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from flowtrain.errors import ConfigError
from flowtrain.models.activation_memory import applied
from flowtrain.models.attention_backends.base import Segments
from flowtrain.models.cpu_products import fast_products
from flowtrain.models.encoder_stage import EncoderShape, EncoderStage, ImageSize
from flowtrain.models.stage import LayerSlice, shallow_copy
from flowtrain.models.token_split import join_tokens, split_tokens
from flowtrain.models.tower_attention import IMPLEMENTATION
from flowtrain.models.tower_embedding import embed_in_rows
from flowtrain.models.towers import TOWERS, TowerKind, image_size, patch_grid
from flowtrain.pipeline.actions import StageMemory


@dataclass(frozen=True)
class TowerShape(EncoderShape):
    """What images become in a tower, known without its weights.

    drop_first: whether the leading (class) token is no feature row. shuffle: side, in patches, of the squares whose
    hidden states become one feature row (InternVL's pixel shuffle).
    """

    config: PreTrainedConfig
    drop_first: bool
    shuffle: int = 1

    @property
    def kind(self) -> TowerKind:
        """Facts about this type of tower."""
        return TOWERS[self.config.model_type]

    @property
    def width(self) -> int:
        """Width of hidden states."""
        return int(self.config.hidden_size)

    @property
    def feature_width(self) -> int:
        """Width of feature rows."""
        return self.width * self.shuffle**2

    def width_after(self, num_layers: int) -> int:
        """See ``EncoderShape``: that of hidden states."""
        return self.width

    def num_patches(self, size: ImageSize) -> int:
        """Return the patches of an image."""
        rows, columns = patch_grid(self.config, *size)
        return rows * columns

    def num_tokens(self, size: ImageSize) -> int:
        """Return the tokens of an image in the tower's layers."""
        return self.num_patches(size) + self.kind.num_prefix_tokens(self.config)

    def num_rows(self, size: ImageSize) -> int:
        """Return the feature rows of an image."""
        return (self.num_tokens(size) - self.drop_first) // self.shuffle**2


class VisionStage(EncoderStage):
    """The layers of an HF vision tower whose hidden state becomes the features, or a pipeline stage of them.

    The first stage has the embedding, the last one selects the features. What features do not need (later layers, outer
    norms, pooling heads) is left out. Parameters keep their names in HF's class, after ``tower.``.

    tower: it is not changed, except that its attention becomes ``tower_attention``. feature_layer: index into HF's
    ``hidden_states`` (0 is the embedding, negative from the end). drop_first: drop the leading (class) token, as HF
    Llava's ``vision_feature_select_strategy: default``. shuffle: as of ``TowerShape``; images are then square.
    trainable: else parameters require no gradients, and the stage is always in evaluation mode. Raises ConfigError for
    a trained tower that drops whole layers at random.
    """

    shape: TowerShape
    interpolates = False
    """Whether position encodings are interpolated to each image's size."""

    def __init__(
        self,
        tower: PreTrainedModel,
        *,
        feature_layer: int,
        drop_first: bool,
        shuffle: int = 1,
        trainable: bool = False,
    ) -> None:
        super().__init__()
        self.shape = TowerShape(tower.config, drop_first, shuffle)
        self.is_trained = trainable
        if trainable and getattr(tower.config, "drop_path_rate", None):
            raise ConfigError(
                f"{tower.config.model_type}: drop_path_rate ({tower.config.drop_path_rate:g}) would drop a layer for "
                "all images of a microbatch together; set it to 0 in the tower's configuration"
            )
        tower.set_attn_implementation(IMPLEMENTATION)
        kind = self.shape.kind
        layers = list(cast(nn.ModuleList, tower.get_submodule(kind.layers)))
        num_computed = feature_layer % (tower.config.num_hidden_layers + 1)
        self.tower = _trimmed(tower, kind, dict(enumerate(layers[:num_computed])))
        embed_in_rows(self.tower.get_submodule("embeddings"), is_trained=trainable)
        self.requires_grad_(trainable)
        self.train()

    def take(self, layers: range, *, is_first: bool, is_last: bool) -> Self:
        """Return the stage that holds these layers, sharing its modules."""
        stage = shallow_copy(self)
        numbered = {number: self.tower.get_submodule(f"{self.shape.kind.layers}.{number}") for number in layers}
        stage.tower = _trimmed(self.tower, self.shape.kind, numbered, with_embedding=is_first)
        stage.is_first, stage.is_last = is_first, is_last
        return stage

    @property
    def layers(self) -> list[nn.Module]:
        """Its layers in order."""
        return list(cast(nn.ModuleList, self.tower.get_submodule(self.shape.kind.layers)))

    def forward(
        self, inputs: Sequence[Tensor] | Tensor, sizes: Sequence[ImageSize], memory: StageMemory | None = None
    ) -> Tensor:
        """Run images of any sizes through the stage, all of them together; see ``EncoderStage``.

        The result depends on the images and their order alone.
        """
        given, run_sizes = (inputs, sizes) if sizes else self._blank(inputs)
        lengths = [self.shape.num_tokens(size) for size in run_sizes]
        hidden = self._run(self._embed(given) if self.is_first else cast(Tensor, given), Segments(lengths), memory)
        if not sizes:  # the blank image need not be one that pixel shuffle can join
            width = self.shape.feature_width if self.is_last else self.shape.width
            hidden = hidden[:0].repeat(1, width // self.shape.width)
        elif self.is_last:
            hidden = self._rows(hidden, lengths)
        return hidden.clone() if self.is_trained else hidden  # FSDP warns of views

    def _run(self, hidden: Tensor, segments: Segments, memory: StageMemory | None) -> Tensor:
        """Run the layers on tokens of all images, ``[T, D]``."""
        states, layers = hidden[None], self.layers
        mesh = self.token_mesh if layers else None
        takes_mask = self.shape.kind.takes_mask or mesh is not None
        if mesh is not None:
            states = split_tokens(states, mesh)
        elif not takes_mask:  # such a tower gets tiles of one size: a batch keeps them apart
            assert len(set(segments.lengths)) == 1, segments.lengths
            states = hidden.view(len(segments.lengths), -1, hidden.shape[-1])
        keeping = applied(memory, layers) if memory is not None and layers else nullcontext()
        products = nullcontext() if self.is_trained else fast_products(hidden)
        with keeping, products:
            for layer in layers:
                # The segments go where other attention has its mask.
                output = layer(states, segments) if takes_mask else layer(states)
                states = output[0] if isinstance(output, tuple) else output
        if takes_mask:
            assert segments.were_used or not layers, f"{self.shape.config.model_type}: its attention gets no mask"
        if mesh is not None:
            states = join_tokens(states, mesh, len(hidden))
        return states.flatten(0, 1)

    def _rows(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Feature rows of hidden states ``[T, D]``."""
        if self.shape.drop_first:
            hidden = torch.cat([tokens[1:] for tokens in hidden.split(list(lengths))])
        if self.shape.shuffle > 1:
            hidden = pixel_shuffle(hidden.view(len(lengths), -1, hidden.shape[-1]), self.shape.shuffle).flatten(0, 1)
        return hidden

    def _embed(self, images: Sequence[Tensor] | Tensor) -> Tensor:
        options = {"interpolate_pos_encoding": True} if self.interpolates else {}
        hidden: Tensor = self.tower.get_submodule("embeddings")(images, **options)
        norm = self.shape.kind.pre_norm
        return hidden if norm is None else cast(Tensor, self.tower.get_submodule(norm)(hidden))

    def _blank(self, inputs: Sequence[Tensor] | Tensor) -> tuple[Sequence[Tensor] | Tensor, list[ImageSize]]:
        """One image or its hidden states, all zeros, and its size; connected to ``inputs``, whose gradient is empty."""
        size = image_size(self.shape.config)
        if self.is_first:
            return [torch.zeros(self.shape.config.num_channels, *size)], [size]
        flat = cast(Tensor, inputs)
        return flat.new_zeros(self.shape.num_tokens(size), flat.shape[-1]) + flat.sum(), [size]


def pixel_shuffle(states: Tensor, factor: int) -> Tensor:
    """Join the hidden states of each square of ``factor`` x ``factor`` patches to one row, as HF's InternVL does.

    states: ``[B, n, D]`` of square images, line by line. Returns ``[B, n / factor**2, D * factor**2]``; a square's
    patches come line by line.
    """
    count, num_patches, width = states.shape
    side = math.isqrt(num_patches) // factor
    squares = states.reshape(count, side, factor, side, factor, width).transpose(2, 3)
    return squares.reshape(count, side * side, factor * factor * width)


def _trimmed(
    tower: PreTrainedModel, kind: TowerKind, layers: Mapping[int, nn.Module], *, with_embedding: bool = True
) -> PreTrainedModel:
    """A copy of a tower with only these layers and, if wanted, what comes before them."""
    twin = shallow_copy(tower)
    path, _, name = kind.layers.rpartition(".")
    root = kind.layers.partition(".")[0]
    kept = {root, *(("embeddings", kind.pre_norm) if with_embedding else ())}
    for child in twin._modules:
        if child not in kept:
            twin._modules[child] = None
    if path:
        setattr(twin, path, shallow_copy(twin.get_submodule(path)))
    twin.get_submodule(path)._modules[name] = LayerSlice(layers)
    if with_embedding:
        embeddings = shallow_copy(twin.get_submodule("embeddings"))
        for parameter in kind.unused:
            embeddings._parameters[parameter] = None
        twin._modules["embeddings"] = embeddings
    return twin
