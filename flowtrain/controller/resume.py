"""The resume point: where a run begins, at step 0 or after the last complete checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from flowtrain.config.resume import Change, changes
from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.reach import usable_checkpoint
from flowtrain.errors import ConfigError
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.training import checkpoint_store
from flowtrain.types.plan import CostModel, Degrees, GradientReduction
from flowtrain.types.samples import SamplerState

logger = logging.getLogger(__name__)

_ORDER_SUMS = ("encoders.*.tensor_parallel_size", "backbone.hybrid_shard_size", "backbone.sequence_parallel")


@dataclass(frozen=True)
class ResumePoint:
    """Resume point: what a checkpoint gives a run; step 0 and None for a run that starts from the beginning.

    sampler_state: after ``step``. cost: the cost model that planned the steps.
    """

    step: int = 0
    checkpoint: Path | None = None
    sampler_state: SamplerState | None = None
    cost: CostModel | None = None
    gradient_reduction: str | None = None
    """Of the run that wrote the checkpoint; None: no checkpoint."""


def check_goes_on(files: RunDir, run_spec: RunSpec) -> None:
    """Raise ConfigError if metrics or ledger reach no checkpoint, or if the last step of a longer run was partial.

    Step k of any run trains the positions from (k - 1) * global_batch_size on. After a partial step, these would leave
    a gap after the trained positions.
    """
    usable = usable_checkpoint(files)
    if usable is None:
        return
    checkpoint, meta = usable.directory, usable.meta
    training = run_spec.config.training
    trained, whole = (
        len(ConsumedPositions.at(SamplerState.from_dict(meta.state["sampler"]))),
        meta.step * training.global_batch_size,
    )
    if meta.step >= run_spec.num_steps or trained == whole:
        return
    raise ConfigError(
        f"run {run_spec.config.name!r} cannot go on after step {meta.step}, which was its last and a partial one: "
        f"{trained} positions are trained, but step {meta.step + 1} begins at position {whole}. training.num_epochs "
        f"(now {training.num_epochs:g}) was raised; to use the longer run, move {checkpoint} away, so that it goes on "
        "from the previous checkpoint, or start a run under another name"
    )


def changed_since(files: RunDir, config: RunConfig) -> tuple[Change, ...]:
    """The keys that changed since the run was last started; empty if it never was."""
    return changes(files.load_config(), config) if files.config.is_file() else ()


def find_resume_point(files: RunDir, run_spec: RunSpec, changed: Sequence[Change]) -> ResumePoint:
    """Find the last checkpoint that metrics and ledger reach, and warn if losses will not be exact to the bit.

    changed: from ``changed_since``, called before the new configuration is written.
    """
    checkpoint_store.remove_temporaries(files.checkpoints)
    usable = usable_checkpoint(files, set_aside=True)
    if usable is None:
        logger.warning("%s has no usable checkpoint; the run starts from the beginning", files.root)
        return ResumePoint()
    checkpoint, meta = usable.directory, usable.meta
    if usable.older is not None:
        logger.warning("%s", usable.older)
    for line in (*_inexact(meta, run_spec), *_other_sums(changed)):
        logger.warning("%s", line)
    cost = meta.state.get("cost")  # checkpoints of the first version have none
    return ResumePoint(
        meta.step,
        checkpoint,
        SamplerState.from_dict(meta.state["sampler"]),
        CostModel(**cost) if cost else None,
        _reduction_of(meta),
    )


def other_reduction(start: ResumePoint, now: GradientReduction) -> str | None:
    """Why losses are not exact to the bit if the ranks decided otherwise than those that wrote the checkpoint.

    ``find_resume_point`` warns of a configured reduction; only the ranks can decide about ``auto``.
    """
    if start.gradient_reduction in (None, now.name):
        return None
    return _differs("backbone.gradient_reduction", start.gradient_reduction, now.name)


@dataclass(frozen=True)
class Resumption:
    """What a resume would do."""

    directory: Path
    """The run's."""
    step: int | None
    """The step after which it goes on; None if it starts from the beginning."""
    changes: tuple[Change, ...]
    """Changes of the configuration since the run was last started."""
    inexact: tuple[str, ...]
    """Why losses would not be the same to the bit."""
    older: str | None = None
    """Why it goes on from an older checkpoint than the newest; None if it does not."""


def foresee_resume(run_spec: RunSpec) -> Resumption:
    """Look at the run's directory as a resume would, without a change; raises ConfigError if a resume would.

    The caller must call ``check_run_dir`` first.
    """
    files = run_dir(run_spec.config)
    check_goes_on(files, run_spec)
    changed = changed_since(files, run_spec.config)
    usable = usable_checkpoint(files)
    if usable is None:
        return Resumption(files.root, None, changed, ())
    inexact = (*_inexact(usable.meta, run_spec), *_other_sums(changed))
    return Resumption(files.root, usable.meta.step, changed, inexact, usable.older)


def _inexact(meta: checkpoint_store.CheckpointMeta, run_spec: RunSpec) -> Iterator[str]:
    """Yield why losses after a checkpoint are not exact to the bit."""
    reduction, configured = _reduction_of(meta), run_spec.config.backbone.gradient_reduction
    for name, then, now in (
        ("degrees", Degrees(meta.dp_size, meta.pp_size, meta.tp_size), run_spec.plan.backbone.degrees),
        ("pipeline.chunks", meta.num_chunks, run_spec.config.pipeline.chunks),
        ("backbone.gradient_reduction", reduction, reduction if configured == "auto" else configured),
        ("backbone threads", meta.num_threads, run_spec.config.backbone.num_threads),
        ("torch", meta.torch_version, str(torch.__version__)),
    ):
        if then != now:
            yield _differs(name, then, now)


def _differs(name: str, then: object, now: object) -> str:
    return f"the checkpoint was written with {name} {then}, now {now}: losses agree only closely"


def _reduction_of(meta: checkpoint_store.CheckpointMeta) -> str:
    return meta.gradient_reduction or "step"


def _other_sums(changed: Sequence[Change]) -> Iterator[str]:
    """Yield changes that alter the order of sums, and so the last bits; a checkpoint does not record these settings."""
    for each in changed:
        is_other = any(fnmatchcase(each.key, pattern) for pattern in _ORDER_SUMS)
        if is_other or (each.key == "backbone.sharding" and "hybrid" in (each.old, each.new)):
            yield f"{each.key} was {each.old}, is now {each.new}: losses agree only closely"
