"""Keeps a run from going on, or from saving its state, once training has diverged."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from flowtrain.config.training import TrainingConfig
from flowtrain.errors import NonFiniteError
from flowtrain.observability.metrics import read_metrics
from flowtrain.observability.run_dir import RunDir
from flowtrain.training import checkpoint_store
from flowtrain.training.nonfinite import NonFinitePolicy, Reaction
from flowtrain.training.spikes import WINDOW_STEPS
from flowtrain.training.trainer import StepResult, Trainer

logger = logging.getLogger(__name__)

COMMIT_LIMIT_S = 60.0
"""How long a rewind waits until the driver has completed the checkpoint that the ranks wrote last."""
COMMIT_POLL_S = 0.1


@dataclass(frozen=True)
class Verdict:
    """What a step meant for the run.

    rewound_to: step of the checkpoint to which weights and optimizer went back. error: ends the run.
    """

    rewound_to: int | None = None
    error: NonFiniteError | None = None


class TrainingHealth:
    """Watches one rank's steps; all ranks decide the same, and call each method at the same place.

    checkpoints: the run's directory of checkpoints.
    wait_saved: waits until this rank has written its last checkpoint, and returns that checkpoint's step; 0: none.
    """

    def __init__(
        self, config: TrainingConfig, trainer: Trainer, checkpoints: Path, wait_saved: Callable[[], int]
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._wait_saved = wait_saved
        self._policy = NonFinitePolicy(config.on_nonfinite, config.max_skipped_steps)
        on_spike = "skip" if config.on_spike == "off" else config.on_spike
        self._spikes = NonFinitePolicy(on_spike, config.max_skipped_steps)
        self._last: StepResult | None = None
        self._rewound_to: int | None = None
        self._is_save_put_off = False

    def recall(self, step: int) -> None:
        """Read the losses until ``step`` from the run's metrics, so that spikes are the same as without a resume.

        Metrics are complete up to the step of a checkpoint, or of a snapshot from which the run starts again.
        """
        if self._trainer.recent is not None:
            self._trainer.recent.replace(_losses_until(RunDir(self._checkpoints.parent).metrics, step))

    def after_step(self, step: int, result: StepResult) -> Verdict:
        """Judge a training step; rewinds if the policy says so."""
        if result.num_samples == 0:  # it made no update, and says nothing about the weights
            return Verdict()
        self._last = result
        rewound_to, self._rewound_to = self._rewound_to, None
        if result.is_finite:
            self._policy.after_step(True)
        if not result.is_spike:
            self._spikes.after_step(True)
        if result.is_finite and not result.is_spike:
            return Verdict(rewound_to)
        if self._is_lead:
            logger.warning(
                "step %d makes no update, since %s: loss %g, norm of the gradients %g",
                *(
                    step,
                    "its loss is a spike" if result.is_spike else "it is not finite",
                    result.loss,
                    result.grad_norm,
                ),
            )
        if result.is_spike:
            error = self._react(step, "steps whose loss is a spike", self._spikes)
        else:
            error = self._react(step, "steps whose loss or gradients are not finite", self._policy)
        latest, self._rewound_to = self._rewound_to, None
        return Verdict(rewound_to if latest is None else latest, error)

    def may_save(self, step: int) -> bool:
        """Whether the state after ``step`` may become a checkpoint: the last step and all weights are finite.

        Raises NonFiniteError if the weights are not, and the policy gives up.
        """
        if self._last is not None and not self._last.is_finite:
            if self._is_lead and not self._is_save_put_off:
                logger.warning("no checkpoint of step %d: it follows the next step that is finite", step)
            self._is_save_put_off = True
            return False
        self._is_save_put_off = False
        if self._trainer.state_is_finite():
            return True
        if self._is_lead:
            logger.warning("no checkpoint of step %d: weights or optimizer state are not finite", step)
        self.raise_together(self._react(step, "weights or optimizer state that are not finite", self._policy))
        return False

    def may_keep(self) -> bool:
        """Whether the state may become a snapshot: no step was skipped just now, and all weights are finite.

        A run that starts again from a snapshot counts skipped steps anew. Collective.
        """
        return self._policy.streak == 0 and self._spikes.streak == 0 and self._trainer.state_is_finite()

    def check_end(self, step: int) -> None:
        """Raise NonFiniteError if the run's state after its last step is of no use."""
        if self._last is None:
            return
        what = None
        if self._policy.streak > 1:
            what = f"the run ends with {self._policy.streak} steps in a row whose loss or gradients are not finite"
        elif not self._trainer.state_is_finite():
            what = "the run ends with weights or optimizer state that are not finite"
        if what is not None:
            self.raise_together(self._error(step, what, self._last_checkpoint()))

    def raise_together(self, error: NonFiniteError | None) -> None:
        """Raise an error, if there is one, once all ranks have reported their step."""
        if error is not None:
            dist.barrier(group=self._trainer.group.process_group)
            raise error

    def _react(self, step: int, what: str, policy: NonFinitePolicy) -> NonFiniteError | None:
        reaction = policy.after_step(False)
        if reaction is Reaction.GO_ON:
            return None
        last = self._last_checkpoint()
        if reaction is Reaction.STOP or last is None or not policy.may_rewind_to(last):
            return self._error(step, f"{what}, {policy.streak} in a row", last)
        directory = checkpoint_store.final_directory(self._checkpoints, last)
        if self._is_lead:
            logger.warning("after step %d weights and optimizer go back to %s; the data goes on", step, directory)
        self._trainer.load_checkpoint(directory)
        self._rewound_to = last
        return None

    def _last_checkpoint(self) -> int | None:
        """The step of the last intact checkpoint, found by rank 0, after the one that is being written."""
        saved = self._wait_saved()
        step = torch.zeros(1, dtype=torch.int64)
        if self._is_lead:
            directory = checkpoint_store.final_directory(self._checkpoints, saved)
            deadline = time.monotonic() + COMMIT_LIMIT_S
            while saved and checkpoint_store.problem_of(directory) is not None and time.monotonic() < deadline:
                time.sleep(COMMIT_POLL_S)
            latest = next(checkpoint_store.intact_newest_first(self._checkpoints), None)
            step[0] = checkpoint_store.read_meta(latest).step if latest is not None else 0
        # The other ranks add nothing, and wait while rank 0 reads; ``wait_saved`` has ended any other use of the group.
        dist.all_reduce(step, group=self._trainer.group.checkpoint_group)
        return int(step) or None

    def _error(self, step: int, what: str, checkpoint: int | None) -> NonFiniteError:
        config, result = self._config, self._last
        assert result is not None
        kept, resume = "there is no checkpoint to go back to", ""
        if checkpoint is not None:
            kept = f"the last healthy checkpoint is {checkpoint_store.final_directory(self._checkpoints, checkpoint)}"
            resume = (
                "; or, if only some data is bad (skipped_samples.jsonl has the rows of these steps), --resume with "
                "training.on_nonfinite=rewind or more training.max_skipped_steps"
            )
        return NonFiniteError(
            f"step {step}: training diverged: {what} (loss {result.loss:g}, norm of the gradients "
            f"{result.grad_norm:g}, learning rate {result.lr:g}); training.on_nonfinite is {config.on_nonfinite}, "
            f"training.on_spike is {config.on_spike} and training.max_skipped_steps is {config.max_skipped_steps}; "
            f"{kept}. Ways out: a lower training.learning_rate, more training.warmup_steps or a lower "
            f"training.max_grad_norm in a run under another name{resume}"
        )

    @property
    def _is_lead(self) -> bool:
        return self._trainer.group.rank == 0


def _losses_until(metrics: Path, step: int) -> Iterable[float]:
    """Return the losses of the last steps up to ``step`` that made an update, the oldest first."""
    losses: deque[float] = deque(maxlen=WINDOW_STEPS)
    if step:
        updated = (each for each in read_metrics(metrics) if each["step"] <= step and not each.get("skipped"))
        losses.extend(each["loss"] for each in updated if each["num_samples"] and each["loss"] is not None)
    return losses
