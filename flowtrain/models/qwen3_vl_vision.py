"""Qwen3-VL's vision tower, or some of its layers, from images of any sizes to feature rows.

Patches of all images are one row of tokens, in the order of HF's processor: the patches of a merge unit, a square of
``merge ** 2``, are neighbours. A feature row is one unit, and becomes one token of the language model: the unit's
hidden states after the last layer, and after each deepstack layer, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from flowtrain.models.activation_memory import applied
from flowtrain.models.attention_backends.base import Segments
from flowtrain.models.cpu_products import fast_products
from flowtrain.models.encoder_stage import EncoderShape, EncoderStage, ImageSize
from flowtrain.models.parallel_layers import local_shard
from flowtrain.models.qwen3_vl_config import deepstack_layers
from flowtrain.models.stage import LayerSlice, shallow_copy
from flowtrain.models.token_split import join_tokens, split_tokens
from flowtrain.models.tower_attention import packed_bidirectional
from flowtrain.pipeline.actions import StageMemory


@dataclass(frozen=True)
class Qwen3VisionShape(EncoderShape):
    """What images become in the tower. Sides are multiples of ``patch_size * spatial_merge_size`` pixels.

    merged_width: width of a merged level, if a frozen connector runs with the tower; None: rows are not merged.
    """

    config: PreTrainedConfig
    merged_width: int | None = None

    @property
    def num_levels(self) -> int:
        """Hidden states that become features: of the deepstack layers, and of the last one."""
        return 1 + len(deepstack_layers(self.config))

    @property
    def unit(self) -> int:
        """Patches of a merge unit."""
        return int(self.config.spatial_merge_size**2)

    @property
    def feature_width(self) -> int:
        """See ``EncoderShape``."""
        return self.num_levels * (self.merged_width or self.unit * int(self.config.hidden_size))

    def width_after(self, num_layers: int) -> int:
        """See ``EncoderShape``: hidden states, and those of the deepstack layers so far beside them."""
        done = sum(layer < num_layers for layer in deepstack_layers(self.config))
        return (1 + done) * int(self.config.hidden_size)

    def grid(self, size: ImageSize) -> tuple[int, int]:
        """Return the rows and columns of patches of an image."""
        return size[0] // self.config.patch_size, size[1] // self.config.patch_size

    def num_patches(self, size: ImageSize) -> int:
        """See ``EncoderShape``."""
        rows, columns = self.grid(size)
        return rows * columns

    def num_tokens(self, size: ImageSize) -> int:
        """See ``EncoderShape``."""
        return self.num_patches(size)

    def num_rows(self, size: ImageSize) -> int:
        """See ``EncoderShape``."""
        return self.num_patches(size) // self.unit


class Qwen3VisionStage(EncoderStage):
    """The layers of HF's ``Qwen3VLVisionModel``, or a pipeline stage of them; without its mergers.

    tower: it is not changed, except that its attention takes all images at once. trainable: else parameters require no
    gradients.
    """

    shape: Qwen3VisionShape

    def __init__(self, tower: PreTrainedModel, *, trainable: bool = False) -> None:
        super().__init__()
        self.shape = Qwen3VisionShape(tower.config)
        self.is_trained = trainable
        blocks = cast(nn.ModuleList, tower.get_submodule("blocks"))
        for block in blocks:
            attention = block.get_submodule("attn")
            attention.__class__ = _packed(type(attention))  # type: ignore[arg-type]  # "unhashable"
        self.tower = _trimmed(tower, dict(enumerate(blocks)))
        self.requires_grad_(trainable)
        self.train()

    def take(self, layers: range, *, is_first: bool, is_last: bool) -> Self:
        """See ``EncoderStage``."""
        stage = shallow_copy(self)
        numbered = {number: self.tower.get_submodule(f"blocks.{number}") for number in layers}
        stage.tower = _trimmed(self.tower, numbered, with_embedding=is_first)
        stage.is_first, stage.is_last = is_first, is_last
        return stage

    @property
    def layers(self) -> list[nn.Module]:
        """See ``EncoderStage``."""
        return list(cast(nn.ModuleList, self.tower.get_submodule("blocks")))

    def forward(
        self, inputs: Sequence[Tensor] | Tensor, sizes: Sequence[ImageSize], memory: StageMemory | None = None
    ) -> Tensor:
        """See ``EncoderStage``. Between stages, those of the deepstack layers so far follow the hidden states."""
        given, run_sizes = (inputs, sizes) if sizes else self._blank(inputs)
        grids = [self.shape.grid(size) for size in run_sizes]
        if self.is_first:
            hidden, levels = self._embed(cast(Sequence[Tensor], given), grids), []
        else:
            hidden, *levels = cast(Tensor, given).split(int(self.shape.config.hidden_size), dim=1)
        hidden, levels = self._run(hidden, levels, grids, memory)
        if self.is_last:
            levels = [level.reshape(-1, self.shape.unit * level.shape[1]) for level in (hidden, *levels)]
        else:
            levels = [hidden, *levels]
        output = torch.cat(levels, dim=1) if len(levels) > 1 else levels[0]
        if not sizes:
            output = output[:0]
        return output.clone() if self.is_trained else output  # FSDP warns of views

    def _run(
        self, hidden: Tensor, levels: list[Tensor], grids: Sequence[tuple[int, int]], memory: StageMemory | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers on the patches of all images, ``[P, D]``; appends what deepstack layers return."""
        found: list[Tensor] = []
        blocks, layers = cast(nn.ModuleList, self.tower.get_submodule("blocks")), self.layers
        segments = Segments([rows * columns for rows, columns in grids])
        angles, taken = _angles(self.shape.config, grids, hidden.device), deepstack_layers(self.shape.config)
        turns = angles.cos(), angles.sin()
        keeping = applied(memory, layers) if memory is not None and layers else nullcontext()
        products = nullcontext() if self.is_trained else fast_products(hidden)
        mesh, num_tokens = self.token_mesh if layers else None, len(hidden)
        if mesh is not None:
            hidden = split_tokens(hidden, mesh)
        with keeping, products:
            for number, layer in zip(map(int, blocks._modules), layers, strict=True):
                hidden = layer(hidden, None, position_embeddings=turns, segments=segments)
                if number in taken:
                    found.append(hidden)
        if mesh is not None:
            joined = join_tokens(torch.cat([hidden, *found], dim=1), mesh, num_tokens)
            hidden, *found = joined.split(hidden.shape[1], dim=1)
        return hidden, [*levels, *found]

    def _embed(self, images: Sequence[Tensor], grids: Sequence[tuple[int, int]]) -> Tensor:
        """Embed the patches of images, ``[C, H, W]`` each, on any device, in any type: ``[P, D]``."""
        config = self.shape.config
        conv = self.tower.get_submodule("patch_embed.proj")
        weight, bias = (local_shard(conv.get_parameter(name)) for name in ("weight", "bias"))
        patches = [
            _patches(image.to(weight.device, weight.dtype), config.patch_size, config.spatial_merge_size)
            for image in images
        ]
        # An image is a clip of equal frames.
        pixels = torch.cat(patches).unflatten(1, (config.in_channels, 1, -1))
        pixels = pixels.expand(-1, -1, config.temporal_patch_size, -1).flatten(1)
        embedded = nn.functional.linear(pixels, weight.flatten(1), bias)
        return embedded + self._positions(grids, weight.device).to(embedded.dtype)

    def _positions(self, grids: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Position embeddings of all patches, interpolated from the tower's square grid; ``[P, D]``."""
        config = self.shape.config
        side = int(config.num_position_embeddings**0.5)
        found = [_neighbours(*grid, config.spatial_merge_size, side) for grid in grids]
        indices, shares = (torch.cat(each).to(device, non_blocking=True) for each in zip(*found, strict=True))
        embeddings: Tensor = self.tower.get_submodule("pos_embed")(indices)
        return (embeddings * shares[..., None]).sum(1)

    def _blank(self, inputs: Sequence[Tensor] | Tensor) -> tuple[Sequence[Tensor] | Tensor, list[ImageSize]]:
        """One merge unit or its hidden states, all zeros, and its size; connected to ``inputs``."""
        config = self.shape.config
        side = config.patch_size * config.spatial_merge_size
        if self.is_first:
            return [torch.zeros(config.in_channels, side, side)], [(side, side)]
        flat = cast(Tensor, inputs)
        return flat.new_zeros(self.shape.unit, flat.shape[-1]) + flat.sum(), [(side, side)]


def _trimmed(
    tower: PreTrainedModel, layers: Mapping[int, nn.Module], *, with_embedding: bool = True
) -> PreTrainedModel:
    """A copy of a tower with only these layers and, if wanted, what comes before them."""
    twin = shallow_copy(tower)
    kept = {"patch_embed", "pos_embed"} if with_embedding else set()
    for child in twin._modules:
        if child not in kept:
            twin._modules[child] = None
    twin._modules["blocks"] = LayerSlice(layers)
    return twin


@cache  # FSDP keeps every class that it has wrapped
def _packed(attention_class: type[nn.Module]) -> type[nn.Module]:
    """Derive an attention class that takes the patches of all images at once."""

    class PackedAttention(attention_class):  # type: ignore[misc, valid-type]
        def forward(
            self,
            hidden_states: Tensor,
            *args: Any,
            position_embeddings: tuple[Tensor, Tensor],
            segments: Segments,
            **kwargs: Any,
        ) -> Tensor:
            num_tokens = len(hidden_states)
            states: Tensor = self.qkv(hidden_states).view(num_tokens, 3, self.num_heads, -1)
            query, key, value = states.permute(1, 2, 0, 3)  # [heads, T, head width] each
            query, key = (_turned(each, *position_embeddings) for each in (query, key))
            output = packed_bidirectional(query[None], key[None], value[None], segments, scaling=self.scaling)
            attended: Tensor = self.proj(output.reshape(num_tokens, -1))
            return attended

    PackedAttention.__name__ = attention_class.__name__
    return PackedAttention


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on ``[heads, T, width]``, in float32."""
    exact = states.float()
    first, second = exact.chunk(2, dim=-1)
    return (exact * cos + torch.cat([-second, first], dim=-1) * sin).to(states.dtype)


def _patches(image: Tensor, patch: int, merge: int) -> Tensor:
    """The patches of an image ``[C, H, W]`` in the order of merge units: ``[P, C * patch ** 2]``."""
    cut = image.unflatten(2, (-1, merge, patch)).unflatten(1, (-1, merge, patch))
    return cut.permute(1, 4, 2, 5, 0, 3, 6).flatten(4).flatten(0, 3)


def _angles(config: PreTrainedConfig, grids: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Rotary angles of all patches, float32 ``[P, head width]``: rows and columns have a half each."""
    width = config.hidden_size // config.num_attention_heads // 2
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** steps)
    places = torch.cat([_places(*grid, config.spatial_merge_size) for grid in grids]).to(device, non_blocking=True)
    angles = (places[..., None].float() * frequencies).flatten(1)
    return torch.cat([angles, angles], dim=1)


@lru_cache(maxsize=256)
def _places(rows: int, columns: int, merge: int) -> Tensor:
    """Row and column of each patch in the order of merge units: int64 ``[P, 2]``."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    return grid.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


@lru_cache(maxsize=64)
def _neighbours(rows: int, columns: int, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The four places of a square grid around each patch, int64 ``[P, 4]``, and their shares, float32 ``[P, 4]``.

    Bilinear, with the corners of both grids on each other.
    """
    taps, shares = [], []
    for count, place in zip((rows, columns), _places(rows, columns, merge).unbind(1), strict=True):
        at = place.float() * (side - 1) / max(count - 1, 1)
        before = at.floor()
        taps.append(torch.stack([before, before + 1], dim=1).long().clamp(max=side - 1))
        shares.append(torch.stack([1 - (at - before), at - before], dim=1))
    indices = taps[0][:, :, None] * side + taps[1][:, None, :]
    return indices.flatten(1), (shares[0][:, :, None] * shares[1][:, None, :]).flatten(1)
