"""The checkpoint directory: temporaries, commit by rename, pruning, finding the last complete checkpoint. No torch.

Ranks write into ``.tmp-step-00000012-<nonce>/``. When all are done the driver adds ``meta.json``, makes everything
durable and renames the directory to ``step-00000012``. A kill at any moment leaves either the old state or the new one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowtrain.errors import CheckpointError
from flowtrain.types.events import CHECKPOINT_SCHEMA

logger = logging.getLogger(__name__)

META_FILE = "meta.json"
_TEMPORARY_PREFIX = ".tmp-"
_FINAL_NAME = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """Contents of ``meta.json``.

    A resume is exact to the bit only with the same degrees, ``num_chunks``, ``num_threads`` and ``torch_version``.
    """

    step: int
    """Optimizer steps finished."""
    state: dict[str, Any]
    """What the driver needs to continue (sampler, frozen cost coefficients), as JSON values."""
    config_digest: str
    """Digest of the parts of the configuration that must not change."""
    dp_size: int
    num_threads: int
    torch_version: str
    pp_size: int = 1
    tp_size: int = 1
    num_chunks: int = 1
    """Slices of the layers on each pipeline rank."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of every other file by its name; `commit` fills it in."""
    schema: int = CHECKPOINT_SCHEMA


def temporary_directory(checkpoints: Path, step: int, nonce: str) -> Path:
    """Directory into which all ranks write the checkpoint of ``step``.

    nonce: the same on all ranks, new in every run.
    """
    return checkpoints / f"{_TEMPORARY_PREFIX}{_name(step)}-{nonce}"


def final_directory(checkpoints: Path, step: int) -> Path:
    """Directory of the complete checkpoint of ``step``, whether it is there or not."""
    return checkpoints / _name(step)


def probe_directory(checkpoints: Path, nonce: str) -> Path:
    """Directory that the driver creates for the time of a run; ranks that see it share the driver's file system."""
    return checkpoints / f"{_TEMPORARY_PREFIX}probe-{nonce}"


def commit(temporary: Path, meta: CheckpointMeta, keep: int) -> Path:
    """Complete a checkpoint that all ranks have written, and rename it; returns its final directory.

    Then deletes all but the ``keep`` newest complete checkpoints. Temporaries stay, since ranks may be writing the next
    one. A complete checkpoint of the same step is left as it is: a run that repeats a step gets the same state.
    """
    checkpoints = temporary.parent
    files = {str(path.relative_to(temporary)): path.stat().st_size for path in _files(temporary)}
    _write_durably(temporary / META_FILE, json.dumps(asdict(meta) | {"files": files}, indent=1, sort_keys=True))
    for directory in {temporary, *(path.parent for path in _files(temporary))}:
        _fsync(directory)
    final = checkpoints / _name(meta.step)
    if problem_of(final) is not None:
        if final.exists():
            _retire(final)
        temporary.rename(final)
        _fsync(checkpoints)
    else:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(checkpoints, keep)
    return final


def latest_complete(checkpoints: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None; others are skipped with a line in the log."""
    return next(complete_newest_first(checkpoints), None)


def complete_newest_first(checkpoints: Path) -> Iterator[Path]:
    """Yield the complete checkpoints from the highest step down; others are skipped with a line in the log."""
    for path in _newest_first(checkpoints):
        problem = problem_of(path)
        if problem is None:
            yield path
        else:
            logger.warning("checkpoint %s is skipped: %s", path, problem)


def read_meta(directory: Path) -> CheckpointMeta:
    """Read ``meta.json``; raises CheckpointError when it is missing, unreadable or of another schema."""
    path = directory / META_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        schema = values["schema"]
        if schema != CHECKPOINT_SCHEMA:
            raise CheckpointError(f"{path}: schema ({schema}) differs from this version's ({CHECKPOINT_SCHEMA})")
        return CheckpointMeta(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def problem_of(directory: Path) -> str | None:
    """Why a directory is not a complete checkpoint, or None; every file must have the size that was written."""
    try:
        meta = read_meta(directory)
    except CheckpointError as error:
        return str(error)
    for name, nbytes in meta.files.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != nbytes:
            return f"{name} has {'no file' if found is None else f'{found} bytes'} where {nbytes} bytes were written"
    return None


def remove_temporaries(checkpoints: Path) -> None:
    """Remove what unfinished writes left; call it only while no rank writes."""
    for path in checkpoints.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prune(checkpoints: Path, keep: int) -> None:
    complete = 0
    for path in _newest_first(checkpoints):
        if problem_of(path) is None:
            complete += 1
            if complete <= keep:
                continue
        _retire(path)


def _retire(final: Path) -> None:
    """Remove a checkpoint; rename it first, so that a half-removed one never looks complete."""
    retired = final.with_name(f"{_TEMPORARY_PREFIX}retired-{final.name}-{secrets.token_hex(4)}")
    final.rename(retired)
    shutil.rmtree(retired, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _newest_first(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    steps = {path: match for path in checkpoints.iterdir() if (match := _FINAL_NAME.match(path.name))}
    return sorted(steps, key=lambda path: int(steps[path].group(1)), reverse=True)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
