"""How a run ended."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.reach import usable_checkpoint
from flowtrain.observability.metrics import read_metrics
from flowtrain.observability.run_dir import run_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    step: optimizer steps done in all. start_step: those done before this start. stopped: ended early on request; it can
    be resumed. duration_s: of this start. cost_r2: R2 of the costs fitted to this run's microbatches, None if too few
    were measured. num_skipped: steps that made no update, since they were not finite. emulated: what was emulated, in
    words; None if devices were real. host_warning: why its rates say little; None if they do not. tokens_per_s: without
    the first step of this start. planned_tokens_per_s: by the plan that ``mode: auto`` made. trackers_off: each tracker
    that was switched off, in words.
    """

    directory: Path
    step: int
    num_steps: int
    loss: float | None
    eval_loss: float | None
    num_rejected: int
    checkpoint: Path | None
    stopped: bool
    duration_s: float
    cost_r2: float | None = None
    num_skipped: int = 0
    emulated: str | None = None
    host_warning: str | None = None
    tokens_per_s: float | None = None
    planned_tokens_per_s: float | None = None
    trackers_off: tuple[str, ...] = ()
    start_step: int = 0


def summary_if_done(config: RunConfig, run_spec: RunSpec, started: float) -> RunSummary | None:
    """The summary of a run whose last step is checkpointed, so that Ray need not start; None for any other run."""
    files = run_dir(config)
    usable = usable_checkpoint(files)
    if usable is None:
        return None
    checkpoint, step = usable.directory, usable.meta.step
    if step < run_spec.num_steps:
        return None
    logger.warning(
        "%s is done: it has %d of %d steps; raise training.max_steps or training.num_epochs to go on",
        *(files.root, step, run_spec.num_steps),
    )
    steps = list(read_metrics(files.metrics))
    evaluated = [record["eval_loss"] for record in steps if record["eval_loss"] is not None]
    return RunSummary(
        directory=files.root,
        step=step,
        num_steps=run_spec.num_steps,
        loss=steps[-1]["loss"] if steps else None,
        eval_loss=evaluated[-1] if evaluated else None,
        num_rejected=steps[-1]["rejected"] if steps else 0,
        checkpoint=checkpoint,
        stopped=False,
        duration_s=time.monotonic() - started,
        start_step=step,
        num_skipped=steps[-1].get("skipped_steps", 0) if steps else 0,
    )
