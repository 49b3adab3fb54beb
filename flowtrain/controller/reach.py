"""How far a run's audit reaches, and so which of its checkpoints a resume can use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flowtrain.errors import ConfigError
from flowtrain.observability.ledger import ledger_steps
from flowtrain.observability.metrics import read_metrics
from flowtrain.observability.run_dir import RunDir
from flowtrain.training import checkpoint_store


@dataclass(frozen=True)
class UsableCheckpoint:
    """The checkpoint after which a run can go on."""

    directory: Path
    meta: checkpoint_store.CheckpointMeta
    older: str | None = None
    """Why it is not the newest intact one."""


def usable_checkpoint(files: RunDir, *, set_aside: bool = False) -> UsableCheckpoint | None:
    """Return the newest intact checkpoint that metrics and ledger reach; None if the run has no checkpoint.

    Otherwise the steps between would be missing in the run's audit. Raises ConfigError if they reach none, or if all
    are damaged: to begin anew would delete the run's metrics and ledger.

    set_aside: rename corrupt checkpoints, and later ones than that which is returned; call it only as the run's owner.
    """
    intact = checkpoint_store.intact_newest_first(files.checkpoints, set_aside=set_aside)
    newest = next(intact, None)
    if newest is None:
        if not (damaged := checkpoint_store.damaged(files.checkpoints)):
            return None
        raise ConfigError(
            f"the run cannot go on: none of its checkpoints is intact ({', '.join(path.name for path in damaged)} in "
            f"{files.checkpoints}). Put one back from a copy; or start a run under another name; or remove them all: "
            "--resume then begins anew and deletes the run's metrics and ledger"
        )
    meta = checkpoint_store.read_meta(newest)
    reaches = {files.metrics: _metrics_reach(files.metrics), files.ledger: _ledger_reach(files.ledger)}
    short = {path: step for path, step in reaches.items() if step < meta.step}
    if not short:
        return UsableCheckpoint(newest, meta)
    lack = " and ".join(f"{path} has the steps up to {step}" for path, step in short.items())
    for directory in intact:
        older = checkpoint_store.read_meta(directory)
        if older.step <= min(short.values()):
            if set_aside:
                checkpoint_store.set_aside_after(files.checkpoints, older.step)
            return UsableCheckpoint(
                directory, older, f"{newest} is not used: it is of step {meta.step}, but {lack} only"
            )
    raise ConfigError(
        f"the run cannot go on: its checkpoint {newest} is of step {meta.step}, but {lack} only, and no older intact "
        f"checkpoint is left. Put the complete {' and '.join(path.name for path in short)} back from a copy; or take "
        "the checkpoint's weights out with `flowtrain export` and start a run from them under another name"
    )


def _metrics_reach(path: Path) -> int:
    """The last step up to which a ``metrics.jsonl`` has every step; 0 if it is not there."""
    try:
        return last_without_gap(record.get("step", 0) for record in read_metrics(path))
    except FileNotFoundError:
        return 0


def _ledger_reach(path: Path) -> int:
    """The last step up to which a ledger has every step; 0 if it is not there."""
    try:
        return last_without_gap(ledger_steps(path))
    except FileNotFoundError:
        return 0


def last_without_gap(steps: Iterable[int]) -> int:
    """The largest n for which 1 to n are all among the steps; 0 if there is none."""
    present = set(steps)
    last = 0
    while last + 1 in present:
        last += 1
    return last
