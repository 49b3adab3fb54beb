"""A model's first weights, read or drawn tensor by tensor: a rank holds at most its shards and one whole tensor.

A tensor's values depend on its name in the whole model and on the seed. They do not depend on the rank or the part
that is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flowtrain.errors import ConfigError
from flowtrain.models.parallel_layers import local_shard
from flowtrain.models.stage import shallow_copy, tied_names
from flowtrain.models.weights import seeded

Index = tuple[slice, ...]
"""Part of a tensor: a slice with both bounds for every dimension."""


class InitialWeights(Protocol):
    """Source of the first values of parameters and buffers."""

    def read(self, name: str, index: Index) -> Tensor:
        """Float32 values of part of a parameter or buffer, by its name in the whole model."""


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, weights: InitialWeights, *, from_checkpoint: bool) -> None:
    """Give a module on ``meta`` memory on ``device`` for what this rank holds, and fill in the first values.

    Parameters may be DTensors, and wrapped by FSDP2; shared ones stay shared. from_checkpoint: leave out the values
    that a checkpoint has, since a checkpoint will be loaded afterwards; it has no frozen parameters.
    """
    shared = _shared_parameters(module)
    module.to_empty(device=device)
    for owner, name, first_owner, first_name in shared:
        owner.register_parameter(name, first_owner.get_parameter(first_name))
    in_checkpoint = module.state_dict().keys() if from_checkpoint else frozenset()
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if name not in in_checkpoint or is_frozen:
            index = local_index(tensor)
            if all(part.start < part.stop for part in index):
                local_shard(tensor).copy_(weights.read(name, index))


def local_index(tensor: Tensor) -> Index:
    """Which part of the whole tensor this rank holds; all of it if it is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _shared_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Each further place of a shared parameter, with its first place: ``(module, name, first module, first name)``.

    `to_empty` gives each place of a plain shared parameter its own memory, so they have to be joined again.
    """
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    shared = []
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in first:
                shared.append((owner, name, *first[parameter]))
            first.setdefault(parameter, (owner, name))
    return shared


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name. ``read`` gets a name and reads its tensor, anew at each look-up; nothing else reads."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def whole_tensors(weights: InitialWeights, shapes: Mapping[str, torch.Size]) -> LazyTensors:
    """Whole tensors of these names and shapes."""
    return LazyTensors(shapes, lambda name: weights.read(name, tuple(slice(0, size) for size in shapes[name])))


class BuiltWeights:
    """The weights of a small module. The whole module is built when the first weight is read."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        module = self._build()
        return {
            name: tensor.detach()
            for name, tensor in chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
        }

    def read(self, name: str, index: Index) -> Tensor:
        """See ``InitialWeights``."""
        return self._tensors[name][index]


class JoinedWeights:
    """Weights of several parts; the names of a part's weights start with its name and a dot."""

    def __init__(self, parts: Mapping[str, InitialWeights]) -> None:
        self._parts = parts

    def read(self, name: str, index: Index) -> Tensor:
        """See ``InitialWeights``."""
        part, _, name_in_part = name.partition(".")
        return self._parts[part].read(name_in_part, index)


class DrawnWeights:
    """Random weights by the rules of an HF model's class; each tensor has its own generator.

    skeleton: the whole model on ``meta``; it is not changed. Tied names get the values of the first name. Buffers get
    the values that the class computes. To read a part, the whole tensor is drawn and freed after the part is cut out.
    """

    def __init__(self, skeleton: PreTrainedModel, seed: int, module: str) -> None:
        self._skeleton, self._seed, self._module = skeleton, seed, module
        self._tied = tied_names(skeleton)

    def read(self, name: str, index: Index) -> Tensor:
        """See ``InitialWeights``."""
        return self._draw(self._tied.get(name, name))[index]

    @torch.no_grad()
    def _draw(self, name: str) -> Tensor:
        """Let HF initialise a copy of the module in which only this tensor is not on ``meta``."""
        path, _, attribute = name.rpartition(".")
        twin = shallow_copy(self._skeleton.get_submodule(path))
        on_meta = getattr(twin, attribute)
        assert on_meta.is_floating_point(), name
        unset = torch.empty(on_meta.shape, dtype=on_meta.dtype)
        _ends(unset).fill_(torch.nan)
        setattr(twin, attribute, nn.Parameter(unset, requires_grad=False) if attribute in twin._parameters else unset)
        with seeded(self._seed, f"{self._module}/{name}"):
            self._model_of(path)._init_weights(twin)
        drawn: Tensor = getattr(twin, attribute).detach()
        if _ends(drawn).isnan().any():
            raise ConfigError(
                f"backbone: transformers has no rule to initialise {name} of {type(self._skeleton).__name__}; use a "
                "pretrained backbone (backbone.path instead of backbone.config)"
            )
        return drawn

    def _model_of(self, path: str) -> PreTrainedModel:
        """The innermost HF model that contains a module; its rules apply to the module."""
        model: PreTrainedModel = self._skeleton
        for end in (match.start() for match in re.finditer(r"\.|$", path)):
            module = self._skeleton.get_submodule(path[:end])
            if isinstance(module, PreTrainedModel):
                model = module
        return model


def _ends(tensor: Tensor) -> Tensor:
    """The first and the last value. They show whether a tensor was set, without a pass over a large tensor."""
    return tensor.view(-1)[:: max(1, tensor.numel() - 1)]
