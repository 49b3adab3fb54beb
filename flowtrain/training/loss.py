"""Bookkeeping of the loss's normalisation over microbatches, ranks and samples rejected after planning.

The loss of a step is ``sum_t weight_t * nll_t / denominator`` over all its tokens: with ``token`` every target weighs 1
and the denominator is the step's number of target tokens, with ``sample`` a target weighs 1 / (targets of its sample)
and the denominator is the number of samples (PipeTune A.2). Each microbatch divides by the *planned* denominator; where
samples were rejected after planning the accumulated gradient is corrected by planned / actual at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from flowtrain.training.batch import LossNormalization, PackedBatch
from flowtrain.types.plan import StepPlan


@dataclass(frozen=True, slots=True)
class UnitTotals:
    """Sums over what was really run: by one rank, or by all after the all-reduce.

    loss_sum: weighted token losses, not yet divided.
    """

    loss_sum: float = 0.0
    num_target_tokens: float = 0.0
    num_samples: float = 0.0
    num_tokens: float = 0.0

    def plus(self, batch: PackedBatch) -> UnitTotals:
        """Totals after one more microbatch, but for its loss, which may still be on its way on the device."""
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
    """What each microbatch's loss is divided by; at least 1, so that a unit without samples divides by something."""
    return max(1, plan.num_target_tokens if normalization == "token" else plan.num_samples)


def actual_denominator(totals: UnitTotals, normalization: LossNormalization) -> int:
    """Denominator of what was really run; 0 when nothing that bears loss was."""
    return int(totals.num_target_tokens if normalization == "token" else totals.num_samples)
