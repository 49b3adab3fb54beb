"""Weights, optimizer state and random state of the backbone's ranks, in torch's distributed checkpoint format.

Everything in the distributed checkpoint is a tensor, under ``model.<name>`` or ``optimizer.<name>.<key>``; sharded
tensors are stored by shard. Names are those of the whole model, so a checkpoint can be loaded at other degrees.

Trust: a checkpoint is a file of the user's own run. Still, no pickle runs code. Shards and random state are read with
``weights_only=True``. The index ``.metadata``, which torch writes as a pickle, is read by an unpickler that knows only
the index's own types. Torch would unpickle other values than tensors freely, so none are written or read.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from flowtrain.errors import CheckpointError
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.mesh import BackboneGroup

_MODEL = "model."
_OPTIMIZER = "optimizer."
_TIED_FILE = "tied.json"

_INDEX_TYPES = {
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "ChunkStorageMetadata",
            "TensorStorageMetadata",
            "TensorProperties",
        }
        | {"_MEM_FORMAT_ENCODING"}
    ),
    "pathlib": frozenset({"PosixPath"}),
    "pathlib._local": frozenset({"PosixPath"}),
}


def save(directory: Path, model: ModelChunks, optimizer: torch.optim.Optimizer, group: BackboneGroup) -> None:
    """Write this rank's shards and random state into ``directory``; collective over the checkpoint group.

    The files of all ranks are durable on return. Raises CheckpointError if this rank could not write, or if any rank
    could not write its shards.
    """
    state = _model_state(model) | _optimizer_state(model, optimizer)
    try:
        # The collective part comes first: a rank that failed before it would leave the other ranks waiting.
        writer = dcp.FileSystemWriter(directory, sync_files=True, overwrite=False)
        dcp.save(state, storage_writer=writer, process_group=group.checkpoint_group)
        _write_random_state(directory / _random_state_file(group.rank), group)
        if group.rank == 0:
            _write_tied_names(directory / _TIED_FILE, model.tied)
    except (OSError, dcp.CheckpointException) as error:
        raise CheckpointError(f"checkpoint {directory} could not be written by rank {group.rank}: {error}") from error
    dist.barrier(group=group.checkpoint_group)  # rank 0 reports for all of them


def load(directory: Path, model: ModelChunks, optimizer: torch.optim.Optimizer, group: BackboneGroup) -> None:
    """Load a checkpoint into a sharded model and its fresh optimizer; collective over the checkpoint group.

    The degrees may differ; the random state is then not loaded. Raises CheckpointError if the checkpoint cannot be read
    or belongs to another model.
    """
    reader = _TensorReader(directory)
    index = _read_index(reader)
    _allocate_optimizer_state(model, optimizer, index)
    state = _model_state(model) | _optimizer_state(model, optimizer)
    _check_index(directory, index, state)
    try:
        dcp.load(state, storage_reader=reader, process_group=group.checkpoint_group)
    except (OSError, dcp.CheckpointException) as error:
        raise CheckpointError(f"checkpoint {directory} could not be read by rank {group.rank}: {error}") from error
    _read_random_state(directory, group)


def load_backbone_state(directory: Path) -> dict[str, torch.Tensor]:
    """Full weights under the names of ``Backbone.state_dict()``, without a process group; tied names share a tensor."""
    reader = _TensorReader(directory)
    index = _read_index(reader)
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    try:
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # torch warns of the missing group
            dcp.load(state, storage_reader=reader, no_dist=True)
        tied = json.loads((directory / _TIED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, dcp.CheckpointException) as error:
        raise CheckpointError(f"checkpoint {directory} could not be read: {error}") from error
    weights = {key.removeprefix(_MODEL): tensor for key, tensor in state.items()}
    return weights | {name: weights[stored_as] for name, stored_as in tied.items()}


# --- what is stored ------------------------------------------------------------------------------------------------


def _model_state(model: ModelChunks) -> dict[str, Any]:
    """Every tensor of this rank once; tied parameters are under their first name."""
    assert all(isinstance(parameter, DTensor) for _, parameter in model.named_parameters()), "weights are not in shards"
    state = {f"{_MODEL}{model.stored_name(name)}": parameter.detach() for name, parameter in model.named_parameters()}
    return state | {f"{_MODEL}{name}": buffer for name, buffer in model.named_buffers()}


def _optimizer_state(model: ModelChunks, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State tensors by parameter name; the groups' settings come from the configuration and the step."""
    return {
        f"{_OPTIMIZER}{model.stored_name(name)}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _allocate_optimizer_state(model: ModelChunks, optimizer: torch.optim.Optimizer, index: Metadata) -> None:
    """Give the optimizer the state tensors that the checkpoint has, so that they can be loaded in place.

    A state with its parameter's shape is sharded like the parameter; others (step counters) are whole on every rank.
    """
    parameters = {model.stored_name(name): parameter for name, parameter in model.named_parameters()}
    optimizer.state.clear()
    for name, entry in index.state_dict_metadata.items():
        if not name.startswith(_OPTIMIZER) or not isinstance(entry, TensorStorageMetadata):
            continue
        parameter_name, _, key = name.removeprefix(_OPTIMIZER).rpartition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None or not parameter.requires_grad:
            continue
        if entry.size == parameter.shape and entry.size != torch.Size([]):
            value = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
        else:
            value = torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
        optimizer.state[parameter][key] = value


def _check_index(directory: Path, index: Metadata, state: dict[str, Any]) -> None:
    for name, tensor in state.items():
        entry = index.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"checkpoint {directory} has no {name}: it belongs to another model or optimizer")
        if entry.size != tensor.shape:
            raise CheckpointError(
                f"checkpoint {directory} has {name} of shape {list(entry.size)}, the model {list(tensor.shape)}; "
                "it belongs to another model"
            )


def _write_tied_names(path: Path, tied: Mapping[str, str]) -> None:
    """Names that share a stored parameter: {name: name it is stored under}."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(dict(tied), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


# --- random state --------------------------------------------------------------------------------------------------


def _random_state_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def _write_random_state(path: Path, group: BackboneGroup) -> None:
    states = {"cpu": torch.get_rng_state(), "degrees": astuple(group.degrees)}
    if group.device.type != "cpu":
        states["device"] = torch.get_device_module(group.device).get_rng_state(group.device)
    with path.open("wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())


def _read_random_state(directory: Path, group: BackboneGroup) -> None:
    path = directory / _random_state_file(group.rank)
    states = torch.load(path, weights_only=True) if path.exists() else {}
    degrees = states.get("degrees")
    if degrees != astuple(group.degrees):
        return  # saved at other degrees; the driver reports that
    torch.set_rng_state(states["cpu"])
    if group.device.type != "cpu" and "device" in states:
        torch.get_device_module(group.device).set_rng_state(states["device"], group.device)


# --- reading without running pickled code --------------------------------------------------------------------------


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles the checkpoint's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_TYPES.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


class _TensorReader(dcp.FileSystemReader):
    """Reads the files as torch's own reader does, but does not run code that a pickled index may name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _read_index(reader: _TensorReader) -> Metadata:
    try:
        return reader.read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {reader.path} has no readable index: {error}") from error
