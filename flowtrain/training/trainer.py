"""The training step of one backbone rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flowtrain.config.run import RunConfig
from flowtrain.training import checkpoint
from flowtrain.training.batch import PackedBatch
from flowtrain.training.loss import UnitTotals, actual_denominator, planned_denominator
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.optimizer import (
    build_optimizer,
    clip_gradients,
    gradients_of,
    learning_rate_factor,
    scale_gradients,
    set_learning_rate,
)
from flowtrain.types import StepPlan, UnitKind

if TYPE_CHECKING:
    from flowtrain.models.backbone import Backbone

logger = logging.getLogger(__name__)


class SpanRecorder(Protocol):
    """Takes a timed stretch of work; times are seconds since the Unix epoch."""

    def __call__(self, name: str, start_s: float, end_s: float, **args: int | float | str) -> None:
        """Take one span; ``args`` go into the trace."""


class BackboneSource(Protocol):
    """The part of a model family that the trainer needs."""

    def load_backbone(self) -> Backbone:
        """Connector and language model with float32 master weights on the CPU, equal on every rank.

        Frozen modules do not require gradients; activation checkpointing is already turned on where configured.
        """


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a unit came to; equal on all ranks.

    loss: under the configured normalisation; 0 when every sample was rejected (num_samples is 0 then, and a training
    step made no update). grad_norm: before clipping. grad_norm and lr are None for an evaluation. lr: of the modules
    without a rate of their own.
    """

    loss: float
    grad_norm: float | None
    lr: float | None
    num_samples: int
    num_tokens: int
    num_target_tokens: int


