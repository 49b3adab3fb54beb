"""Writes a snapshot of all ranks into a directory; either all ranks succeed or nothing is left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flowtrain.errors import CheckpointError
from flowtrain.training.checkpoint_format import FROZEN_FILE, TIED_FILE, random_state_file
from flowtrain.training.checksums import FileSum, sums_of, write_durably, write_sums
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.optimizer import num_replicas
from flowtrain.training.snapshot import Snapshot

_COPY_AHEAD_NBYTES = 10_000_000
"""Torch's default."""


@dataclass(frozen=True)
class _Written:
    """One rank's outcome."""

    problem: str | None
    nbytes: int
    sums: dict[str, FileSum]


def write_snapshot(
    directory: Path, snapshot: Snapshot, tied: Mapping[str, str], frozen: Mapping[str, Any], group: BackboneGroup
) -> str | None:
    """Write the state of all ranks; collective over the checkpoint group, in any one thread of each rank.

    tied, frozen: contents of the files of these names. Returns None, or why the files could not be written, with the
    bytes needed and free; the same on all ranks, and then ``directory`` is gone. Files are durable on return.
    Raises CheckpointError for anything but an error of the file system.
    """
    problem = _write_tensors(directory, snapshot, group)
    sums: dict[str, FileSum] = {}
    if problem is None:
        try:
            sums = sums_of(_write_own_files(directory, snapshot, tied, frozen, group.rank))
        except OSError as error:
            problem = f"rank {group.rank}: {error}"
    return _conclude(directory, _Written(problem, _share_nbytes(snapshot), sums), group)


def _write_tensors(directory: Path, snapshot: Snapshot, group: BackboneGroup) -> str | None:
    """Write the distributed checkpoint; returns why that failed, the same on all ranks."""
    # To copy ahead, torch waits for the accelerator again and again, thus for the training; host memory needs no copy.
    ahead = _COPY_AHEAD_NBYTES if snapshot.copies is None else 0
    writer = _Writer(directory, sync_files=True, overwrite=False, per_thread_copy_ahead=ahead)
    planner = _Planner(snapshot)
    try:
        with torch.no_grad():
            dcp.save(
                dict(snapshot.tensors), storage_writer=writer, planner=planner, process_group=group.checkpoint_group
            )
    except dcp.CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        if not all(isinstance(failure, OSError) for failure in failures.values()):
            raise CheckpointError(f"checkpoint {directory} could not be written: {error}") from error
        rank, failure = min(failures.items())
        return f"rank {rank}: {failure}"
    return None


def _write_own_files(
    directory: Path, snapshot: Snapshot, tied: Mapping[str, str], frozen: Mapping[str, Any], rank: int
) -> list[Path]:
    """Write what is not in the distributed checkpoint; returns all files that this rank wrote."""
    paths = [directory / random_state_file(rank)]
    with paths[0].open("wb") as file:
        torch.save(dict(snapshot.random), file)
        file.flush()
        os.fsync(file.fileno())
    if rank == 0:
        contents = {TIED_FILE: tied} | ({FROZEN_FILE: frozen} if frozen else {})
        for name, content in contents.items():
            write_durably(directory / name, json.dumps(dict(content), indent=1))
        paths += [directory / ".metadata", *(directory / name for name in contents)]
    return [*paths, *sorted(directory.glob(f"__{rank}_*"))]


def _conclude(directory: Path, own: _Written, group: BackboneGroup) -> str | None:
    """Let all ranks agree; the first one writes the sums of all files, or removes what was written."""
    every: list[Any] | None = [None] * group.world_size if group.rank == 0 else None
    dist.gather_object(own, every, dst=0, group=group.checkpoint_group)
    agreed: list[str | None] = [None]
    if every is not None:
        problem = next((each.problem for each in every if each.problem), None)
        if problem is None:
            try:
                write_sums(directory, {name: each for written in every for name, each in written.sums.items()})
            except OSError as error:
                problem = f"rank 0: {error}"
        if problem is not None:
            agreed = [_with_numbers(problem, directory, sum(each.nbytes for each in every))]
            shutil.rmtree(directory, ignore_errors=True)
    dist.broadcast_object_list(agreed, src=0, group=group.checkpoint_group)
    return agreed[0]


def _with_numbers(problem: str, directory: Path, nbytes: int) -> str:
    try:
        free = f"{shutil.disk_usage(directory.parent).free:,}"
    except OSError:
        free = "an unknown number of"
    return f"{problem}; the checkpoint needs {nbytes:,} bytes, {free} bytes are free in {directory.parent}"


def _share_nbytes(snapshot: Snapshot) -> int:
    """Bytes of the rank's shards; a shard that n ranks hold counts 1/n."""
    tensors = snapshot.tensors
    return round(sum(snapshot.values(name).nbytes / num_replicas(tensor) for name, tensor in tensors.items()))


class _Planner(dcp.DefaultSavePlanner):
    """Plans by the live tensors, which say who holds what, and writes the values of the snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._snapshot.values(index.fqn)


class _Writer(dcp.FileSystemWriter):
    """Torch's writer; an error of the file system stays an OSError.

    Torch's serialiser replaces it by a RuntimeError of its own when it closes the file.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from None
