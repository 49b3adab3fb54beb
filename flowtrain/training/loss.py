"""Bookkeeping of the loss's normalisation over microbatches, ranks and samples rejected after planning.

The loss of a step is ``sum_t weight_t * nll_t / denominator`` over all its tokens. With ``token`` every target weighs 1
and the denominator is the step's number of target tokens. With ``sample`` a target weighs 1 / (targets of its sample)
and the denominator is the number of samples (PipeTune A.2). Each microbatch divides by the *planned* denominator. If
samples were rejected after planning, the accumulated gradient is corrected by planned / actual at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from flowtrain.training.batch import LossNormalization, PackedBatch
from flowtrain.types.plan import StepPlan


@dataclass(frozen=True, slots=True)
class UnitTotals:
    """Sums over the microbatches that ran: on one rank, or on all ranks after the all-reduce."""

    loss_sum: float = 0.0
    """Weighted token losses, not yet divided."""
    num_target_tokens: float = 0.0
    num_samples: float = 0.0
    num_tokens: float = 0.0

    def plus(self, batch: PackedBatch) -> UnitTotals:
        """Totals after one more microbatch, except its loss: the device may still be computing that."""
        return replace(
            self,
            num_target_tokens=self.num_target_tokens + batch.num_target_tokens,
            num_samples=self.num_samples + batch.num_samples,
            num_tokens=self.num_tokens + batch.num_tokens,
        )

    def to_tensor(self) -> torch.Tensor:
        """Float64 [4] on the CPU, for one small all-reduce (counts are exact below 2**53)."""
        return torch.tensor([getattr(self, field.name) for field in fields(self)], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> UnitTotals:
        """Inverse of `to_tensor`."""
        return cls(*tensor.tolist())


def planned_denominator(plan: StepPlan, normalization: LossNormalization) -> int:
    """Divisor of each microbatch's loss; at least 1, so that a unit without samples does not divide by 0."""
    return max(1, plan.num_target_tokens if normalization == "token" else plan.num_samples)


def actual_denominator(totals: UnitTotals, normalization: LossNormalization) -> int:
    """Denominator of the samples that ran; 0 if none of them carried loss."""
    return int(totals.num_target_tokens if normalization == "token" else totals.num_samples)
