"""The checkpoint directory: temporaries, commit by rename, pruning, finding the last complete checkpoint. No torch.

Ranks write into ``.tmp-step-00000012-<nonce>/``, with the checksums of what they wrote. When all are done the driver
adds ``meta.json``, makes everything durable and renames the directory to ``step-00000012``. A kill at any moment leaves
either the old state or the new one.

A checkpoint is *complete* if it was committed and all files have their sizes, and *intact* if they also have their
checksums. The first is a look at the directory, the second reads everything.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowtrain.errors import CheckpointError
from flowtrain.observability.files import sync_directory
from flowtrain.training.checksums import SUMS_FILE, FileSum, first_difference, read_sums, sums_of, write_durably
from flowtrain.types.events import CHECKPOINT_SCHEMA

logger = logging.getLogger(__name__)

META_FILE = "meta.json"
_TEMPORARY_PREFIX = ".tmp-"
_CORRUPT, _UNREACHED = "corrupt", "unreached"
"""What the names of checkpoints that were set aside begin with."""
_SIZES_ALONE = 1
"""Schema without checksums, also of ``meta.json`` itself; it is still read."""
EVEN_CHUNKS = "chunks="
_FINAL_NAME = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """Contents of ``meta.json``.

    A resume is exact to the bit only with the same degrees, ``partition``, ``gradient_reduction``, ``num_threads`` and
    ``torch_version``, on the same processors, which are not recorded, and in modes that compute features alike.
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
    mode: str = "decoupled"
    partition: str = f"{EVEN_CHUNKS}1"
    """Which layers were on which pipeline rank, as ``Partition.text``; ``chunks=N`` in older checkpoints: N slices on
    each rank, of equal sizes."""
    gradient_reduction: str | None = None
    """``microbatch`` or ``step``, as the ranks decided; None in older checkpoints, which summed once a step."""
    trained: tuple[str, ...] = ()
    """Modules that were trained, by the configuration's keys; empty in older checkpoints, which do not say."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The finite held-out losses after the step, by the names that ``checkpoint.keep_best`` has for them."""
    files: dict[str, FileSum] = field(default_factory=dict)
    """Size and checksum of every other file by its name; `commit` fills it in."""
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


def commit(temporary: Path, meta: CheckpointMeta, keep: int, keep_best: str | None = None) -> Path:
    """Complete a checkpoint that all ranks have written, and rename it; returns its final directory.

    Then deletes all but the ``keep`` newest complete checkpoints, and the best by the metric ``keep_best``. Temporaries
    stay, since ranks may be writing the next one. A complete checkpoint of the same step is left as it is: a run that
    repeats a step gets the same state.
    May be called again after an OSError. Raises CheckpointError if a file that a rank wrote is gone or cut off.
    """
    final = final_directory(temporary.parent, meta.step)
    if temporary.exists() or problem_of(final) is not None:  # else only the last call's pruning failed
        _complete(temporary, final, meta)
    sync_directory(temporary.parent)
    _prune(temporary.parent, keep, keep_best)
    return final


def _complete(temporary: Path, final: Path, meta: CheckpointMeta) -> None:
    sums = read_sums(temporary)
    problem = _size_problem(temporary, sums)
    if problem is not None:
        raise CheckpointError(f"checkpoint {temporary} cannot be made complete: {problem}")
    others = [path for path in _files(temporary) if path.name not in {*sums, SUMS_FILE, META_FILE}]
    write_durably(temporary / META_FILE, _meta_text(replace(meta, files=sums | sums_of(others))))
    sync_directory(temporary)
    if problem_of(final) is None:
        shutil.rmtree(temporary, ignore_errors=True)
        return
    if final.exists():
        _retire(final)
    temporary.rename(final)
    (final / SUMS_FILE).unlink(missing_ok=True)  # only now: a second call needs the ranks' own sums


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


def best_first(checkpoints: Path, metric: str) -> list[Path]:
    """The complete checkpoints that have a metric, from its lowest value up; of equal ones the earlier comes first."""
    metas = {path: read_meta(path) for path in _newest_first(checkpoints) if problem_of(path) is None}
    known = {path: meta.metrics[metric] for path, meta in metas.items() if metric in meta.metrics}
    return sorted(known, key=lambda path: (known[path], _step_of(path)))


def damaged(checkpoints: Path) -> list[Path]:
    """Checkpoints in the directory or put aside, none of which may be intact."""
    aside = (path for path in checkpoints.glob(f"{_CORRUPT}-*") if path.is_dir())
    return [*_newest_first(checkpoints), *sorted(aside)]


