"""Frozen weights: named by origin and digest of each module, in place of the weights.

The digest of a tensor is the sum over its elements of ``bits * product of a key for each index``, modulo 2**64. Keys
are odd and drawn from the tensor's name. So a change of one element always changes the digest, and ranks can add up the
digests of their parts, however the tensor is split. It does not protect against somebody who changes weights on
purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flowtrain.config.parameter_names import CONNECTOR, ENCODERS, module_of
from flowtrain.config.run import RunConfig
from flowtrain.errors import CheckpointError
from flowtrain.models.initial_weights import Index, local_index
from flowtrain.models.parallel_layers import local_shard
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import TP_AXIS, BackboneGroup

_MODULUS = 1 << 64
_CHUNK_ELEMENTS = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Part = tuple[str, torch.Tensor, Index]
"""Part of a tensor: the tensor's name in the whole model, the values, and which part of the tensor they are."""


def frozen_parts(model: ModelChunks, group: BackboneGroup) -> list[Part]:
    """The frozen values for which this rank answers; all ranks' are disjoint.

    Call it between units: while modules run, FSDP puts whole parameters in the place of shards. The values may be read
    at any time.
    """
    return [
        (name, local_shard(parameter), local_index(parameter))
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and name == model.stored_name(name) and _counts(parameter, group)
    ]


def freezes_in_ranks(config: RunConfig) -> bool:
    """Whether backbone ranks hold frozen weights, which their checkpoints name by origin and digest."""
    return bool(config.model.freeze) or (config.mode == "monolithic" and not config.trains_encoders)


def describe_frozen(parts: Iterable[Part], config: RunConfig, group: BackboneGroup) -> dict[str, dict[str, Any]]:
    """Origin and digest of what is frozen of each module; collective over the checkpoint group, if anything is.

    A digest is of the frozen weights alone, so another choice of them gives another digest.

    parts: from ``frozen_parts`` of this rank.
    """
    if not freezes_in_ranks(config):
        return {}
    own = digests_of(parts)
    every: list[dict[str, int]] = [{}] * group.world_size
    dist.all_gather_object(every, own, group=group.checkpoint_group)
    return frozen_entries(add_digests(every), config)


def frozen_entries(digests: Mapping[str, int], config: RunConfig) -> dict[str, dict[str, Any]]:
    """Origin and digest by module, as a checkpoint has them."""
    return {module: {"origin": _origin(module, config), "digest": f"{digests[module]:016x}"} for module in digests}


def check_frozen(stored: Mapping[str, Any], found: Mapping[str, Any], directory: object) -> None:
    """Raise CheckpointError if a frozen module is not the one that the checkpoint's other weights were trained with.

    stored: without encoders, if the backbone's ranks do not hold them.
    """
    for module, then in stored.items():
        now = found.get(module)
        if now is None or now["digest"] != then["digest"]:
            is_now = "is not frozen" if now is None else f"has digest {now['digest']} (from {now['origin']})"
            raise CheckpointError(
                f"checkpoint {directory} was trained with a frozen {module} of digest {then['digest']} (from "
                f"{then['origin']}), which now {is_now}: its files, or the version of torch or transformers that draws "
                "random weights, have changed; put the former ones back, or start a run under another name"
            )


def digests_of(parts: Iterable[Part]) -> dict[str, int]:
    """Digest of parts of tensors, by module."""
    digests: dict[str, int] = {}
    for name, values, index in parts:
        module = module_of(name)
        digests[module] = (digests.get(module, 0) + digest_of_part(name, values, index)) % _MODULUS
    return digests


def add_digests(every: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the digests of disjoint parts, by module."""
    total: dict[str, int] = {}
    for digests in every:
        for module, digest in digests.items():
            total[module] = (total.get(module, 0) + digest) % _MODULUS
    return dict(sorted(total.items()))


@torch.no_grad()
def digest_of_part(name: str, values: torch.Tensor, index: Index) -> int:
    """Digest of one part of a tensor; the digests of disjoint parts add up to that of the whole, modulo 2**64."""
    if not values.numel():
        return 0
    keys = [_keys(name, dim, each).to(values.device) for dim, each in enumerate(index)]
    bits = values.contiguous().view(_BITS[values.element_size()])
    if not keys:
        return int(bits.to(torch.int64).item()) % _MODULUS
    rows = max(1, _CHUNK_ELEMENTS // max(1, bits[0].numel()))
    total = torch.zeros((), dtype=torch.int64, device=values.device)  # there, since each fetch waits for the device
    for start in range(0, len(bits), rows):
        products = bits[start : start + rows].to(torch.int64)
        for key in reversed(keys[1:]):
            products = (products * key).sum(-1)
        total += (products * keys[0][start : start + rows]).sum()  # int64 wraps, which is modulo 2**64
    return int(total) % _MODULUS


def _keys(name: str, dim: int, part: slice) -> torch.Tensor:
    """Odd 64-bit keys of the indexes of one dimension (splitmix64)."""
    seed = int.from_bytes(hashlib.sha256(f"{name}/{dim}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        mixed = np.arange(part.start, part.stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64))


def _counts(parameter: torch.Tensor, group: BackboneGroup) -> bool:
    """Whether this rank is the first of those that hold the same values."""
    if not isinstance(parameter, DTensor):
        return (group.dp_rank, group.tp_rank) == (0, 0)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    names = parameter.device_mesh.mesh_dim_names
    if names == (TP_AXIS,) and group.dp_rank:  # a frozen encoder, which FSDP does not shard
        return False
    pairs = zip(coordinate, parameter.placements, strict=True)
    return all(place == 0 for place, placement in pairs if placement.is_replicate())


def _origin(module: str, config: RunConfig) -> str:
    """Where a module's first weights come from, in the words of the configuration."""
    name, encoder = next(iter(config.encoders.items()))
    key, path = {CONNECTOR: ("", None), ENCODERS: (f"encoders.{name}", encoder.path)}.get(
        module, ("backbone", config.backbone.path)
    )
    if path is not None:
        return f"{key}.path {path}"
    if config.model.path is not None:
        return f"model.path {config.model.path}"
    return f"random weights of seed {config.seed}"
