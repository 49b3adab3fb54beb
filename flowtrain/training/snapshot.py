"""What a rank saves, at one instant: its shards of weights and optimizer state, and its random state.

Everything in the distributed checkpoint is a tensor, under ``model.<name>`` or ``optimizer.<name>.<key>``; sharded
tensors are stored by shard. Names are those of the whole model, so a checkpoint can be loaded at other degrees. Frozen
parameters are not saved: they come from their origin (see ``training/frozen.py``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowtrain.mempool.tiers.page_lock import PageLock
from flowtrain.mempool.tiers.private_memory import touched_memory
from flowtrain.mempool.tiers.virtual_memory import whole_pages
from flowtrain.models.parallel_layers import local_shard
from flowtrain.training.checkpoint_format import MODEL, OPTIMIZER
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import BackboneGroup


@dataclass(frozen=True)
class Snapshot:
    """A rank's state."""

    tensors: Mapping[str, torch.Tensor]
    """The live tensors by their stored names; a DTensor says which part of the whole tensor the rank holds."""
    copies: Mapping[str, torch.Tensor] | None
    """Their local shards in host memory; None: training waits, so the live tensors are written."""
    random: Mapping[str, Any]
    """States of the generators, and the degrees for which they hold."""

    def values(self, name: str) -> torch.Tensor:
        """The rank's shard of a tensor, as it was at the snapshot."""
        return local_shard(self.tensors[name]) if self.copies is None else self.copies[name]


class HostBuffers:
    """Host memory for the copies of one snapshot after the other; page-locked where there is an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages = None if device.type == "cpu" else PageLock(device)
        self._buffers: dict[str, torch.Tensor] = {}

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Get memory for copies of tensors and touch it: copies into new memory take several times as long."""
        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        self._buffers = {}  # the old ones go first
        memory = touched_memory([shard.nbytes for shard in shards.values()], self._pages)
        self._buffers = {
            name: torch.from_numpy(array).view(shard.dtype).view(shard.shape)
            for array, (name, shard) in zip(memory, shards.items(), strict=True)
        }

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the local shards of tensors; overwrites the copies of the last call, and returns when it is done."""
        if not self._fit(tensors):
            self.reserve(tensors)
        for name, tensor in tensors.items():
            self._buffers[name].copy_(local_shard(tensor), non_blocking=True)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._buffers

    def _fit(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the memory that is there has these tensors' shapes and types."""

        def kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
            local = local_shard(tensor)
            return local.shape, local.dtype

        return self._buffers.keys() == tensors.keys() and all(
            kind(self._buffers[name]) == kind(tensor) for name, tensor in tensors.items()
        )


def copy_nbytes(tensor: torch.Tensor) -> int:
    """Host memory that a copy of a tensor's local shard takes."""
    return whole_pages(local_shard(tensor).nbytes)


def take_snapshot(
    model: ModelChunks, optimizer: torch.optim.Optimizer, group: BackboneGroup, buffers: HostBuffers | None
) -> Snapshot:
    """Take this rank's state now. buffers: where the copies go; None: nothing is copied."""
    tensors = model_state(model) | optimizer_state(model, optimizer)
    random = {"cpu": torch.get_rng_state(), "degrees": astuple(group.degrees)}
    if group.device.type != "cpu":
        random["device"] = torch.get_device_module(group.device).get_rng_state(group.device)
    return Snapshot(tensors, None if buffers is None else buffers.copy(tensors), random)


def model_state(model: ModelChunks, frozen: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Every trained tensor of this rank once; tied parameters are under their first name.

    frozen: stored names of frozen parameters that belong in it too.
    """
    parameters = {f"{MODEL}{model.stored_name(name)}": parameter for name, parameter in model.named_parameters()}
    state = {name: each.detach() for name, each in parameters.items() if each.requires_grad or name in frozen}
    assert all(isinstance(parameter, DTensor) for parameter in state.values()), "weights are not in shards"
    return state | {f"{MODEL}{name}": buffer for name, buffer in model.named_buffers()}


def optimizer_state(model: ModelChunks, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State tensors by parameter name; the groups' settings come from the configuration and the step."""
    return {
        f"{OPTIMIZER}{model.stored_name(name)}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def empty_state(parameter: torch.Tensor, size: torch.Size, dtype: torch.dtype, is_shard: bool) -> torch.Tensor:
    """A state tensor of the optimizer for values to be loaded into.

    is_shard: it is sharded like its parameter; others (step counters) are whole on every rank, of ``size``.
    """
    if is_shard:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(size, dtype=dtype, device=parameter.device)


def restore_random_state(random: Mapping[str, Any], group: BackboneGroup) -> None:
    """Set the generators as a snapshot has them, unless it was taken at other degrees; the driver reports that."""
    if random.get("degrees") != astuple(group.degrees):
        return
    torch.set_rng_state(random["cpu"])
    if group.device.type != "cpu" and "device" in random:
        torch.get_device_module(group.device).set_rng_state(random["device"], group.device)
