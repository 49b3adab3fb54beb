"""Reads parts of tensors from a checkpoint's safetensors files, and only the bytes of these parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowtrain.errors import ConfigError
from flowtrain.models.hub import weights_snapshot

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")
"""End the names of files that hold weights, or list such files."""
_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass
class WeightFiles:
    """The tensors of one checkpoint by their stored names.

    path: directory or hub id. key: configuration key of the path, for messages. Files stay open as long as this object
    lives. They are not mapped, because pages of a mapped file would count as this process's memory. Raises ConfigError
    for unreadable files.
    """

    path: str
    key: str
    _readers: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        with reading(self.path, self.key):
            for file in safetensors_files(self.path, self.key):
                reader = safe_open(file, framework="pt", backend="pread")
                self._readers |= dict.fromkeys(reader.keys(), reader)

    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(self._readers)

    def shape(self, name: str) -> torch.Size:
        """Shape of a stored tensor, without reading its values. Raises ConfigError if it is quantized."""
        stored = self._readers[name].get_slice(name)
        if stored.get_dtype() not in _FLOATING:
            raise ConfigError(
                f"{self.key}: {name} of {self.path!r} is stored as {stored.get_dtype()}; FlowTrain trains from "
                f"{', '.join(sorted(_FLOATING))}: dequantize the checkpoint"
            )
        return torch.Size(stored.get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Part of a stored tensor, one slice per dimension, in float32 on the CPU."""
        with reading(self.path, self.key):
            part: Tensor = self._readers[name].get_slice(name)[index or ...]
        return part.to(torch.float32)


@contextmanager
def reading(path: str, key: str) -> Iterator[None]:
    """Turn errors of reading a checkpoint's files into a ConfigError that names ``key``."""
    try:
        yield
    except (OSError, SafetensorError, HfHubHTTPError) as error:
        raise ConfigError(f"{key}: no weights can be read from {path!r}: {error}") from error


def holds_weights(path: str) -> bool:
    """Whether a path is a directory with weights, in any format. One without may have them on other machines."""
    return any(file.name.endswith(_WEIGHTS) for file in Path(path).glob("*"))


def safetensors_files(path: str, key: str) -> list[Path]:
    """The files that hold a checkpoint, as transformers chooses them: one file, an index's files, or all there are.

    path: directory, or hub id to download. Raises ConfigError, naming ``key``, if there is no such file.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = _cached(path) or weights_snapshot(path)
    if (folder / _SINGLE_FILE).is_file():
        return [folder / _SINGLE_FILE]
    if (folder / _INDEX_FILE).is_file():
        return [folder / name for name in _indexed_files(folder / _INDEX_FILE, key)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{key}: {path!r} holds no *.safetensors; convert it (pickled weights are not read)")
    return files


def _cached(repo_id: str) -> Path | None:
    """The cached folder of a model that is complete there; the run has fetched it on this node, so none asks again."""
    try:
        folder = weights_snapshot(repo_id, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    if (folder / _SINGLE_FILE).is_file():
        return folder
    index = folder / _INDEX_FILE
    is_complete = index.is_file() and all((folder / name).is_file() for name in _indexed_files(index, repo_id))
    return folder if is_complete else None


def _indexed_files(index: Path, key: str) -> list[str]:
    try:
        weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}: {index} is no index of safetensors files: {error!r}") from error
