"""The training step of one backbone rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flowtrain.config.run import RunConfig
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.models.parallel_layers import local_shard
from flowtrain.pipeline.actions import Action, MemoryStrategy, Schedule
from flowtrain.pipeline.configured import configured_memory
from flowtrain.pipeline.executor import carried_schedule, checked_schedule, execute
from flowtrain.training import checkpoint, kept_snapshot
from flowtrain.training.batch import PackedBatch
from flowtrain.training.checkpoint_writer import write_snapshot
from flowtrain.training.chunks import BackboneSource, ModelChunks, build_chunks
from flowtrain.training.frozen import describe_frozen, frozen_parts, merged_digests
from flowtrain.training.kept_snapshot import KeptSnapshot
from flowtrain.training.loss import UnitTotals, actual_denominator, planned_denominator
from flowtrain.training.memory_guard import MemoryGuard
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.nonfinite import state_is_finite
from flowtrain.training.optimizer import (
    build_optimizer,
    clip_factor,
    gradients_of,
    learning_rate_factor,
    scale_gradients,
    set_learning_rate,
    sum_of_squares,
)
from flowtrain.training.snapshot import HostBuffers, Snapshot, copy_nbytes, take_snapshot
from flowtrain.training.spikes import LossWindow
from flowtrain.training.stages import Stages
from flowtrain.training.tied import TiedEmbeddings
from flowtrain.training.work_spans import SpanRecorder
from flowtrain.types.messages import SampleLoss
from flowtrain.types.plan import StepPlan, UnitKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a unit; equal on all ranks, except ``sample_losses``."""

    loss: float
    """Under the configured normalisation. 0 if every sample was rejected: num_samples is 0, and no update was made."""
    grad_norm: float | None
    """Global L2 norm before clipping; None for an evaluation."""
    lr: float | None
    """Learning rate of the modules without a rate of their own; None for an evaluation."""
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    is_spike: bool = False
    """The loss stood far above those before it, and the step made no update (``training.on_spike``)."""
    sample_losses: tuple[SampleLoss, ...] = ()
    """Only those of the samples whose loss this rank computed; empty unless the data has several sources."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite; a training step that is not makes no update."""
        return math.isfinite(self.loss) and (self.grad_norm is None or math.isfinite(self.grad_norm))


