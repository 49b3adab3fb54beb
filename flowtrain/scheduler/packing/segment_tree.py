"""Best fit by a max segment tree over residual capacities, which finds the tightest open bin in O(log capacity)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowtrain.costs.flops import IntArray
from flowtrain.scheduler.compiled import compiled

Tree = npt.NDArray[np.int32]
"""The residual capacities, ``1..capacity``, of the open bins (FlowTrain 3.4, Algorithm 1, line 1).

Heap layout: children of node i are 2i and 2i + 1. The leaf of residual r is node ``num_leaves + r - 1``, so smaller
residuals lie to the left; it holds r while some open bin has r tokens left, else 0. An inner node holds the largest
value below it.
"""


@compiled
def empty_tree(capacity: int) -> Tree:
    """Return a tree without residuals; int32 ``[2 * num_leaves]``, with ``num_leaves >= capacity`` a power of two."""
    num_leaves = 1
    while num_leaves < capacity:
        num_leaves *= 2
    return np.zeros(2 * num_leaves, dtype=np.int32)


@compiled
def add(tree: Tree, residual: int) -> None:
    """Mark ``residual`` as present; marking it again changes nothing."""
    node = (len(tree) >> 1) + residual - 1
    while node and tree[node] < residual:
        tree[node] = residual
        node >>= 1


@compiled
def discard(tree: Tree, residual: int) -> None:
    """Mark ``residual``, which must be present, as absent."""
    node = (len(tree) >> 1) + residual - 1
    tree[node] = 0
    largest = 0
    while node > 1:
        largest = max(largest, tree[node ^ 1])  # of the sibling
        node >>= 1
        if tree[node] != residual:
            break
        tree[node] = largest


@compiled
def smallest_at_least(tree: Tree, need: int) -> int:
    """Return the smallest present residual that is ``>= need``, or 0 if there is none (Algorithm 1, lines 2-3)."""
    if tree[1] < need:
        return 0
    num_leaves, node = len(tree) >> 1, 1
    while node < num_leaves:
        # The left subtree has the smaller residuals, so it is taken if one of them is enough. The child is computed
        # without a branch, since the processor could not predict it.
        node = 2 * node + (tree[2 * node] < need)
    return int(tree[node])


@compiled
def best_fit_numbers(tokens: IntArray, order: IntArray, capacity: int) -> tuple[IntArray, int]:
    """Put each sample, in the order given, into the open bin that it fills most tightly (Algorithm 1, lines 1-11).

    Of equally tight bins, the one that reached this state last is taken. tokens: int64 ``[num_samples]``, each 1 to
    ``capacity``. order: int64 ``[num_samples]``, a permutation. Returns each sample's bin, int64 ``[num_samples]``, and
    the number of bins; bins are numbered in the order in which they were opened.
    """
    number = np.empty(len(tokens), dtype=np.int64)
    shortest = capacity
    for length in tokens:
        assert 1 <= length <= capacity
        shortest = min(shortest, length)
    tree = empty_tree(capacity)
    top = np.empty(capacity + 1, dtype=np.int64)  # first bin of a present residual's chain
    below = np.empty(len(tokens), dtype=np.int64)  # next bin in a bin's chain, -1 at its end
    num_bins = 0
    for index in order:
        residual = smallest_at_least(tree, tokens[index])
        if residual:
            bin_number = top[residual]
            top[residual] = below[bin_number]
            if below[bin_number] < 0:
                discard(tree, residual)
        else:
            bin_number, residual = num_bins, capacity
            num_bins += 1
        number[index] = bin_number
        residual -= tokens[index]
        if residual >= shortest:  # otherwise no sample fits any more: the bin is closed
            present = tree[(len(tree) >> 1) + residual - 1] > 0
            below[bin_number] = top[residual] if present else -1
            top[residual] = bin_number
            add(tree, residual)
    return number, num_bins
