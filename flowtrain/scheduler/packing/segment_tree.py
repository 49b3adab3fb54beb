"""A max segment tree over residual capacities, which answers best-fit queries in O(log capacity)."""

from __future__ import annotations


class ResidualTree:
    """The set of residual capacities in ``1..capacity`` that open bins have (FlowTrain 3.4, Algorithm 1, line 1).

    Leaf ``r`` holds ``r`` while some open bin has ``r`` tokens left, else 0; an inner node holds the largest value
    below it, so the smallest sufficient residual is found by one descent from the root.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1, capacity
        self._capacity = capacity
        self._num_leaves = 1 << (capacity - 1).bit_length()
        # Heap layout: children of i are 2i and 2i + 1; residual r lies in leaf num_leaves + r - 1.
        self._largest = [0] * (2 * self._num_leaves)

    def add(self, residual: int) -> None:
        """Mark ``residual`` as present; marking it again changes nothing."""
        assert 1 <= residual <= self._capacity, (residual, self._capacity)
        largest, node = self._largest, self._num_leaves + residual - 1
        while node and largest[node] < residual:
            largest[node] = residual
            node >>= 1

    def discard(self, residual: int) -> None:
        """Mark ``residual`` as absent."""
        assert 1 <= residual <= self._capacity, (residual, self._capacity)
        largest, node = self._largest, self._num_leaves + residual - 1
        largest[node] = 0
        while node > 1:
            node >>= 1
            below = max(largest[2 * node], largest[2 * node + 1])
            if largest[node] == below:
                break
            largest[node] = below

    def smallest_at_least(self, need: int) -> int:
        """Return the smallest present residual that is ``>= need``, or 0 if there is none (Algorithm 1, lines 2-3)."""
        largest, node = self._largest, 1
        if largest[1] < need:
            return 0
        while node < self._num_leaves:
            # The left subtree has the smaller residuals, so it is taken whenever it can serve.
            node *= 2
            if largest[node] < need:
                node += 1
        return largest[node]
