"""The resume point: where a run begins, at step 0 or after the last complete checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from flowtrain.allocator.plan import read_plan
from flowtrain.config.resume import TRAINED_BEFORE, Change, changes
from flowtrain.config.run import RunConfig
from flowtrain.config.yaml_text import dotted
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.reach import usable_checkpoint
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.observability.run_dir import RunDir, run_dir
from flowtrain.pipeline.partition import build_partition
from flowtrain.training import checkpoint_store
from flowtrain.types.plan import CostModel, Degrees, GradientReduction, StateOrigin
from flowtrain.types.run_plan import ENCODER_MODES
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
    in_memory: bool = False
    """The ranks' nodes keep the state in their memory; ``checkpoint`` is then that of an earlier step, or None."""

    @property
    def origin(self) -> StateOrigin:
        """From where ranks load their state."""
        if self.in_memory:
            return StateOrigin(snapshot_step=self.step)
        return StateOrigin(checkpoint=None if self.checkpoint is None else str(self.checkpoint))

    @property
    def text(self) -> str:
        """What a run goes on from, for a message."""
        if self.in_memory:
            return f"the snapshot of step {self.step} in its nodes' memory"
        return "the beginning" if self.checkpoint is None else f"the checkpoint of step {self.step}"


def consumed_at(point: ResumePoint) -> ConsumedPositions:
    """Return the positions that are trained at a resume point."""
    return ConsumedPositions.at(point.sampler_state) if point.sampler_state else ConsumedPositions()


def check_goes_on(files: RunDir, run_spec: RunSpec) -> None:
    """Raise ConfigError if metrics or ledger reach no checkpoint, or if the last step of a longer run was partial.

    Also if an encoder was trained that would be frozen now.

    Step k of any run trains the positions from (k - 1) * global_batch_size on. After a partial step, these would leave
    a gap after the trained positions.
    """
    usable = usable_checkpoint(files)
    if usable is None:
        return
    checkpoint, meta = usable.directory, usable.meta
    _check_trained(checkpoint, meta, run_spec.config)
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


def _check_trained(checkpoint: Path, meta: checkpoint_store.CheckpointMeta, config: RunConfig) -> None:
    for name, encoder in config.encoders.items():
        key = f"encoders.{name}"
        if key in meta.trained and not encoder.trainable:
            raise ConfigError.of(
                f"{key}.trainable",
                FaultCode.RESUME,
                f"{checkpoint} was written with {key}.trainable true, which is now false in mode {config.mode!r}; "
                f"{TRAINED_BEFORE}",
            )


def changed_since(files: RunDir, config: RunConfig) -> tuple[Change, ...]:
    """The keys that changed since the run was last started; empty if it never was.

    What the run's own plan had already is no change, even if its configuration had left it open.
    """
    if not files.config.is_file():
        return ()
    had: dict[str, object] = {}
    with suppress(ConfigError):  # a plan of an earlier version, or none
        had = {dotted(key): value for key, value in read_plan(files.plan).settings().items()}
    found = changes(files.load_config(), config)
    return tuple(each for each in found if each.key not in had or had[each.key] != each.new)


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
    for line in (*_inexact(meta, run_spec), *_other_sums(changed), *_exact_notes(meta, run_spec)):
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
    notes: tuple[str, ...] = ()
    """Other changes, after which losses are the same to the bit."""


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
    notes = tuple(_exact_notes(usable.meta, run_spec))
    return Resumption(files.root, usable.meta.step, changed, inexact, usable.older, notes)


def _inexact(meta: checkpoint_store.CheckpointMeta, run_spec: RunSpec) -> Iterator[str]:
    """Yield why losses after a checkpoint are not exact to the bit."""
    degrees = Degrees(meta.dp_size, meta.pp_size, meta.tp_size)
    reduction, configured = _reduction_of(meta), run_spec.config.backbone.gradient_reduction
    for name, then, now in (
        ("mode", meta.mode, run_spec.config.mode),
        ("degrees", degrees, run_spec.plan.backbone.degrees),
        ("backbone.gradient_reduction", reduction, reduction if configured == "auto" else configured),
        ("backbone threads", meta.num_threads, run_spec.config.backbone.num_threads),
        ("torch", meta.torch_version, str(torch.__version__)),
    ):
        if then != now and not (name == "mode" and {then, now} <= ENCODER_MODES):
            yield _differs(name, then, now)
    if meta.mode == run_spec.config.mode and degrees == run_spec.plan.backbone.degrees:
        then, now = _partition_of(meta, run_spec), run_spec.partition.text
        if then != now:
            yield _differs("the partition", then, now)


def _exact_notes(meta: checkpoint_store.CheckpointMeta, run_spec: RunSpec) -> Iterator[str]:
    """Yield what changes although losses stay the same."""
    then, now = meta.mode, run_spec.config.mode
    if then != now and {then, now} <= ENCODER_MODES:
        yield f"the run was in mode {then}, now {now}: losses stay the same, since encoders have the same batches"


def _partition_of(meta: checkpoint_store.CheckpointMeta, run_spec: RunSpec) -> str:
    text = meta.partition
    if not text.startswith(checkpoint_store.EVEN_CHUNKS):
        return text
    chunks = int(text.removeprefix(checkpoint_store.EVEN_CHUNKS))
    return build_partition(run_spec.model_spec.backbone.num_layers, meta.pp_size, chunks).text


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
