"""Where a run begins: from nothing, or behind the last complete checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from flowtrain.config.resume import Change, changes
from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import Prepared
from flowtrain.errors import ConfigError
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.training import checkpoint_store
from flowtrain.types.plan import CostModel, Degrees
from flowtrain.types.samples import SamplerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What a checkpoint gives a run; all of it is None for a run from nothing.

    sampler_state: after ``step``. cost: that steps were planned with.
    """

    step: int = 0
    checkpoint: Path | None = None
    sampler_state: SamplerState | None = None
    cost: CostModel | None = None


def check_goes_on(files: RunDir, prepared: Prepared) -> None:
    """Raise ConfigError where a run has steps left but the last one it did was partial.

    Step k of any run trains the positions from (k - 1) * global_batch_size on; behind a partial step they would not
    follow on those that were trained.
    """
    checkpoint = checkpoint_store.latest_complete(files.checkpoints)
    if checkpoint is None:
        return
    meta = checkpoint_store.read_meta(checkpoint)
    training = prepared.config.training
    trained, whole = (
        len(ConsumedPositions.at(SamplerState.from_dict(meta.state["sampler"]))),
        meta.step * training.global_batch_size,
    )
    if meta.step >= prepared.num_steps or trained == whole:
        return
    raise ConfigError(
        f"run {prepared.config.name!r} cannot go on behind step {meta.step}, which was its last and a partial one: "
        f"{trained} positions are trained, step {meta.step + 1} begins at position {whole}. training.num_epochs (now "
        f"{training.num_epochs:g}) was raised; to use the longer run, move {checkpoint} away, so that it goes on from "
        "the checkpoint before, or start a run under another name"
    )


def changed_since(files: RunDir, config: RunConfig) -> tuple[Change, ...]:
    """What of the configuration differs from the one that the run was last started with; nothing where it was not."""
    return changes(files.load_config(), config) if files.config.is_file() else ()


def find_start(files: RunDir, prepared: Prepared, changed: Sequence[Change]) -> Start:
    """Look for the last complete checkpoint, and say where the run will not be exact to the bit.

    changed: of the configuration, as ``changed_since`` says before it is written anew.
    """
    checkpoint_store.remove_temporaries(files.checkpoints)
    checkpoint = checkpoint_store.latest_complete(files.checkpoints)
    if checkpoint is None:
        logger.warning("%s has no complete checkpoint; the run starts from the beginning", files.root)
        return Start()
    meta = checkpoint_store.read_meta(checkpoint)
    for line in (*_inexact(meta, prepared), *_other_features(changed)):
        logger.warning("%s", line)
    cost = meta.state.get("cost")  # the first version's checkpoints have none
    return Start(
        meta.step, checkpoint, SamplerState.from_dict(meta.state["sampler"]), CostModel(**cost) if cost else None
    )


@dataclass(frozen=True)
class Resumption:
    """What a resume would do.

    directory: the run's. step: steps done, behind which it goes on; None where it starts from the beginning. changes:
    of the configuration since the run was last started. inexact: why losses would not be the same to the bit.
    """

    directory: Path
    step: int | None
    changes: tuple[Change, ...]
    inexact: tuple[str, ...]


def foresee_resume(prepared: Prepared) -> Resumption:
    """Look at the run's directory as a resume would, changing nothing; raises ConfigError where that would refuse.

    The caller has asked ``check_run_dir``.
    """
    files = run_dir(prepared.config)
    check_goes_on(files, prepared)
    changed = changed_since(files, prepared.config)
    checkpoint = checkpoint_store.latest_complete(files.checkpoints)
    if checkpoint is None:
        return Resumption(files.root, None, changed, ())
    meta = checkpoint_store.read_meta(checkpoint)
    return Resumption(files.root, meta.step, changed, (*_inexact(meta, prepared), *_other_features(changed)))


def _inexact(meta: checkpoint_store.CheckpointMeta, prepared: Prepared) -> Iterator[str]:
    """Say what keeps losses behind a checkpoint from being exact to the bit."""
    for name, then, now in (
        ("degrees", Degrees(meta.dp_size, meta.pp_size, meta.tp_size), prepared.plan.backbone.degrees),
        ("backbone.chunks_per_rank", meta.num_chunks, prepared.config.backbone.chunks_per_rank),
        ("backbone threads", meta.num_threads, prepared.config.backbone.num_threads),
        ("torch", meta.torch_version, str(torch.__version__)),
    ):
        if then != now:
            yield f"the checkpoint was written with {name} {then}, now {now}: losses agree only closely"


def _other_features(changed: Sequence[Change]) -> Iterator[str]:
    """Say which changes make encoders' features, of which a checkpoint knows nothing, others by their last bits."""
    for each in changed:
        if fnmatchcase(each.key, "encoders.*.tensor_parallel_size"):
            yield f"{each.key} was {each.old}, is now {each.new}: losses agree only closely"
