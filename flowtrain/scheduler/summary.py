"""Figures of a layout or a step plan: how even it is, how full, and how far from the lower bound."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowtrain.costs.flops import FloatArray
from flowtrain.types.plan import StepPlan


def slot_costs(plan: StepPlan) -> FloatArray:
    """Return the cost of each rank's microbatch in each slot; float64 ``[num_slots, dp_size]``."""
    return np.array(plan.costs).reshape(plan.num_slots, plan.dp_size)


def step_imbalance(costs: FloatArray) -> float:
    """Return ``max / mean - 1`` of the ranks' summed costs, 0 if even.

    costs: ``[num_slots, dp_size]``, as in the functions below.
    """
    totals = costs.sum(axis=0)
    mean = float(totals.mean())
    return float(totals.max()) / mean - 1.0 if mean > 0.0 else 0.0


def slot_imbalances(costs: FloatArray) -> FloatArray:
    """Return ``max / mean - 1`` inside each slot, whose microbatches run side by side; float64 ``[num_slots]``."""
    means = costs.mean(axis=1)
    return np.divide(costs.max(axis=1), means, out=np.ones_like(means), where=means > 0.0) - 1.0


def step_cost(costs: FloatArray) -> float:
    """Return the cost of a step whose ranks wait for each other in each slot: the sum of the slots' maxima."""
    return float(costs.max(axis=1).sum())


def step_cost_bound(costs: FloatArray, costliest_sample: float) -> float:
    """Return a lower bound of a step's cost for this work: the larger of an even share and the costliest sample."""
    return max(float(costs.sum()) / costs.shape[1], costliest_sample)


def dist_ratio(sizes: npt.NDArray[np.int64] | FloatArray) -> float:
    """Return OmniBal's DistRatio, the mean over slots of ``sum(max - size) / (max * ranks)`` (4.1, Eq. 2).

    sizes: of a slot's mini-batches on each rank, ``[num_slots, dp_size]``: tokens for the LLM, patches for the ViT.
    """
    largest = sizes.max(axis=1).astype(np.float64)
    idle = (largest[:, None] - sizes).sum(axis=1)
    ratios = np.divide(idle, largest * sizes.shape[1], out=np.zeros_like(largest), where=largest > 0)
    return float(ratios.mean()) if len(ratios) else 0.0


def pad_ratio(tokens: int, computed: int) -> float:
    """Return the share of computed tokens that is padding (OmniBal 4.1, Eq. 1)."""
    return 1.0 - tokens / computed if computed else 0.0


def packing_fill(plan: StepPlan) -> float:
    """Return the share, 0 to 1, of the microbatches' capacity that tokens fill; weightless microbatches count."""
    return plan.num_tokens / (plan.num_microbatches * plan.microbatch_tokens)


def imbalance(plan: StepPlan) -> float:
    """Return the step imbalance of a plan's DP ranks."""
    return step_imbalance(slot_costs(plan))
