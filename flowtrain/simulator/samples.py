"""The samples of a simulated run: drawn batches that follow each other again and again, each planned once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.flow.steps import UnitPlanner
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.types.plan import CostModel, EncodeBatch, StepPlan, Unit
from flowtrain.types.samples import TEXT_PART, PartSize, SampleRef, SizedSample


@dataclass(frozen=True, slots=True)
class SampleKind:
    """What all samples of one kind have in common; fields as in ``SizedSample``."""

    num_tokens: int
    num_vision_tokens: int
    num_target_tokens: int
    parts: tuple[PartSize, ...]
    image_nbytes: tuple[int, ...] = ()
    text_nbytes: int = field(init=False)
    """Of its text."""
    images_nbytes: int = field(init=False)
    """Of all its encoded images."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text_nbytes", sum(each.nbytes for each in self.parts if each.name == TEXT_PART))
        object.__setattr__(self, "images_nbytes", sum(self.image_nbytes))


class DrawnSamples:
    """The sample at each position: step k runs batch ``(k - 1) % B``.

    kinds: of the samples. batches: indices of kinds, ``[B, batch_size]``.
    """

    def __init__(self, kinds: Sequence[SampleKind], batches: IntArray) -> None:
        self.kinds = tuple(kinds)
        self._rows: list[list[int]] = batches.tolist()
        self.num_batches, self.batch_size = batches.shape

    def kinds_of(self, positions: Iterable[int]) -> list[int]:
        """Return the index of the kind at each position."""
        rows, size, count = self._rows, self.batch_size, self.num_batches
        return [rows[position // size % count][position % size] for position in positions]

    def kind(self, position: int) -> SampleKind:
        """Return the kind at a position."""
        return self.kinds[self._rows[position // self.batch_size % self.num_batches][position % self.batch_size]]

    def sized(self, positions: Sequence[int]) -> list[SizedSample]:
        """Return the samples at these positions, as a feeder reports them."""
        kinds = self.kinds
        return [
            SizedSample(
                SampleRef(position, 0, position, 0),
                (kind := kinds[index]).num_tokens,
                kind.num_vision_tokens,
                kind.num_target_tokens,
                kind.parts,
                kind.image_nbytes,
            )
            for position, index in zip(positions, self.kinds_of(positions), strict=True)
        ]

    def batch_of(self, first: int, last: int, count: int) -> int | None:
        """Return the batch that ``count`` ascending positions from ``first`` to ``last`` are; None if they are none."""
        is_whole = count == self.batch_size == last - first + 1 and first % self.batch_size == 0
        return first // self.batch_size % self.num_batches if is_whole else None


class RepeatedPlanner:
    """Plans each batch once: a plan depends on lengths alone, so a batch has the same plan at all its positions.

    planner: the run's.
    """

    def __init__(self, planner: UnitPlanner, samples: DrawnSamples) -> None:
        self._planner = planner
        self._samples = samples
        self._sizes: dict[int, SampleSizes] = {}
        self._plans: dict[tuple[int, bool, bool], StepPlan] = {}

    @property
    def cost(self) -> CostModel:
        """As of the run's planner."""
        return self._planner.cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        self._planner.cost = cost
        self._plans.clear()

    def sizes_of(self, samples: Sequence[SizedSample]) -> SampleSizes:
        """As ``StepPlanner``; samples are in the order of their positions."""
        first, last = samples[0].ref.position, samples[-1].ref.position
        batch = self._samples.batch_of(first, last, len(samples))
        if batch is None:
            return self._planner.sizes_of(samples)
        found = self._sizes.get(batch)
        if found is None:
            found = self._sizes[batch] = self._planner.sizes_of(samples)
        return replace(found, positions=found.positions + (first - int(found.positions[0])))

    def is_searched(self, unit: Unit, sizes: SampleSizes) -> bool:
        """As ``StepPlanner``."""
        return self._planner.is_searched(unit, sizes)

    def plan(self, unit: Unit, samples: SampleSizes, *, may_search: bool = True) -> StepPlan:
        """As ``StepPlanner``."""
        positions = samples.positions
        first = int(positions[0])
        batch = self._samples.batch_of(first, int(positions[-1]), len(positions))
        if batch is None:
            return self._planner.plan(unit, samples, may_search=may_search)
        key = batch, bool(unit.chosen), may_search
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._planner.plan(unit, samples, may_search=may_search)
            return found
        return _moved(found, unit, first - min(found.unit.positions))


def _moved(plan: StepPlan, unit: Unit, shift: int) -> StepPlan:
    """The plan for a unit whose samples lie ``shift`` positions after its own."""
    batches = tuple(
        [
            EncodeBatch(
                unit.index,
                batch.index,
                batch.encoder,
                tuple([position + shift for position in batch.positions]),
                batch.num_patches,
                batch.nbytes,
            )
            for batch in plan.encode_batches
        ]
    )
    positions = tuple((np.array(plan.positions, dtype=np.int64) + shift).tolist())
    return replace(plan, unit=unit, positions=positions, encode_batches=batches)
