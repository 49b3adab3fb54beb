"""The global order of samples: a weighted mixture of sources, each with its own epochs and a new shuffle per epoch.

Position p is a function of (sizes, weights, seed, shuffle) alone, and the state is a few integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from flowtrain.data.permutation import Permutation
from flowtrain.errors import CheckpointError
from flowtrain.types.samples import SampleRef, SamplerState


class Sampler:
    """Gives every position its sample.

    The mixture is exact: after n samples, the number from each source differs from its share of n by less than one.
    Each source has its own epochs: in each epoch, every row occurs once, in an order of this epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        assert len(sizes) == len(weights) > 0 and min(sizes) > 0 and min(weights) > 0
        self._sizes = tuple(sizes)
        self._seed = seed
        self._shuffle = shuffle
        # Exact decimal weights (0.1 is 1/10), scaled to integers, so that no position is rounded.
        exact = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(weight.denominator for weight in exact))
        self._weights = tuple(int(weight * denominator) for weight in exact)
        self._total_weight = sum(self._weights)
        self._next_position = 0
        self._counts = [0] * len(sizes)
        self._permutations: dict[int, tuple[int, Permutation]] = {}

    def take(self, num_samples: int) -> list[SampleRef]:
        """Draw the samples of the next ``num_samples`` positions."""
        return [self._draw() for _ in range(num_samples)]

    def state(self) -> SamplerState:
        """Return the state after the last drawn sample."""
        return SamplerState(self._next_position, tuple(self._counts), self._seed, self._sizes)

    def restore(self, state: SamplerState) -> None:
        """Continue from a state; raises CheckpointError if it comes from other data or another seed."""
        for name, stored, current in (("seed", state.seed, self._seed), ("rows", state.sizes, self._sizes)):
            if stored != current:
                raise CheckpointError(
                    f"the checkpoint's data order was drawn with {name} {stored}, this run has {name} {current}: "
                    "resume with the same seed and the same data, or start a new run"
                )
        assert sum(state.counts) == state.next_position and len(state.counts) == len(self._sizes)
        self._next_position = state.next_position
        self._counts = list(state.counts)

    def _draw(self) -> SampleRef:
        source = self._next_source()
        epoch, index = divmod(self._counts[source], self._sizes[source])
        row = self._permutation(source, epoch)[index] if self._shuffle else index
        ref = SampleRef(self._next_position, source, row, epoch)
        self._counts[source] += 1
        self._next_position += 1
        return ref

    def _next_source(self) -> int:
        """Choose, among the sources that are below their share, the one with the earliest deadline.

        The k-th sample of a source with share w must be placed in [floor(k / w), ceil((k + 1) / w)). Earliest deadline
        first keeps every source less than one sample from its share; choosing the largest deficit would not.
        """
        total, position = self._total_weight, self._next_position
        best, best_deadline = -1, 0
        for source, (weight, count) in enumerate(zip(self._weights, self._counts, strict=True)):
            if count * total // weight > position:
                continue
            deadline = -(-(count + 1) * total // weight)
            if best < 0 or deadline < best_deadline:
                best, best_deadline = source, deadline
        assert best >= 0, "a source is always due"
        return best

    def _permutation(self, source: int, epoch: int) -> Permutation:
        kept = self._permutations.get(source)
        if kept is None or kept[0] != epoch:
            kept = (epoch, Permutation(self._sizes[source], self._seed, source, epoch))
            self._permutations[source] = kept
        return kept[1]
