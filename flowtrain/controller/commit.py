"""Completes the checkpoints that the ranks wrote, once ledger and metrics cover them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from flowtrain.config.resume import config_digest
from flowtrain.config.run import RunConfig
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.recorder import Recorder
from flowtrain.errors import CheckpointError
from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.run_dir import RunDir
from flowtrain.training import checkpoint_store
from flowtrain.training.checkpoint_store import CheckpointMeta
from flowtrain.types.events import CheckpointFailed, CheckpointWritten
from flowtrain.types.run_events import CheckpointFinished


class Committer:
    """Commits a run's checkpoints. One that cannot become complete does not end training: the next one is tried.

    note: shows a line to the user. completed: receives each checkpoint that is complete.
    """

    def __init__(
        self,
        run_spec: RunSpec,
        files: RunDir,
        recorder: Recorder,
        costs: CostKeeper,
        note: Callable[[str], None],
        completed: Callable[[CheckpointFinished], None] = lambda event: None,
    ) -> None:
        self._run_spec = run_spec
        self._config = run_spec.config
        self._files = files
        self._recorder = recorder
        self._costs = costs
        self.gradient_reduction: str | None = None
        """As the ranks decided it; None until they have."""
        self._note = note
        self._completed = completed
        self._cost_file = Diagnostic(files.profile.name, retries=True)
        self._incomplete: CheckpointWritten | None = None

    def commit(self, written: CheckpointWritten) -> None:
        """Make a checkpoint complete once ledger and metrics cover it; also write the measured costs."""
        self._cost_file.attempt(self._costs.write)
        if self._incomplete is not None and self._incomplete.directory != written.directory:
            self._drop_incomplete()  # this one replaces it, and needs the room
        try:
            self._complete(written)
        except (OSError, CheckpointError) as error:
            self._incomplete = written
            self._note(
                f"the checkpoint of step {written.step} is not complete: {error}; training goes on, and the next "
                "checkpoint tries again"
            )

    def failed(self, failure: CheckpointFailed) -> None:
        """Tell the user that ranks could not write a checkpoint, and make room for the next try."""
        self._drop_incomplete()
        self._note(
            f"the checkpoint of step {failure.step} was not written: {failure.reason}; training goes on, and the next "
            "checkpoint tries again"
        )

    def _drop_incomplete(self) -> None:
        if self._incomplete is not None:
            shutil.rmtree(self._incomplete.directory, ignore_errors=True)
        self._incomplete = None

    def forget_incomplete(self) -> None:
        """Give up a checkpoint that is not complete: its steps are done again."""
        self._drop_incomplete()

    def finish(self) -> None:
        """Complete the last checkpoint if that failed before; raises CheckpointError if it fails again."""
        written = self._incomplete
        if written is None:
            return
        try:
            self._complete(written)
        except (OSError, CheckpointError) as error:
            last = checkpoint_store.latest_complete(self._files.checkpoints)
            raise CheckpointError(
                f"the last checkpoint, of step {written.step}, could not be made complete: {error}. With --resume the "
                f"run goes on {f'from {last}' if last else 'from the beginning, since it has no other checkpoint'}"
            ) from error

    def _complete(self, written: CheckpointWritten) -> None:
        started_s = time.monotonic()
        self._recorder.flush(written.step)
        settings = self._config.checkpoint
        final = checkpoint_store.commit(
            Path(written.directory), self._meta(written.step), settings.keep, settings.keep_best
        )
        self._recorder.forget_before(written.step)
        self._incomplete = None
        duration_s = written.duration_s + time.monotonic() - started_s
        event = CheckpointFinished(
            step=written.step, duration_s=duration_s, nbytes=_nbytes(final), best_of=self._best_of(final)
        )
        self._completed(event)

    def _best_of(self, final: Path) -> str | None:
        """Return the metric by which a checkpoint is the best of those that are there."""
        metric = self._config.checkpoint.keep_best
        best = checkpoint_store.best_first(self._files.checkpoints, metric) if metric is not None else []
        return metric if best[:1] == [final] else None

    def _meta(self, step: int) -> CheckpointMeta:
        degrees = self._run_spec.plan.backbone.degrees
        sampler = self._recorder.sampler_states[step]
        return CheckpointMeta(
            step=step,
            state={"sampler": sampler.to_dict(), "cost": asdict(self._costs.in_use)},
            config_digest=config_digest(self._config),
            dp_size=degrees.dp,
            pp_size=degrees.pp,
            tp_size=degrees.tp,
            mode=self._config.mode,
            partition=self._run_spec.partition.text,
            trained=_trained(self._config),
            num_threads=self._config.backbone.num_threads,
            torch_version=str(torch.__version__),
            gradient_reduction=self.gradient_reduction,
            metrics=self._recorder.eval_metrics(step),
        )


def _trained(config: RunConfig) -> tuple[str, ...]:
    """The keys of the modules that are trained."""
    modules = [name for name in ("connector", "backbone") if name not in config.frozen_modules]
    return (*modules, *(f"encoders.{name}" for name, encoder in config.encoders.items() if encoder.trainable))


def _nbytes(directory: Path) -> int | None:
    """Bytes of a checkpoint's files; None if they cannot be looked at."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in directory.iterdir())
    return None
