"""A run's weights as a Hugging Face directory."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from flowtrain.config.home import expanded
from flowtrain.config.parameter_names import ENCODERS
from flowtrain.config.run import RunConfig
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.models.export import MAX_SHARD_NBYTES
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import LazyTensors, whole_tensors
from flowtrain.observability.files import sync_directory
from flowtrain.observability.run_dir import RunDir
from flowtrain.training.checkpoint import stored_frozen, stored_state
from flowtrain.training.checkpoint_store import best_first, corruption_of, intact_newest_first, read_meta
from flowtrain.training.frozen import add_digests, check_frozen, digests_of, frozen_entries

logger = logging.getLogger(__name__)

ExportDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    directory: Path
    """The Hugging Face directory."""
    step: int
    """The step whose weights it holds."""
    is_training: bool
    """A process still trains the run, so later checkpoints may follow."""


def export_run(
    run_dir: Path,
    to: Path | None = None,
    dtype: ExportDtype = "float32",
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    best: bool = False,
) -> Exported:
    """Write the run's last intact checkpoint as a Hugging Face directory, shard by shard.

    to: by default ``<run_dir>/export``, which is replaced; any other directory must be empty or absent. The export
    appears whole or not at all. dtype: of the weights; float32 is what was trained. max_shard_nbytes: size of a file of
    weights, and about the memory that the export takes. best: take the best one by ``checkpoint.keep_best`` instead.
    Raises ConfigError or CheckpointError if there is nothing to export.
    """
    run = RunDir(expanded(run_dir).absolute())
    config = run.load_config()
    target = run.export if to is None else expanded(to).absolute()
    if target != run.export and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name another directory with --to, or remove it")
    checkpoint = next(_best_first(run, config) if best else intact_newest_first(run.checkpoints), None)
    if checkpoint is None and config.emulation is not None:
        raise CheckpointError(
            f"{run.root}: the run's devices were emulated (model.device), so no weights exist and nothing can be "
            "exported; train it on real devices"
        )
    if checkpoint is None and best:
        raise CheckpointError(
            f"{run.checkpoints}: no complete checkpoint has {config.checkpoint.keep_best} (checkpoint.keep_best) yet; "
            "export the last one, without --best"
        )
    if checkpoint is None:
        raise CheckpointError(
            f"{run.checkpoints}: no complete checkpoint yet; the run writes one every checkpoint.every_steps steps"
        )
    step = read_meta(checkpoint).step
    _write(config, checkpoint, target, getattr(torch, dtype), max_shard_nbytes)
    return Exported(target, step, run.is_held())


def _best_first(run: RunDir, config: RunConfig) -> Iterator[Path]:
    """Yield the intact checkpoints that have the run's metric, from the best on."""
    metric = config.checkpoint.keep_best
    if metric is None:
        raise ConfigError(
            f"{run.root} keeps no best checkpoint: checkpoint.keep_best is not set; export the last one, without --best"
        )
    for checkpoint in best_first(run.checkpoints, metric):
        if (problem := corruption_of(checkpoint)) is None:
            yield checkpoint
        else:
            logger.warning("checkpoint %s is corrupt and is not used: %s", checkpoint, problem)


def _write(config: RunConfig, checkpoint: Path, target: Path, dtype: torch.dtype, max_shard_nbytes: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    staging.mkdir()
    try:
        family = family_from_config(config)
        weights = CheckpointedWeights(family, config, checkpoint)
        family.export(weights.state, staging, dtype, max_shard_nbytes)
        weights.check_frozen()
        if target.exists():
            shutil.rmtree(target)
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_directory(target.parent)


class CheckpointedWeights:
    """The weights at a checkpoint: trained ones from it, frozen ones of backbone and connector from their origin."""

    def __init__(self, family: Family, config: RunConfig, checkpoint: Path) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._trained = stored_state(checkpoint)
        frozen, merged = whole_tensors(family.backbone_weights(), family.weight_shapes()), family.merged_connector()
        self._frozen = LazyTensors([*frozen, *merged], lambda name: (merged if name in merged else frozen)[name])
        self._stored_frozen = stored_frozen(checkpoint)
        self._digests: dict[str, dict[str, int]] = {}
        names = self._frozen if self._stored_frozen else ()
        self.state = LazyTensors(dict.fromkeys([*names, *self._trained]), self._read)
        """As ``Family.export`` takes it; each tensor is read when it is looked up."""

    def _read(self, name: str) -> torch.Tensor:
        if name in self._trained:
            return self._trained[name]
        tensor = self._frozen[name]
        self._digests[name] = digests_of([(name, tensor, tuple(slice(0, size) for size in tensor.shape))])
        return tensor

    def check_frozen(self) -> None:
        """Raise CheckpointError if the frozen weights that were read are not those of the training."""
        found = frozen_entries(add_digests(self._digests.values()), self._config)
        stored = {module: entry for module, entry in self._stored_frozen.items() if module != ENCODERS}
        check_frozen(stored, found, self._checkpoint)
