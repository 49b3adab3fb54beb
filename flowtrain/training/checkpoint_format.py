"""Names in a distributed checkpoint, and a reader that runs no pickled code.

Trust: a checkpoint is a file of the user's own run. Still, no pickle runs code. Shards and random state are read with
``weights_only=True``. The index ``.metadata``, which torch writes as a pickle, is read by an unpickler that knows only
the index's own types. Torch would unpickle other values than tensors freely, so none are written or read.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from flowtrain.errors import CheckpointError

MODEL, OPTIMIZER = "model.", "optimizer."
"""What names of tensors begin with."""
TIED_FILE = "tied.json"
"""Names that share a stored parameter: {name: name it is stored under}."""
FROZEN_FILE = "frozen.json"
"""Origin and digest of each frozen module; its weights are not in the checkpoint."""

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


def random_state_file(rank: int) -> str:
    """Name of a rank's random state."""
    return f"random-{rank:05d}.pt"


class TensorReader(dcp.FileSystemReader):
    """Reads the files as torch's own reader does, but does not run code that a pickled index may name."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._index: Metadata | None = None

    @property
    def index(self) -> Metadata:
        """The checkpoint's index; raises CheckpointError if it cannot be read."""
        try:
            return self.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, *_MALFORMED) as error:
            raise CheckpointError(f"checkpoint {self.path} has no readable index: {error}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch's reader; the file is read once."""
        if self._index is None:
            with (Path(self.path) / ".metadata").open("rb") as file:
                self._index = _IndexUnpickler(file).load()
        self._index.storage_meta = self._index.storage_meta or StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


_MALFORMED = (AttributeError, TypeError, ValueError, LookupError)
"""What pickle raises, beside its own error, at an index that no program wrote."""


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles the checkpoint's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_TYPES.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration, which Python up to 3.11.3 pickles as its class's attribute."""
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"an attribute ({name}) of {kind!r} has no place in a checkpoint's index")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
