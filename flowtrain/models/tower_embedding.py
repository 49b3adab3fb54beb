"""The embedding of a vision tower over images of any sizes, as one row of tokens.

An embedding is a convolution whose patches do not overlap, so patches of all images are one matrix product. What it
adds to them depends on the image's size alone: prefix tokens (class token, registers) and position encodings, here the
size's frame. HF's own forward gives it, from patches that are zeros, so no type of tower needs code of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowtrain.models.stage import shallow_copy

FRAMES_NBYTES = 64 << 20
"""What a frozen embedding keeps of frames."""


class FrameCache:
    """The frames of a frozen embedding that were used last, up to ``limit_nbytes`` together."""

    def __init__(self, limit_nbytes: int = FRAMES_NBYTES) -> None:
        self._limit_nbytes = limit_nbytes
        self._frames: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._nbytes = 0

    def get(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return the frame of a key, computed if it is not here."""
        frame = self._frames.pop(key, None)
        if frame is None:
            frame = compute()
            self._nbytes += frame.nbytes
        self._frames[key] = frame
        while self._nbytes > self._limit_nbytes:
            self._nbytes -= self._frames.popitem(last=False)[1].nbytes
        return frame


def embed_in_rows(embedding: nn.Module, *, is_trained: bool) -> None:
    """Let a tower's embedding take images of any sizes, in place: ``[C, H, W]`` each, on any device, in any type.

    Its forward then returns the tokens of all images back to back, ``[T, D]``; keyword arguments go to HF's forward.
    is_trained: its parameters change, so no frame is kept.
    """
    embedding.__class__ = _in_rows(type(embedding))  # type: ignore[arg-type]  # mypy takes a class for unhashable
    embedding.__dict__["frames"] = None if is_trained else FrameCache()


@cache  # one class for each of HF's
def _in_rows(embedding_class: type[nn.Module]) -> type[nn.Module]:
    class InRows(embedding_class):  # type: ignore[misc, valid-type]
        frames: FrameCache | None

        def forward(self, images: Sequence[Tensor], **options: Any) -> Tensor:
            conv = _convolution(self)
            sizes = [(image.shape[1], image.shape[2]) for image in images]
            if len(set(sizes)) == 1 and not _fails(conv, sizes[0]):  # HF's own forward gives the plain model's bits
                batch = torch.stack(list(images)).to(conv.weight.device, conv.weight.dtype)
                return cast(Tensor, super().forward(batch, **options)).flatten(0, 1)
            frames: dict[tuple[int, int], Tensor] = {}
            for size in dict.fromkeys(sizes):
                compute = partial(_frame, self, partial(embedding_class.forward, **options), size)
                key = size, tuple(options.items()), conv.weight.device, conv.weight.dtype
                frames[size] = compute() if self.frames is None else self.frames.get(key, compute)
            tokens: list[Tensor] = []
            for size, patches in zip(sizes, _embedded_patches(images, conv), strict=True):
                num_prefix = len(frames[size]) - len(patches)
                tokens += [frames[size][:num_prefix], patches + frames[size][num_prefix:]]
            row = torch.cat(tokens)
            return cast(Tensor, self.dropout(row)) if "dropout" in self._modules else row

    InRows.__name__ = embedding_class.__name__
    return InRows


def _convolution(embedding: nn.Module) -> nn.Conv2d:
    return next(module for module in embedding.modules() if isinstance(module, nn.Conv2d))


def _fails(conv: nn.Conv2d, size: tuple[int, int]) -> bool:
    """Whether torch may get images of this size wrong: in bfloat16 on a CPU, one patch wide.

    On CPUs with AMX the convolution of torch 2.13 returns what was in memory if they are five patches high or more.
    """
    is_half = conv.weight.device.type == "cpu" and conv.weight.dtype == torch.bfloat16
    return is_half and size[1] // conv.kernel_size[1] == 1


def _embedded_patches(images: Sequence[Tensor], conv: nn.Conv2d) -> tuple[Tensor, ...]:
    """Each image's patches after the convolution, ``[patches, D]``, row by row of the image."""
    weight, (height, width) = conv.weight, conv.kernel_size
    grids = [(image.shape[1] // height, image.shape[2] // width) for image in images]
    counts = [rows * columns for rows, columns in grids]
    pixels = torch.empty(sum(counts), weight[0].numel(), dtype=weight.dtype, device=weight.device)
    for image, (rows, columns), patches in zip(images, grids, pixels.split(counts), strict=True):
        whole = image[:, : rows * height, : columns * width].to(weight.device)
        cut = whole.unflatten(2, (columns, width)).unflatten(1, (rows, height))  # [C, rows, height, columns, width]
        patches.view(rows, columns, -1, height, width).copy_(cut.permute(1, 3, 0, 2, 4))
    return nn.functional.linear(pixels, weight.flatten(1), conv.bias).split(counts)


def _frame(embedding: nn.Module, forward: Callable[..., Tensor], size: tuple[int, int]) -> Tensor:
    """What an embedding adds to the patches of an image, after its prefix tokens: ``[tokens, D]``.

    forward: of HF's class. size: height and width in pixels.
    """
    twin, conv = shallow_copy(embedding), _convolution(embedding)
    holder: nn.Module = twin
    *path, name = next(name for name, module in embedding.named_modules() if module is conv).split(".")
    for child in path:
        holder._modules[child] = shallow_copy(holder.get_submodule(child))
        holder = holder.get_submodule(child)
    holder._modules[name] = _ZeroPatches(conv)
    if "dropout" in twin._modules:  # it is for the sum with the patches
        twin._modules["dropout"] = nn.Identity()
    return forward(twin, conv.weight.new_zeros(()).expand(1, conv.in_channels, *size))[0]


class _ZeroPatches(nn.Module):
    """In the place of a convolution: all patches come out as zeros."""

    weight: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.__dict__["weight"] = conv.weight  # no parameter: it may be a rank's part of one
        self._width, self._patch = conv.out_channels, conv.kernel_size

    def forward(self, images: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[B, D, rows, columns]``."""
        rows, columns = (side // patch for side, patch in zip(images.shape[2:], self._patch, strict=True))
        return self.weight.new_zeros(()).expand(len(images), self._width, rows, columns)
