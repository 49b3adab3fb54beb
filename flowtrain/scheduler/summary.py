"""Figures of a step plan, as the metrics show them."""

from __future__ import annotations

from flowtrain.types import StepPlan


def imbalance(plan: StepPlan) -> float:
    """Return ``max / mean - 1`` of the DP ranks' summed costs: how much dearer the dearest rank is, 0 if even."""
    costs = [sum(microbatch.cost for microbatch in plan.rank_microbatches(rank)) for rank in range(plan.dp_size)]
    mean = sum(costs) / len(costs)
    return max(costs) / mean - 1.0 if mean > 0.0 else 0.0


def packing_fill(plan: StepPlan) -> float:
    """Return the share, 0 to 1, of the microbatches' capacity that tokens fill; weightless microbatches count."""
    return plan.num_tokens / (plan.num_microbatches * plan.microbatch_tokens)
