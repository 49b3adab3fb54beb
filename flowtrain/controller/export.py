"""A run's weights as a Hugging Face directory."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from flowtrain.config.run import RunConfig
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.models.families.registry import family_from_config
from flowtrain.observability.files import sync_directory
from flowtrain.observability.run_dir import RunDir
from flowtrain.training.checkpoint import load_backbone_state
from flowtrain.training.checkpoint_store import latest_complete, read_meta


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    directory: Path
    """The Hugging Face directory."""
    step: int
    """The step whose weights it holds."""
    is_training: bool
    """A process still trains the run, so later checkpoints may follow."""


def export_run(run_dir: Path, to: Path | None = None) -> Exported:
    """Write the run's last complete checkpoint as a Hugging Face directory.

    to: by default ``<run_dir>/export``, which is replaced; any other directory must be empty or absent. The export
    appears whole or not at all. Raises ConfigError or CheckpointError if there is nothing to export.
    """
    run = RunDir(run_dir.expanduser().absolute())
    config = run.load_config()
    target = run.export if to is None else to.expanduser().absolute()
    if target != run.export and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name another directory with --to, or remove it")
    checkpoint = latest_complete(run.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            f"{run.checkpoints}: no complete checkpoint yet; the run writes one every checkpoint.every_steps steps"
        )
    step = read_meta(checkpoint).step
    _write(config, checkpoint, target)
    return Exported(target, step, run.is_held())


def _write(config: RunConfig, checkpoint: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    staging.mkdir()
    try:
        family_from_config(config).export(load_backbone_state(checkpoint), staging)
        if target.exists():
            shutil.rmtree(target)
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_directory(target.parent)
