"""A vision tower, or some of its layers, from images to feature rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from flowtrain.models.activation_memory import applied
from flowtrain.models.stage import LayerSlice, shallow_copy
from flowtrain.models.towers import TOWERS, TowerKind, image_size, patch_grid
from flowtrain.pipeline.actions import StageMemory

ImageSize = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class TowerShape:
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


class VisionStage(nn.Module):
    """The layers of an HF vision tower whose hidden state becomes the features, or a pipeline stage of them.

    The first stage has the embedding, the last one selects the features. What features do not need (later layers, outer
    norms, pooling heads) is left out. Parameters keep their names in HF's class, after ``tower.``.

    tower: it is not changed, except that its layers take lists of tensors. feature_layer: index into HF's
    ``hidden_states`` (0 is the embedding, negative from the end). drop_first: drop the leading (class) token, as HF
    Llava's ``vision_feature_select_strategy: default``. shuffle: as of ``TowerShape``; images are then square.
    trainable: else parameters require no gradients, and the stage is always in evaluation mode.
    """

    interpolates = False
    """Whether position encodings are interpolated to each image's size."""
    is_first = True
    """Whether images enter here."""
    is_last = True
    """Whether features come out here."""

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
        kind = self.shape.kind
        layers = list(cast(nn.ModuleList, tower.get_submodule(kind.layers)))
        num_computed = feature_layer % (tower.config.num_hidden_layers + 1)
        self.tower = _trimmed(tower, kind, dict(enumerate(layers[:num_computed])))
        for layer in self.layers:
            layer.__class__ = _over_groups(type(layer), kind.takes_mask)  # type: ignore[arg-type]  # "unhashable"
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

    def train(self, mode: bool = True) -> Self:
        """See ``nn.Module``; a frozen stage stays in evaluation mode."""
        return super().train(mode and self.is_trained)

    def forward(
        self, inputs: Sequence[Tensor] | Tensor, sizes: Sequence[ImageSize], memory: StageMemory | None = None
    ) -> Tensor:
        """Run images through the stage.

        inputs: of the first stage the images, ``[C, H, W]`` each, in any float type; else what the stage before
        returned. sizes: of all images. memory: what layers keep for the backward pass.

        Returns hidden states ``[tokens of all images, D]``, the last stage feature rows ``[rows of all images, width of
        a row]``.
        Images of one size are forwarded together, in the order in which the sizes first occur, so results depend on the
        images alone. Each layer is called once, so that ranks with other images have the same collectives; without
        images it runs a blank one, whose rows are left out.
        """
        groups: dict[ImageSize, list[int]] = {}
        for index, size in enumerate(sizes):
            groups.setdefault(size, []).append(index)
        batches = self._batches(inputs, sizes, groups) if sizes else [self._blank(inputs)]
        states = self.run(batches, memory)
        if len(states) == 1:
            flat = states[0].flatten(0, 1) if sizes else states[0].flatten(0, 1)[:0]
            return flat.clone() if self.is_trained else flat  # FSDP warns of views
        of_images: dict[int, Tensor] = {}
        for indices, state in zip(groups.values(), states, strict=True):
            of_images |= zip(indices, state, strict=True)
        return torch.cat([of_images[index] for index in range(len(sizes))])

    def run(self, batches: Sequence[Tensor], memory: StageMemory | None = None) -> list[Tensor]:
        """Run images of one size a batch: ``[B, C, H, W]``, or hidden states ``[B, tokens, D]`` of the stage before.

        Returns ``[B, tokens, D]`` for each batch, the last stage ``[B, rows, width of a row]``.
        """
        states, layers = [self._embed(batch) for batch in batches] if self.is_first else list(batches), self.layers
        with applied(memory, layers) if memory is not None and layers else nullcontext():
            for layer in layers:
                states = layer(states)
        return [self._rows(state) for state in states] if self.is_last else states

    def _rows(self, states: Tensor) -> Tensor:
        """Feature rows of hidden states ``[B, tokens, D]``."""
        if self.shape.drop_first:
            states = states[:, 1:]
        if self.shape.shuffle > 1:
            states = pixel_shuffle(states, self.shape.shuffle)
        return states

    def _embed(self, images: Tensor) -> Tensor:
        embeddings = self.tower.get_submodule("embeddings")
        # FSDP has the parameters in the compute type while the stage runs.
        weight = next(module.weight for module in embeddings.modules() if isinstance(module, nn.Conv2d))
        options = {"interpolate_pos_encoding": True} if self.interpolates else {}
        hidden: Tensor = embeddings(images.to(weight.device, weight.dtype), **options)
        norm = self.shape.kind.pre_norm
        return hidden if norm is None else cast(Tensor, self.tower.get_submodule(norm)(hidden))

    def _batches(
        self, inputs: Sequence[Tensor] | Tensor, sizes: Sequence[ImageSize], groups: Mapping[ImageSize, list[int]]
    ) -> list[Tensor]:
        if self.is_first:
            return [torch.stack([inputs[index] for index in indices]) for indices in groups.values()]
        flat = cast(Tensor, inputs)
        if len(groups) == 1:
            return [flat.view(len(sizes), -1, flat.shape[-1])]
        pieces = flat.split([self.shape.num_tokens(size) for size in sizes])
        return [torch.stack([pieces[index] for index in indices]) for indices in groups.values()]

    def _blank(self, inputs: Sequence[Tensor] | Tensor) -> Tensor:
        """One image or its hidden states, all zeros; connected to ``inputs``, which then gets an empty gradient."""
        size = image_size(self.shape.config)
        if self.is_first:
            return torch.zeros(1, self.shape.config.num_channels, *size)
        flat = cast(Tensor, inputs)
        return flat.new_zeros(1, self.shape.num_tokens(size), flat.shape[-1]) + flat.sum()


def pixel_shuffle(states: Tensor, factor: int) -> Tensor:
    """Join the hidden states of each square of ``factor`` x ``factor`` patches to one row, as HF's InternVL does.

    states: ``[B, n, D]`` of square images, line by line. Returns ``[B, n / factor**2, D * factor**2]``; a square has its
    patches line by line.
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


@cache  # FSDP keeps every class that it has wrapped
def _over_groups(layer_class: type[nn.Module], takes_mask: bool) -> type[nn.Module]:
    """Derive a layer class that takes and returns a list of hidden states, ``[B, tokens, D]`` each."""
    no_mask = (None,) if takes_mask else ()

    class OverGroups(layer_class):  # type: ignore[misc, valid-type]
        def forward(self, states: Sequence[Tensor], *args: Any) -> list[Tensor]:
            outputs = [super(OverGroups, self).forward(state, *no_mask) for state in states]
            return [output[0] if isinstance(output, tuple) else output for output in outputs]

    OverGroups.__name__ = layer_class.__name__
    return OverGroups
