"""A rank's snapshot in its node's memory, from which a new process of the same rank goes on without a disk.

It holds the local shards alone, so it fits only a rank at the same place of the same degrees. Another process has to
open the memory before this one ends (``actors/keeper.py``).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowtrain.errors import CheckpointError, SnapshotLostError
from flowtrain.mempool.memory_file import open_memory
from flowtrain.models.parallel_layers import local_shard
from flowtrain.training.checkpoint_format import OPTIMIZER
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.frozen import check_frozen
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.snapshot import Snapshot, empty_state, model_state, optimizer_state, restore_random_state
from flowtrain.types.memory import MemoryFile


@dataclass(frozen=True)
class KeptSnapshot:
    """What a rank wrote into memory. tensors: local shards by stored name. sharded: names of those that are shards.

    random: as of ``Snapshot``. frozen: origin and digest of the frozen modules.
    """

    tensors: Mapping[str, torch.Tensor]
    sharded: frozenset[str]
    random: Mapping[str, Any]
    frozen: Mapping[str, Any]


def write_memory(name: str, snapshot: Snapshot, frozen: Mapping[str, Any]) -> MemoryFile:
    """Write a rank's snapshot into a new file of memory; the caller closes its descriptor.

    Raises OSError if the machine refuses the memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        content = {
            "tensors": {key: snapshot.values(key) for key in snapshot.tensors},
            "sharded": [key for key, tensor in snapshot.tensors.items() if isinstance(tensor, DTensor)],
            "random": dict(snapshot.random),
            "frozen": dict(frozen),
        }
        with os.fdopen(fd, "wb", closefd=False) as file, torch.no_grad():
            torch.save(content, file)
    except BaseException:
        os.close(fd)
        raise
    return MemoryFile(os.getpid(), fd, name)


def read_memory(file: MemoryFile) -> KeptSnapshot:
    """Map a snapshot that another process of this node keeps. Raises SnapshotLostError if it is gone or damaged."""
    fd = open_memory(file)
    if isinstance(fd, str):
        raise SnapshotLostError(f"the snapshot {file.name} is gone: {fd}")
    try:
        content = torch.load(f"/proc/self/fd/{fd}", weights_only=True, mmap=True, map_location="cpu")
        return KeptSnapshot(content["tensors"], frozenset(content["sharded"]), content["random"], content["frozen"])
    except (OSError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        raise SnapshotLostError(f"the snapshot {file.name} cannot be read: {error}") from error
    finally:
        os.close(fd)  # the mapping stays


@torch.no_grad()
def restore(
    kept: KeptSnapshot,
    model: ModelChunks,
    optimizer: torch.optim.Optimizer,
    group: BackboneGroup,
    describe_frozen: Callable[[], Mapping[str, Any]],
) -> None:
    """Load a snapshot into a sharded model and its fresh optimizer, with the random state.

    describe_frozen: as of ``checkpoint.load``. Raises CheckpointError if the snapshot is of another model.
    """
    _allocate_optimizer_state(kept, model, optimizer)
    state = model_state(model) | optimizer_state(model, optimizer)
    if state.keys() != kept.tensors.keys():
        other = min(state.keys() ^ kept.tensors.keys())
        raise CheckpointError(f"a snapshot of rank {group.rank} and its model do not both have {other}")
    for name, tensor in state.items():
        local, value = local_shard(tensor), kept.tensors[name]
        if local.shape != value.shape:
            raise CheckpointError(
                f"a snapshot of rank {group.rank} has {name} of shape {list(value.shape)}, the model "
                f"{list(local.shape)}"
            )
        local.copy_(value)
    if kept.frozen:
        check_frozen(kept.frozen, describe_frozen(), "in memory")
    restore_random_state(kept.random, group)


def _allocate_optimizer_state(kept: KeptSnapshot, model: ModelChunks, optimizer: torch.optim.Optimizer) -> None:
    parameters = {model.stored_name(name): parameter for name, parameter in model.named_parameters()}
    optimizer.state.clear()
    for name, value in kept.tensors.items():
        if not name.startswith(OPTIMIZER):
            continue
        parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None:
            raise CheckpointError(f"a snapshot has {name}, but the model no {parameter_name}")
        optimizer.state[parameter][key] = empty_state(parameter, value.shape, value.dtype, name in kept.sharded)
