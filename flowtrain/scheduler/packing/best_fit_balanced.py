"""Few bins of even cost: best fit finds how many are needed, then a local search evens them out. The default method.

The paper packs first and reduces imbalance by dispatch alone (FlowTrain 3.4). Here the bins themselves are even, so
every slot and the step are balanced with any dispatch:

1. Best fit decreasing finds how many slots of ``dp_size`` bins suffice.
2. While the longest sample alone costs more than an even share, a slot for the ``dp_size`` longest samples is set
   apart. Its other bins are filled up to that cost, which does not make the step costlier.
3. The rest is dealt greedily: the costliest sample first, to the cheapest bin that has room. If a sample fits nowhere
   because bins are nearly full, the search starts from best fit's bins, with the costliest halved to fill the slots.
4. Moves and swaps between the bin that deviates most and others even the costs out, until it finds none that improves
   them (``even_out``).
5. If the bins are still uneven, because samples are long or few, the paper's bins are taken if they make the step
   cheaper.
"""

from __future__ import annotations

import numpy as np

from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.scheduler.equal_counts import with_equal_counts
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.packing.best_fit import best_fit
from flowtrain.scheduler.packing.best_fit_decreasing import best_fit_decreasing
from flowtrain.scheduler.packing.even_out import even_out
from flowtrain.scheduler.packing.sorting import descending_order
from flowtrain.scheduler.packing.starting_bins import deal, set_apart

GOOD = 0.01
"""A step that exceeds an even share of its cost by at most this share is accepted without trying other bins."""


def best_fit_balanced(lengths: Lengths, rules: PackingRules) -> Bins:
    """Pack into few slots and even out the costs of their bins; no bin is empty.

    The number of bins is a multiple of ``rules.dp_size``, or the number of samples if there are not more than that.
    """
    num_samples = len(lengths)
    if num_samples == 0:
        return Bins.by_number(np.zeros(0, dtype=np.int64), 0)
    assert lengths.tokens.min() >= 1 and lengths.tokens.max() <= rules.capacity
    start = best_fit_decreasing(lengths, rules)
    num_bins = -(-len(start) // rules.dp_size) * rules.dp_size
    if num_samples > num_bins:
        bins = _even_bins(start, num_bins, lengths, rules)
    else:
        bins = Bins.by_number(np.arange(num_samples, dtype=np.int64), num_samples)
    if _is_even(bins, lengths, rules):
        return bins
    as_they_come = with_equal_counts(best_fit(lengths, rules), lengths, rules)
    return _cheaper(bins, as_they_come, lengths, rules)


def _even_bins(start: Bins, num_bins: int, lengths: Lengths, rules: PackingRules) -> Bins:
    """Return ``num_bins`` even bins, none empty, of more than ``num_bins`` samples.

    start: best fit's bins, at most ``num_bins``.
    """
    order = descending_order(lengths.tokens)
    sizes, number = lengths.tokens[order], np.full(len(lengths), -1, dtype=np.int64)
    coefficients = rules.cost.per_token, rules.cost.per_longest, rules.cost.per_square
    first = set_apart(sizes, number, num_bins, rules.dp_size, rules.capacity, *coefficients)
    if not deal(sizes, number, first, num_bins, rules.capacity, *coefficients):
        # Start without empty bins: the search may find nothing to move into one.
        first, number[:] = 0, _numbers(with_equal_counts(start, lengths, rules))[order]
    even_out(sizes, number, first, num_bins, rules.capacity, *coefficients)
    in_order = np.empty_like(number)
    in_order[order] = number
    return Bins.by_number(in_order, num_bins)


def _numbers(bins: Bins) -> IntArray:
    """Return the number of each sample's bin."""
    number = np.empty(len(bins.members), dtype=np.int64)
    number[bins.members] = np.repeat(np.arange(len(bins)), np.diff(bins.offsets))
    return number


def _is_even(bins: Bins, lengths: Lengths, rules: PackingRules) -> bool:
    costs = bins.costs(lengths, rules.cost)
    return bool(_step_cost(costs, rules.dp_size) * rules.dp_size <= (1.0 + GOOD) * costs.sum())


def _cheaper(bins: Bins, others: Bins, lengths: Lengths, rules: PackingRules) -> Bins:
    """Return the bins that make the step cheaper; ``bins`` if both cost the same."""
    cost, other = (_step_cost(each.costs(lengths, rules.cost), rules.dp_size) for each in (bins, others))
    return others if other < cost else bins


def _step_cost(costs: FloatArray, dp_size: int) -> float:
    """Return the sum over slots of the costliest bin, with bins dealt to slots in descending order of cost."""
    return float(np.sort(costs)[::-1][::dp_size].sum())