class Trainer:
    """Runs units on one rank: `begin_unit`, then the actions that it returns through `stages`, then `finish_unit`.

    Every rank runs the same number of microbatches per unit, weightless ones included, because forward and backward
    contain collectives, and the pipeline's transfers happen between them. Sets torch's thread count to
    ``backbone.num_threads``, since results depend on it.

    group: the process groups, with degrees, rank and device.
    num_steps: training steps of the run, for the learning rate schedule.
    record: gets the spans ``forward``, ``backward``, ``optimizer``; on an accelerator once the device has passed them
        and ``stages.spans.collect`` is called.
    before_optimizer: gets the model with its full, corrected gradients before clipping (for tests).
    resume_from: a checkpoint's directory, or this rank's snapshot; of the model's first weights only frozen ones are
        then read.
    """

    def __init__(
        self,
        config: RunConfig,
        family: BackboneSource,
        group: BackboneGroup,
        num_steps: int,
        *,
        record: SpanRecorder | None = None,
        before_optimizer: Callable[[ModelChunks], None] | None = None,
        resume_from: Path | KeptSnapshot | None = None,
    ) -> None:
        if {"connector", "backbone", "encoders"} <= set(config.frozen_modules):
            raise ConfigError("model.freeze leaves nothing to train; take connector or backbone out of it")
        torch.set_num_threads(config.backbone.num_threads)
        self.config, self.group, self.num_steps = config.training, group, num_steps
        self._run_config = config
        self._before_optimizer = before_optimizer
        self.model = build_chunks(config, family, group, from_checkpoint=resume_from is not None)
        self._memory = configured_memory(config, self.model.partition)
        self.optimizer = build_optimizer(self.model.named_parameters(), self.config, self.model.tied)
        self._tied = TiedEmbeddings(self.model, group)
        self.stages = Stages(
            self.model,
            group,
            dtype=getattr(torch, config.model.dtype),
            reduces_each=config.backbone.gradient_reduction == "microbatch",
            take_loss=self._take_loss,
            record=record,
            row_losses=len(config.data.sources) > 1,  # with one source its loss is that of the step
        )
        self.recent: LossWindow | None = None if self.config.on_spike == "off" else LossWindow()
        """The losses by which a spike is known; None: no step is one."""
        self._plan: StepPlan | None = None
        self._totals = UnitTotals()
        self._loss_sums: list[torch.Tensor] = []
        self._row_losses: list[tuple[PackedBatch, torch.Tensor]] = []
        self._next_tokens: list[torch.Tensor] = []
        self._frozen_parts, self._merged_digests = frozen_parts(self.model, group), merged_digests(family, group)
        self._frozen: dict[str, Any] | None = None
        self._guard: MemoryGuard | None = None
        if isinstance(resume_from, KeptSnapshot):
            kept_snapshot.restore(resume_from, self.model, self.optimizer, self.group, self.described_frozen)
        elif resume_from is not None:
            self.load_checkpoint(resume_from)

    def guard_memory(self, guard: MemoryGuard) -> None:
        """Let a guard look at the memory of every training step, and recompute more where it took too much."""
        self._guard = guard

    def begin_unit(self, plan: StepPlan) -> tuple[Action, ...]:
        """Start a unit and return this rank's actions; the executor runs them through ``stages``."""
        degrees = self.group.degrees
        assert plan.dp_size == degrees.dp, (plan.dp_size, degrees)
        assert self._plan is None, "the unit before has not been finished"
        self._plan = plan
        self._totals, self._loss_sums, self._row_losses = UnitTotals(), [], []
        training = plan.unit.kind is UnitKind.TRAIN
        self.model.train(training)
        # FSDP averages over the replicas; the loss is a sum over them.
        scale = degrees.dp / planned_denominator(plan, self.config.loss_normalization)
        actions = self._schedule(plan)[self.group.pp_rank]
        self.stages.begin(scale if training else None, actions)
        return actions

    def _schedule(self, plan: StepPlan) -> Schedule:
        """The lists of this replica's pipeline ranks: those that the plan carries, else the named schedule's."""
        training, size = plan.unit.kind is UnitKind.TRAIN, plan.num_slots
        partition = self.model.partition
        carried = plan.schedules[self.group.dp_rank] if plan.schedules else ()
        if carried:
            return carried_schedule(carried, partition, num_microbatches=size, training=training, memory=self._memory)
        return self._named_schedule(size, training)

    def _named_schedule(self, num_microbatches: int, training: bool) -> Schedule:
        return checked_schedule(
            self._run_config.pipeline.schedule,
            self.model.partition,
            num_microbatches=num_microbatches,
            training=training,
            memory=self._memory if training else MemoryStrategy.KEEP,
        )

    def next_tokens(self, batches: Sequence[PackedBatch]) -> list[int]:
        """Run microbatches that ask for next tokens; returns these in their order, on ranks of the last stage alone.

        Collective, between two units, with as many microbatches on every rank. Sharded parameters stay whole until
        ``ModelChunks.reshard``.
        """
        assert self._plan is None and self.stages.is_idle, "a unit has not been finished"
        self.model.train(False)
        actions = self._named_schedule(len(batches), training=False)[self.group.pp_rank]
        self.stages.begin(None, actions)
        execute(actions, self.stages, lambda number: batches[number])
        found, self._next_tokens = self._next_tokens, []  # the last stage runs microbatches in their order
        return torch.cat(found).tolist() if found else []

    def finish_unit(self) -> StepResult:
        """Reduce the totals; in training, also correct the gradients for rejected samples, clip and update."""
        assert self._plan is not None and self.stages.is_idle
        plan, self._plan = self._plan, None
        totals = self._reduced_totals()
        actual = actual_denominator(totals, self.config.loss_normalization)
        if plan.unit.kind is UnitKind.EVAL:
            self.model.reshard()  # an evaluation has no backward that does it
            return _result(totals, actual, None, None)
        factor = learning_rate_factor(plan.unit.step, self.num_steps, self.config)
        grad_norm, is_spike = 0.0, False
        with self.stages.spans.span("optimizer", step=plan.unit.step):
            if actual:
                correction = planned_denominator(plan, self.config.loss_normalization) / actual
                is_spike = self.recent is not None and self.recent.is_spike(totals.loss_sum / actual)
                grad_norm = self._update(correction, factor, math.isfinite(totals.loss_sum) and not is_spike)
            else:
                logger.warning("step %d: every sample was rejected, the weights stay as they are", plan.unit.step)
            self.optimizer.zero_grad(set_to_none=True)
        if self._guard is not None and (changed := self._guard.after_step(self._memory)) is not None:
            self._memory = changed
        result = _result(totals, actual, grad_norm, self.config.learning_rate * factor)
        if self.recent is not None and actual and result.is_finite and not is_spike:
            self.recent.add(result.loss)
        return replace(result, is_spike=is_spike, sample_losses=self._sample_losses())

    def _update(self, correction: float, lr_factor: float, loss_is_healthy: bool) -> float:
        """One optimizer step, if all is healthy; returns the norm of the gradients before clipping."""
        self._tied.sum_gradients()
        gradients = gradients_of(self.optimizer)
        if correction != 1.0:
            scale_gradients(gradients, correction)
        if self._before_optimizer is not None:
            self._before_optimizer(self.model)
        norm = self._gradient_norm()
        self.stages.spans.caught_up()  # the host has waited for the norm
        if not (loss_is_healthy and math.isfinite(norm)):
            return norm  # see training/health.py
        if (clip := clip_factor(norm, self.config.max_grad_norm)) < 1.0:
            scale_gradients(gradients, clip)
        set_learning_rate(self.optimizer, lr_factor)
        self.optimizer.step()
        return norm

    def _gradient_norm(self) -> float:
        """Global L2 norm over replicas, stages and tensors; every parameter of the model counts once."""
        counted = [
            parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and name not in self._tied.copies
        ]
        total = torch.tensor([sum_of_squares(counted)], dtype=torch.float64)
        dist.all_reduce(total, group=self.group.process_group)
        return float(total.sqrt())

    def state_is_finite(self) -> bool:
        """Whether the trained weights and their optimizer state are finite on all ranks; collective."""
        return state_is_finite(self.optimizer, self.group)

    def snapshot(self, buffers: HostBuffers | None) -> Snapshot:
        """Take this rank's state; copied into ``buffers``, where they are given."""
        return take_snapshot(self.model, self.optimizer, self.group, buffers)

    def write_snapshot(self, directory: Path, snapshot: Snapshot) -> str | None:
        """Write a snapshot into the temporary ``directory``, in any thread; collective.

        Returns why the file system refused it, or None. See ``training/checkpoint_writer.py``.
        """
        return write_snapshot(directory, snapshot, self.model.tied, self.described_frozen(), self.group)

    def save_checkpoint(self, directory: Path) -> None:
        """Write this rank's share into the temporary ``directory``; collective. Raises CheckpointError on failure."""
        if (problem := self.write_snapshot(directory, self.snapshot(None))) is not None:
            raise CheckpointError(f"checkpoint {directory} could not be written: {problem}")

    def load_checkpoint(self, directory: Path) -> None:
        """Load weights, optimizer state and, at the same degrees, random state; collective."""
        checkpoint.load(directory, self.model, self.optimizer, self.group, self._run_config, self.described_frozen)

    def described_frozen(self) -> dict[str, Any]:
        """Origin and digest of what is frozen; collective at the first call."""
        if self._frozen is None:  # frozen weights stay as they are, so once is enough
            parts = self._frozen_parts
            self._frozen = describe_frozen(parts, self._merged_digests, self._run_config, self.group)
        return self._frozen

    def copy_nbytes(self) -> int:
        """Host memory that the copies of a snapshot take, once the optimizer has its state."""
        return self._with_optimizer(copy_nbytes)

    def state_nbytes(self) -> int:
        """Bytes of this rank's trained weights and optimizer state."""
        return self._with_optimizer(lambda parameter: local_shard(parameter).nbytes)

    def _with_optimizer(self, nbytes_of: Callable[[torch.Tensor], int]) -> int:
        adam = 2 if self.config.optimizer == "adamw" else 0
        return sum(nbytes_of(each) * (1 + adam) for _, each in self.model.named_parameters() if each.requires_grad)

    def _take_loss(self, batch: PackedBatch, loss_sum: torch.Tensor, row_losses: torch.Tensor | None) -> None:
        """Count a microbatch; only one rank of its replica counts. Instead of a loss it may give next tokens."""
        if batch.next_index is not None:
            self._next_tokens.append(loss_sum)
        elif self.group.tp_rank == 0:
            self._totals = self._totals.plus(batch)
            self._loss_sums.append(loss_sum)
            if row_losses is not None:
                self._row_losses.append((batch, row_losses))

    def _sample_losses(self) -> tuple[SampleLoss, ...]:
        """The losses of this rank's samples; fetches those of all tokens from the device, once."""
        if not self._row_losses:
            return ()
        batches, rows = zip(*self._row_losses, strict=True)
        losses = torch.cat(rows).cpu().numpy()
        counts = [count for batch in batches for count in batch.targets_per_sample]
        # A sample whose loss is not finite leaves the others as they are.
        sums = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=losses, minlength=len(counts)).tolist()
        positions = [position for batch in batches for position in batch.positions]
        by_token = self.config.loss_normalization == "token"
        return tuple(
            [
                SampleLoss(position, loss, count if by_token else 1)
                for position, loss, count in zip(positions, sums, counts, strict=True)
            ]
        )

    def _reduced_totals(self) -> UnitTotals:
        """All ranks' totals; fetches the microbatches' losses from the device, once, and adds them in float64."""
        loss_sum = sum(torch.stack(self._loss_sums).tolist()) if self._loss_sums else 0.0
        reduced = replace(self._totals, loss_sum=loss_sum).to_tensor()
        dist.all_reduce(reduced, group=self.group.process_group)
        return UnitTotals.from_tensor(reduced)


def _result(totals: UnitTotals, denominator: int, grad_norm: float | None, lr: float | None) -> StepResult:
    return StepResult(
        loss=totals.loss_sum / denominator if denominator else 0.0,
        grad_norm=grad_norm,
        lr=lr,
        num_samples=int(totals.num_samples),
        num_tokens=int(totals.num_tokens),
        num_target_tokens=int(totals.num_target_tokens),
    )
