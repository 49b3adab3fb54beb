"""Plans a unit from the lengths of its samples: what every DP rank runs, and the encode batches for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import IntArray
from flowtrain.errors import ConfigError
from flowtrain.scheduler.compiled import compiled
from flowtrain.scheduler.dispatch import get_dispatcher
from flowtrain.scheduler.encode_batches import cut_encode_batches
from flowtrain.scheduler.layout import Arrange, Arrangement, Layout, lay_out
from flowtrain.scheduler.packing.base import Lengths, PackingRules
from flowtrain.scheduler.packing.registry import get_packer
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.types.plan import CostModel, StepPlan, Unit, UnitKind
from flowtrain.types.samples import PartSize, SampleRef, SizedSample

_UNITS_PER_SEED = 1_000_003


class StepPlanner:
    """Packs, buckets and deals units; ``plan`` is a pure function of its arguments and of ``cost`` (FlowTrain 3.4)."""

    def __init__(
        self,
        dp_size: int,
        microbatch_tokens: int,
        packing: str,
        cost: CostModel,
        num_buckets: int,
        dispatch: str,
        max_batch_patches: Mapping[str, int],
        alignment: int,
        seed: int = 0,
        has_encode_batches: bool = True,
        arrange: Arrange | None = None,
        vision_quota: int | None = None,
    ) -> None:
        """Resolve the methods; an unknown name raises ConfigError here, not at the first step.

        dp_size: DP ranks of the backbone.
        microbatch_tokens: capacity L.
        packing, dispatch: names as in the ``scheduler`` section.
        max_batch_patches: by encoder, in the configuration's order.
        alignment: of parts in the pool, in bytes.
        seed: for packing methods that draw random numbers; combined with the unit's index.
        has_encode_batches: False in modes without encoder actors.
        arrange: searches the arrangement of training steps; None: the one that the methods give.
        vision_quota: as in ``PackingRules``.
        """
        assert min(dp_size, microbatch_tokens, num_buckets, alignment) >= 1
        get_packer(packing), get_dispatcher(dispatch)
        self.cost = cost
        """May be replaced between two plans by a newly fitted cost."""
        self._dp_size = dp_size
        self._microbatch_tokens = microbatch_tokens
        self._packing = packing
        self._num_buckets = num_buckets
        self._dispatch = dispatch
        self._encoders = tuple(max_batch_patches)
        self._max_batch_patches = dict(max_batch_patches) if has_encode_batches else {}
        self._alignment = alignment
        self._seed = seed
        self._arrange = arrange
        self._vision_quota = vision_quota

    @classmethod
    def from_config(
        cls, config: RunConfig, dp_size: int, cost: CostModel, arrange: Arrange | None = None
    ) -> StepPlanner:
        """Build the planner of a run; cost: of its microbatches. arrange: as ``search.configured`` gives it."""
        scheduler = config.step_scheduler
        return cls(
            dp_size=dp_size,
            microbatch_tokens=scheduler.microbatch_tokens,
            packing=scheduler.packing,
            cost=cost,
            num_buckets=scheduler.num_buckets,
            dispatch=scheduler.dispatch,
            max_batch_patches={name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
            alignment=config.pool.alignment,
            seed=config.seed,
            has_encode_batches=config.has_encoder_actors,
            arrange=arrange,
            vision_quota=config.data.grouping.vision_tokens if config.data.grouping is not None else None,
        )

    def warm_up(self) -> None:
        """Compile the compiled functions (a second or two without a cache), so that no step waits for this."""
        count, capacity = 4 * self._dp_size + 1, self._microbatch_tokens
        similar = [capacity // 3 + 1 - i % 2 for i in range(count)]
        uneven = [capacity if i == 0 else 1 + (i % 3) * capacity // 4 for i in range(count)]
        for sizes in (similar, uneven):  # each takes other branches in the methods
            samples = [
                SizedSample(SampleRef(i, 0, i, 0), size, 1, 1, tuple(PartSize(e, 1, 1, 1, 1) for e in self._encoders))
                for i, size in enumerate(sizes)
            ]
            self.plan(Unit(0, UnitKind.TRAIN, 1, 0, count), samples)

    def sizes_of(self, samples: Sequence[SizedSample]) -> SampleSizes:
        """Return the columns that ``plan`` works on, from sized samples in any order."""
        return SampleSizes.of(samples, self._encoders, self._alignment)

    def is_searched(self, unit: Unit, sizes: SampleSizes) -> bool:
        """Whether ``plan`` searches an arrangement of the unit, which takes long."""
        return self._arrange is not None and unit.kind is UnitKind.TRAIN and len(sizes) > 0

    def plan(self, unit: Unit, samples: SampleSizes | Sequence[SizedSample], *, may_search: bool = True) -> StepPlan:
        """Plan one unit from its samples without the rejected ones; the order of ``samples`` does not matter.

        may_search: False: arrange it by the methods alone.

        Every rank gets the same number of microbatches; without samples, one of zero weight. Encode batches are in the
        order of the slots; a unit chosen from ready samples, or without encoder actors, has none. Raises ConfigError
        for a sample that is longer than a microbatch.
        """
        sizes = samples if isinstance(samples, SampleSizes) else self.sizes_of(samples)
        self._check(unit, sizes)
        lengths = Lengths(sizes.tokens, sizes.vision_tokens)
        chosen = arranged(lengths, self.rules(unit), self._packing, self._dispatch, self._num_buckets)
        if may_search and self._arrange is not None and self.is_searched(unit, sizes):
            chosen = self._arrange(sizes, self.rules(unit), chosen)
        bins, dealt = chosen.bins, chosen.slots.reshape(-1)
        # Samples of a chosen unit (`data.order: arrival`) got their encode batches when they were sized.
        limits = {} if unit.chosen else self._max_batch_patches
        order, ends = concatenated(bins.members, bins.offsets, dealt)
        return StepPlan(
            unit=unit,
            dp_size=self._dp_size,
            microbatch_tokens=self._microbatch_tokens,
            positions=tuple(sizes.positions[order].tolist()),
            lengths=tuple(sizes.tokens[order].tolist()),
            vision_lengths=tuple(sizes.vision_tokens[order].tolist()),
            target_lengths=tuple(sizes.target_tokens[order].tolist()),
            ends=tuple(ends.tolist()),
            costs=tuple(bins.costs(lengths, self.cost)[dealt].tolist()),
            encode_batches=cut_encode_batches(unit.index, sizes, order, limits),
            schedules=chosen.schedules,
        )

    def rules(self, unit: Unit) -> PackingRules:
        """Return the rules for the bins of a unit."""
        seed = self._seed * _UNITS_PER_SEED + unit.index
        return PackingRules(self._microbatch_tokens, self.cost, self._dp_size, seed, self._vision_quota)

    def _check(self, unit: Unit, sizes: SampleSizes) -> None:
        positions, tokens = sizes.positions, sizes.tokens
        if not len(positions):
            return
        assert (positions[1:] > positions[:-1]).all(), f"unit {unit.index}: a position is planned twice: {positions}"
        assert _belong_to(unit, positions), (unit, positions)
        shortest, longest = int(tokens.min()), int(tokens.max())
        if shortest < 1 or longest > self._microbatch_tokens:
            bad = longest if longest > self._microbatch_tokens else shortest
            raise ConfigError(
                f"position {positions[tokens == bad][0]} has {bad} tokens and a microbatch holds 1 to "
                f"scheduler.microbatch_tokens ({self._microbatch_tokens}); raise the latter or lower data.max_seq_len "
                "so that it is rejected"
            )


def _belong_to(unit: Unit, positions: IntArray) -> bool:
    """Whether all positions, which ascend, belong to the unit."""
    own = unit.positions
    if isinstance(own, range):
        return own.start <= positions[0] and positions[-1] < own.stop
    return set(own).issuperset(positions.tolist())


def arranged(lengths: Lengths, rules: PackingRules, packing: str, dispatch: str, num_buckets: int) -> Arrangement:
    """Lay out samples by the named methods, the slots in the order of need; raises as ``lay_out`` does."""
    layout = lay_out(lengths, rules, packing, dispatch, num_buckets)
    return Arrangement(layout.bins, in_order_of_need(layout, num_buckets))


def in_order_of_need(layout: Layout, num_buckets: int) -> IntArray:
    """Order the slots of a unit: bucket by bucket, and by position where the paper's buckets leave the choice.

    Encode batches are cut and leased in this order, so in any order inside a unit the samples that run first are
    encoded first. Sorting by position alone would gain nothing and lose the steady pace of similar microbatches, the
    purpose of the buckets (FlowTrain 3.4). Across units, leases follow positions, which keeps the pool free of
    deadlock. A slot waits for its last position, so it is sorted by that; a bucket is sorted by its first slot. The
    members of a slot are neighbours in cost and stay together: only whole slots move.
    """
    if len(layout.slots) == 1:
        return layout.slots
    keys = _needs(layout.bins.members, layout.bins.offsets, layout.slots, layout.buckets, num_buckets)
    return layout.slots[np.lexsort(keys)]


@compiled
def _needs(
    members: IntArray, offsets: IntArray, slots: IntArray, bucket: IntArray, num_buckets: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return sort keys of the slots, the primary key last: last sample, bucket, smallest last sample of the bucket."""
    num_slots = len(slots)
    need, slot_bucket = np.zeros(num_slots, dtype=np.int64), np.full(num_slots, num_buckets, dtype=np.int64)
    bucket_need = np.full(num_buckets, len(members), dtype=np.int64)
    for slot in range(num_slots):
        for bin_ in slots[slot]:
            if offsets[bin_ + 1] > offsets[bin_]:
                need[slot] = max(need[slot], members[offsets[bin_ + 1] - 1])  # members of a bin ascend
            slot_bucket[slot] = min(slot_bucket[slot], bucket[bin_])  # a mixed slot belongs to its costliest bucket
        bucket_need[slot_bucket[slot]] = min(bucket_need[slot_bucket[slot]], need[slot])
    return need, slot_bucket, bucket_need[slot_bucket]


@compiled
def concatenated(members: IntArray, offsets: IntArray, dealt: IntArray) -> tuple[IntArray, IntArray]:
    """Return the samples of the given bins, concatenated, and where each bin ends."""
    order, ends = np.empty(len(members), dtype=np.int64), np.empty(len(dealt), dtype=np.int64)
    count = 0
    for place in range(len(dealt)):
        for index in range(offsets[dealt[place]], offsets[dealt[place] + 1]):
            order[count] = members[index]
            count += 1
        ends[place] = count
    return order, ends
