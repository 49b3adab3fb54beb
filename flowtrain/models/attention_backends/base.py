"""Types and checks that all backends of packed attention share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

AttentionFunction = Callable[..., tuple[Tensor, None]]

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_FLASH_DTYPES = (torch.float16, torch.bfloat16)


class SegmentOffsets:
    """Offsets of a microbatch's sequences as Python integers, from 0 to its length.

    For backends that loop: they need not wait for the device. An object and not a list, because torch.compile would
    compile a decoder layer again for every length of a list, though the layer only passes it on.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = offsets

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [stop - start for start, stop in pairwise(self._offsets)]


class Segments:
    """The images of one row of tokens: how many tokens each has, in order.

    One object for a whole forward: what backends need of it is computed once. No list, as for ``SegmentOffsets``.
    """

    were_used = False
    """Whether an attention got them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._offsets: dict[torch.device, Tensor] = {}

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all images together."""
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        """Tokens of the largest image."""
        return max(self.lengths, default=0)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Neighbours of equal length: (number of images, tokens of each)."""
        return tuple((len(list(images)), length) for length, images in groupby(self.lengths))

    def offsets_on(self, device: torch.device) -> Tensor:
        """Offsets of the images, from 0 to the row's length: int32 ``[S + 1]``."""
        if device not in self._offsets:
            offsets = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            self._offsets[device] = offsets.to(device, non_blocking=True)
        return self._offsets[device]


class BidirectionalFunction(Protocol):
    """As ``tower_attention.packed_bidirectional``."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, dropout: float
    ) -> Tensor:
        """Attend within each image."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel for packed sequences."""

    attend: AttentionFunction
    """Causal. As transformers calls it: query ``[1, H, T, D]``, key and value ``[1, H_kv, T, D]`` of all sequences back
    to back; returns ``[1, T, H, D]``.
    """
    bidirectional: BidirectionalFunction
    """Not causal, for the images of vision towers."""
    why_not: Callable[[torch.device, torch.dtype], str | None]
    """Why it cannot run on a device in a compute type, and what to do about it; None if it can."""


def check_request(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]) -> None:
    """Raise if a model asks for a feature that causal packed attention does not have."""
    assert attention_mask is None, "packed attention takes no mask"
    assert getattr(module, "is_causal", True), "packed attention is causal"
    check_options(module, options)


def check_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise if a model asks for a feature that no packed attention has."""
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} asks for {name}, which packed attention does not have")


def why_no_flash_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashAttention's CUDA kernels cannot run; None if they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in _FLASH_DTYPES:
        return f"it computes in bfloat16, not {str(dtype).removeprefix('torch.')}; set model.dtype"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or more, not {capability[0]}.{capability[1]}"
    return None


def tokens_first(tensor: Tensor) -> Tensor:
    """View ``[1, H, T, D]`` as ``[T, H, D]``, as variable-length kernels take it."""
    return tensor[0].transpose(0, 1)