class Trainer:
    """Runs units on one rank: `begin_unit`, then its microbatches, then `finish_step` or `finish_eval`.

    Every rank runs the same number of microbatches a unit, the weightless ones included, since FSDP's collectives lie
    in their forward and backward. The model is sharded also on a single rank (FSDP2 copies locally then): one path for
    mixed precision, checkpoints and gradients. Its gradients were seen equal to the plain model's bit for bit, and a
    step 2 % (256 wide) to 11 % (128 wide) longer on a CPU.

    group: where the ranks meet; it also says rank, size and device. num_steps: training steps of the run, for the
    schedule. record: takes the spans ``forward``, ``backward``, ``optimizer``; on an accelerator each span
    waits for the device, so set it to None once the trace is complete.
    before_optimizer: sees the model with its full, corrected gradients before clipping (for tests). Sets torch's thread
    count to ``backbone.num_threads``, since results depend on it.
    """

    def __init__(
        self,
        config: RunConfig,
        family: BackboneSource,
        group: BackboneGroup,
        num_steps: int,
        *,
        record: SpanRecorder | None = None,
        before_optimizer: Callable[[nn.Module], None] | None = None,
    ) -> None:
        torch.set_num_threads(config.backbone.num_threads)
        self.config, self.group, self.num_steps = config.training, group, num_steps
        self.record, self._before_optimizer = record, before_optimizer
        self.model = family.load_backbone().train()
        self._shard(config.model.dtype)
        self.optimizer = build_optimizer(self.model, self.config)
        self._plan: StepPlan | None = None
        self._totals = UnitTotals()
        self._loss_sums: list[torch.Tensor] = []
        self._losses: dict[int, torch.Tensor] = {}

    def _shard(self, dtype: str) -> None:
        """Wrap the decoder layers and the root; parameters become DTensors on the axis ``dp``."""
        if dtype == "bfloat16":
            # Inputs are not cast: the loss weights among them must stay float32.
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        else:
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        self.model.to(self.group.device)
        for layer in self.model.decoder_layers:
            fully_shard(layer, mesh=self.group.mesh, mp_policy=policy)
        fully_shard(self.model, mesh=self.group.mesh, mp_policy=policy)

    def begin_unit(self, plan: StepPlan) -> None:
        """Start a unit; its plan gives the denominator of the loss."""
        assert plan.dp_size == self.group.world_size, (plan.dp_size, self.group.world_size)
        assert self._plan is None, "the unit before has not been finished"
        self._plan = plan
        self._totals, self._loss_sums = UnitTotals(), []
        self.model.train(plan.unit.kind is UnitKind.TRAIN)

    def forward_microbatch(self, index: int, batch: PackedBatch) -> None:
        """Forward of a training microbatch; keeps its loss under ``index`` until `backward_microbatch`."""
        assert self._plan is not None and self._plan.unit.kind is UnitKind.TRAIN, "begin_unit with a training plan"
        start_s = time.time()
        loss_sum = self.model(**batch.forward_kwargs())
        self._span("forward", start_s, index, batch)
        self._count(batch, loss_sum)
        self._losses[index] = loss_sum

    def backward_microbatch(self, index: int, batch: PackedBatch, *, is_last: bool) -> None:
        """Backward of a microbatch; on the rank's last one of the step, gradients are summed over the ranks."""
        assert self._plan is not None
        start_s = time.time()
        fsdp = _as_fsdp(self.model)
        fsdp.set_requires_gradient_sync(is_last)
        fsdp.set_is_last_backward(is_last)
        # FSDP averages over the ranks; the loss is a sum over them.
        scale = self.group.world_size / planned_denominator(self._plan, self.config.loss_normalization)
        (self._losses.pop(index) * scale).backward()
        self._span("backward", start_s, index, batch)

    def train_microbatch(self, batch: PackedBatch, is_last: bool, index: int = 0) -> None:
        """Forward and backward of one microbatch; ``index`` names it in the trace."""
        self.forward_microbatch(index, batch)
        self.backward_microbatch(index, batch, is_last=is_last)

    def finish_step(self) -> StepResult:
        """Reduce the totals, correct the gradients for samples rejected after planning, clip, update."""
        assert self._plan is not None and self._plan.unit.kind is UnitKind.TRAIN and not self._losses
        plan, totals = self._plan, self._reduced_totals()
        start_s = time.time()
        planned = planned_denominator(plan, self.config.loss_normalization)
        actual = actual_denominator(totals, self.config.loss_normalization)
        factor = learning_rate_factor(plan.unit.step, self.num_steps, self.config)
        grad_norm = 0.0
        if actual:
            gradients = gradients_of(self.optimizer)
            if actual != planned:
                scale_gradients(gradients, planned / actual)
            if self._before_optimizer is not None:
                self._before_optimizer(self.model)
            grad_norm = clip_gradients(gradients, self.config.max_grad_norm)
            set_learning_rate(self.optimizer, factor)
            self.optimizer.step()
        else:
            logger.warning("step %d: every sample was rejected, the weights stay as they are", plan.unit.step)
        self.optimizer.zero_grad(set_to_none=True)
        self._span("optimizer", start_s)
        return self._finish(totals, actual, grad_norm, self.config.learning_rate * factor)

    def eval_microbatch(self, batch: PackedBatch, index: int = 0) -> None:
        """Forward of one evaluation microbatch, without gradients."""
        assert self._plan is not None and self._plan.unit.kind is UnitKind.EVAL, "begin_unit with an evaluation plan"
        start_s = time.time()
        with torch.no_grad():
            loss_sum = self.model(**batch.forward_kwargs())
        self._span("forward", start_s, index, batch)
        self._count(batch, loss_sum)

    def finish_eval(self) -> StepResult:
        """Reduce the totals of an evaluation round."""
        assert self._plan is not None and self._plan.unit.kind is UnitKind.EVAL
        # Without a backward nothing else puts the root's parameters back into shards.
        _as_fsdp(self.model).reshard()
        totals = self._reduced_totals()
        return self._finish(totals, actual_denominator(totals, self.config.loss_normalization), None, None)

    def save_checkpoint(self, directory: Path) -> None:
        """Write this rank's share into the temporary ``directory``; collective. See `training.checkpoint`."""
        checkpoint.save(directory, self.model, self.optimizer, self.group)

    def load_checkpoint(self, directory: Path) -> None:
        """Take over weights, optimizer state and, at the same world size, random state; collective."""
        checkpoint.load(directory, self.model, self.optimizer, self.group)

    def _count(self, batch: PackedBatch, loss_sum: torch.Tensor) -> None:
        self._totals = self._totals.plus(batch)
        self._loss_sums.append(loss_sum.detach())

    def _reduced_totals(self) -> UnitTotals:
        """All ranks' totals; the microbatches' losses are fetched from the device here, once, and added in float64."""
        loss_sum = sum(torch.stack(self._loss_sums).tolist()) if self._loss_sums else 0.0
        reduced = replace(self._totals, loss_sum=loss_sum).to_tensor()
        dist.all_reduce(reduced, group=self.group.process_group)
        return UnitTotals.from_tensor(reduced)

    def _finish(self, totals: UnitTotals, denominator: int, grad_norm: float | None, lr: float | None) -> StepResult:
        self._plan = None
        return StepResult(
            loss=totals.loss_sum / denominator if denominator else 0.0,
            grad_norm=grad_norm,
            lr=lr,
            num_samples=int(totals.num_samples),
            num_tokens=int(totals.num_tokens),
            num_target_tokens=int(totals.num_target_tokens),
        )

    def _span(self, name: str, start_s: float, index: int | None = None, batch: PackedBatch | None = None) -> None:
        if self.record is None:
            return
        if self.group.device.type != "cpu":
            torch.accelerator.synchronize(self.group.device)
        args = {} if index is None or batch is None else {"microbatch": index, "num_tokens": batch.num_tokens}
        self.record(name, start_s, time.time(), **args)


def _as_fsdp(model: nn.Module) -> FSDPModule:
    assert isinstance(model, FSDPModule)
    return model
