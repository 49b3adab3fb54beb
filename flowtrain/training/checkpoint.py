"""Saving and loading weights, optimizer state and random state of the backbone's ranks.

The format is torch's distributed checkpoint (see ``training/snapshot.py`` for its contents and
``training/checkpoint_format.py`` for how it is read).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from flowtrain.config.parameter_names import BACKBONE, CONNECTOR, ENCODERS
from flowtrain.config.run import RunConfig
from flowtrain.errors import CheckpointError
from flowtrain.models.initial_weights import LazyTensors
from flowtrain.training.checkpoint_format import (
    FROZEN_FILE,
    MODEL,
    OPTIMIZER,
    TIED_FILE,
    TensorReader,
    random_state_file,
)
from flowtrain.training.chunks import ModelChunks
from flowtrain.training.frozen import check_frozen
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.snapshot import empty_state, model_state, optimizer_state, restore_random_state


def load(
    directory: Path,
    model: ModelChunks,
    optimizer: torch.optim.Optimizer,
    group: BackboneGroup,
    config: RunConfig,
    describe_frozen: Callable[[], Mapping[str, Any]],
) -> None:
    """Load a checkpoint into a sharded model and its fresh optimizer; collective over the checkpoint group.

    The degrees may differ; the random state is then not loaded. Frozen parameters must have their first values; they
    are compared with the digests, those of a connector that runs with the encoder too. Raises CheckpointError if the
    checkpoint cannot be read or belongs to another model.

    describe_frozen: returns origin and digest of the frozen modules of all ranks; collective.
    """
    reader = TensorReader(directory)
    index = reader.index
    _check_encoders(directory, index, config)
    _allocate_optimizer_state(model, optimizer, index)
    # Checkpoints of schema 1 hold frozen parameters too.
    state = model_state(model, frozen=index.state_dict_metadata) | optimizer_state(model, optimizer)
    _check_index(directory, index, state)
    try:
        dcp.load(state, storage_reader=reader, process_group=group.checkpoint_group)
    except (OSError, dcp.CheckpointException) as error:
        raise CheckpointError(f"checkpoint {directory} could not be read by rank {group.rank}: {error}") from error
    known = {module: entry for module, entry in stored_frozen(directory).items() if module in _held(config)}
    if known:
        check_frozen(known, describe_frozen(), directory)
    _read_random_state(directory, group)


def _held(config: RunConfig) -> tuple[str, ...]:
    """Modules whose first values the backbone's ranks know."""
    return (CONNECTOR, BACKBONE, ENCODERS) if config.mode == "monolithic" else (CONNECTOR, BACKBONE)


def _check_encoders(directory: Path, index: Metadata, config: RunConfig) -> None:
    """Refuse to lose the weights of a trained encoder."""
    if config.trains_encoders:
        return
    prefix = f"{MODEL}{ENCODERS}."
    trained = next((name for name in index.state_dict_metadata if name.startswith(prefix)), None)
    if trained is not None:
        key = f"encoders.{trained.removeprefix(prefix).partition('.')[0]}.trainable"
        raise CheckpointError(
            f"checkpoint {directory} has trained weights of an encoder, and {key} (false) would put its first weights "
            f"back; set {key} to true, with mode 'monolithic', or start a run under another name"
        )


def stored_frozen(directory: Path) -> dict[str, Any]:
    """Origin and digest of the frozen modules of a checkpoint; empty if it holds all weights."""
    return _read_json(directory / FROZEN_FILE) if (directory / FROZEN_FILE).exists() else {}


def stored_state(directory: Path) -> LazyTensors:
    """The weights in a checkpoint, without those that were frozen, under the names of ``Backbone.state_dict()``.

    Those of a trained encoder begin with ``encoders.<name>.``.

    A look-up reads a whole tensor; it needs no process group. Raises CheckpointError.
    """
    reader = TensorReader(directory)
    entries = {
        name.removeprefix(MODEL): entry
        for name, entry in reader.index.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    stored_as = {name: name for name in entries} | tied_names_of(directory)

    def read(name: str) -> torch.Tensor:
        entry = entries[stored_as[name]]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings(category=UserWarning, action="ignore"):  # torch warns of the missing group
                dcp.load({MODEL + stored_as[name]: tensor}, storage_reader=reader, no_dist=True)
        except (OSError, ValueError, dcp.CheckpointException) as error:
            raise CheckpointError(f"checkpoint {directory} could not be read: {error}") from error
        return tensor

    return LazyTensors((name for name, first in stored_as.items() if first in entries), read)


def tied_names_of(directory: Path) -> dict[str, str]:
    """Names that share a stored weight of a checkpoint: {name: name it is stored under}."""
    return _read_json(directory / TIED_FILE)


def load_backbone_state(directory: Path) -> dict[str, torch.Tensor]:
    """All of ``stored_state`` at once; tied names share a tensor."""
    stored, tied = stored_state(directory), tied_names_of(directory)
    weights = {name: stored[name] for name in stored if name not in tied}
    return weights | {name: weights[first] for name, first in tied.items() if first in weights}


def _allocate_optimizer_state(model: ModelChunks, optimizer: torch.optim.Optimizer, index: Metadata) -> None:
    """Give the optimizer the state tensors that the checkpoint has, so that they can be loaded in place.

    A state with its parameter's shape is sharded like the parameter.
    """
    parameters = {model.stored_name(name): parameter for name, parameter in model.named_parameters()}
    optimizer.state.clear()
    for name, entry in index.state_dict_metadata.items():
        if not name.startswith(OPTIMIZER) or not isinstance(entry, TensorStorageMetadata):
            continue
        parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None or not parameter.requires_grad:
            continue
        is_shard = entry.size == parameter.shape and entry.size != torch.Size([])
        optimizer.state[parameter][key] = empty_state(parameter, entry.size, entry.properties.dtype, is_shard)


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


def _read_random_state(directory: Path, group: BackboneGroup) -> None:
    path = directory / random_state_file(group.rank)
    restore_random_state(torch.load(path, weights_only=True) if path.exists() else {}, group)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} could not be read: {error}") from error