def intact_newest_first(checkpoints: Path, *, set_aside: bool = False) -> Iterator[Path]:
    """Yield the intact checkpoints from the highest step down; others are skipped with a line in the log.

    set_aside: put corrupt ones aside; call it only as the run's owner.
    """
    for path in complete_newest_first(checkpoints):
        problem = corruption_of(path)
        if problem is None:
            yield path
            continue
        logger.warning("checkpoint %s is corrupt and is not used: %s", path, problem)
        if set_aside:
            _set_aside(path, _CORRUPT)


def set_aside_after(checkpoints: Path, step: int) -> None:
    """Rename the checkpoints of later steps, before a run goes on after ``step``.

    Otherwise they would count as the newest ones: the run's own next checkpoints would be pruned in their favour.
    """
    for path in _newest_first(checkpoints):
        if _step_of(path) > step:
            _set_aside(path, _UNREACHED)


def _set_aside(path: Path, why: str) -> None:
    path.rename(path.with_name(f"{why}-{path.name}-{secrets.token_hex(4)}"))


def read_meta(directory: Path) -> CheckpointMeta:
    """Read ``meta.json``; raises CheckpointError when it is missing, damaged or of another schema."""
    path = directory / META_FILE
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
        schema = values["schema"]
        if schema not in (_SIZES_ALONE, CHECKPOINT_SCHEMA):
            raise CheckpointError(f"{path}: schema ({schema}) differs from this version's ({CHECKPOINT_SCHEMA})")
        if schema == _SIZES_ALONE:
            values["files"] = {name: {"nbytes": nbytes, "crc32": None} for name, nbytes in values["files"].items()}
        elif (expected := values.pop("crc32")) != (found := _crc32(values)) or _sealed(values) != text:
            raise CheckpointError(f"{path} is damaged: it has CRC-32 {found} where {expected} was written")
        if "partition" not in values:
            values["partition"] = f"{EVEN_CHUNKS}{values.pop('num_chunks', 1)}"
        values["trained"] = tuple(values.get("trained", ()))
        return CheckpointMeta(**values | {"files": {name: FileSum(**each) for name, each in values["files"].items()}})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def problem_of(directory: Path) -> str | None:
    """Why a directory is not a complete checkpoint, or None; every file must have the size that was written."""
    try:
        return _size_problem(directory, read_meta(directory).files)
    except (FileNotFoundError, CheckpointError) as error:
        return str(error)


def corruption_of(directory: Path) -> str | None:
    """Why a complete checkpoint is not intact, or None; reads all files, once for as long as they do not change."""
    try:
        stats = [path.stat() for path in _files(directory)]
        return _corruption(directory, tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats))
    except (OSError, CheckpointError) as error:  # a broken disk, or another process removes it
        return f"it cannot be read: {error}"


@lru_cache(maxsize=16)
def _corruption(directory: Path, files: tuple[tuple[int, ...], ...]) -> str | None:
    return first_difference(directory, read_meta(directory).files)


def _size_problem(directory: Path, files: Mapping[str, FileSum]) -> str | None:
    sizes = (replace(each, crc32=None).difference(directory / name) for name, each in files.items())
    return next((problem for problem in sizes if problem is not None), None)


def _meta_text(meta: CheckpointMeta) -> str:
    return _sealed(asdict(meta))


def _sealed(values: dict[str, Any]) -> str:
    """The text of ``meta.json``, with the checksum of its values; a reader expects it to the character."""
    values = json.loads(json.dumps(values))  # keys that are numbers become text before they are sorted
    return json.dumps(values | {"crc32": _crc32(values)}, indent=1, sort_keys=True)


def _crc32(values: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def remove_temporaries(checkpoints: Path) -> None:
    """Remove what unfinished writes left; call it only while no rank writes."""
    for path in checkpoints.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prune(checkpoints: Path, keep: int, keep_best: str | None) -> None:
    best = best_first(checkpoints, keep_best)[:1] if keep_best is not None else []
    complete = 0
    for path in _newest_first(checkpoints):
        if problem_of(path) is None:
            complete += 1
            if complete <= keep or path in best:
                continue
        _retire(path)


def _retire(final: Path) -> None:
    """Remove a checkpoint; rename it first, so that a half-removed one never looks complete."""
    retired = final.with_name(f"{_TEMPORARY_PREFIX}retired-{final.name}-{secrets.token_hex(4)}")
    final.rename(retired)
    shutil.rmtree(retired, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(final: Path) -> int:
    return int(final.name.removeprefix("step-"))


def _newest_first(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    return sorted((path for path in checkpoints.iterdir() if _FINAL_NAME.match(path.name)), key=_step_of, reverse=True)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.iterdir()) if path.is_file())
