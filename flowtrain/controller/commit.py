"""Completes the checkpoints that the ranks wrote, once ledger and metrics cover them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from flowtrain.config.resume import config_digest
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.prepare import RunSpec
from flowtrain.controller.recorder import Recorder
from flowtrain.errors import CheckpointError
from flowtrain.observability.run_dir import RunDir
from flowtrain.training import checkpoint_store
from flowtrain.training.checkpoint_store import CheckpointMeta
from flowtrain.types.events import CheckpointWritten


class Committer:
    """Commits a run's checkpoints."""

    def __init__(self, run_spec: RunSpec, files: RunDir, recorder: Recorder, costs: CostKeeper) -> None:
        self._run_spec = run_spec
        self._config = run_spec.config
        self._files = files
        self._recorder = recorder
        self._costs = costs
        self.gradient_reduction: str | None = None
        """As the ranks decided it; None until they have."""

    def commit(self, written: CheckpointWritten) -> None:
        """Make a checkpoint complete once ledger and metrics cover it; also write the measured costs."""
        self._recorder.flush()
        self._costs.write()
        try:
            checkpoint_store.commit(Path(written.directory), self._meta(written.step), self._config.checkpoint.keep)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {written.directory} of step {written.step} could not be made complete: {error}"
            ) from error
        self._recorder.forget_before(written.step)

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
            num_chunks=self._config.backbone.chunks_per_rank,
            num_threads=self._config.backbone.num_threads,
            torch_version=str(torch.__version__),
            gradient_reduction=self.gradient_reduction,
        )
