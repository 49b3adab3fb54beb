"""From the lengths of a unit's samples to what every DP rank runs, and what the encoders do for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowtrain.errors import ConfigError
from flowtrain.scheduler.buckets import bucket_of
from flowtrain.scheduler.cost import make_cost_model
from flowtrain.scheduler.dispatch import Slots, get_dispatcher
from flowtrain.scheduler.encode_batches import make_encode_batches
from flowtrain.scheduler.equal_counts import with_equal_counts
from flowtrain.scheduler.packing.base import Bins
from flowtrain.scheduler.packing.registry import get_packer
from flowtrain.types import Microbatch, PlannedSample, SizedSample, StepPlan, Unit


class StepPlanner:
    """Packs, buckets and dispatches units; ``plan`` is a pure function of its arguments (FlowTrain 3.4)."""

    def __init__(
        self,
        dp_size: int,
        microbatch_tokens: int,
        packing: str,
        cost: str,
        num_buckets: int,
        dispatch: str,
        max_batch_patches: Mapping[str, int],
        alignment: int,
    ) -> None:
        """Resolve the methods; an unknown name raises ConfigError here, not at the first step.

        dp_size: DP ranks of the backbone. microbatch_tokens: capacity L. packing, cost, dispatch: names as in the
        ``scheduler`` section. max_batch_patches: by encoder, in the configuration's order. alignment: of parts in the
        pool, in bytes.
        """
        assert min(dp_size, microbatch_tokens, num_buckets, alignment) >= 1
        self._dp_size = dp_size
        self._microbatch_tokens = microbatch_tokens
        self._num_buckets = num_buckets
        self._max_batch_patches = dict(max_batch_patches)
        self._alignment = alignment
        self._pack = get_packer(packing)
        self._cost = make_cost_model(cost, microbatch_tokens)
        self._dispatch = get_dispatcher(dispatch)

    def plan(self, unit: Unit, samples: Sequence[SizedSample]) -> StepPlan:
        """Plan one unit from its samples, rejected ones left out; the order in which they are given does not matter.

        Every rank gets the same number of microbatches; without samples, one of zero weight. Encode batches follow the
        slots. Raises ConfigError for a sample that is longer than a microbatch.
        """
        # Samples come in position order, whatever order they were sized in: the plan must not depend on timing.
        ordered = tuple(sorted(samples, key=lambda sample: sample.position))
        self._check(unit, ordered)
        lengths = [sample.num_tokens for sample in ordered]
        bins = self._pack(lengths, [self._cost((length,)) for length in lengths], self._microbatch_tokens)
        bins = with_equal_counts(bins, lengths, self._cost, self._dp_size)
        costs = [self._cost([lengths[i] for i in members]) for members in bins]
        buckets = bucket_of(costs, self._num_buckets)
        slots = _in_order_of_need(self._dispatch(costs, buckets, self._dp_size), bins, buckets)
        needed = [ordered[i] for slot in slots for bin_index in slot for i in bins[bin_index]]
        return StepPlan(
            unit=unit,
            dp_size=self._dp_size,
            microbatch_tokens=self._microbatch_tokens,
            slots=tuple(
                tuple(
                    Microbatch(number, rank, tuple(_planned(ordered[i]) for i in bins[bin_index]), costs[bin_index])
                    for rank, bin_index in enumerate(slot)
                )
                for number, slot in enumerate(slots)
            ),
            encode_batches=make_encode_batches(unit.index, needed, self._max_batch_patches, self._alignment),
            num_samples=len(ordered),
            num_tokens=sum(lengths),
            num_vision_tokens=sum(sample.num_vision_tokens for sample in ordered),
            num_target_tokens=sum(sample.num_target_tokens for sample in ordered),
        )

    def _check(self, unit: Unit, ordered: Sequence[SizedSample]) -> None:
        positions = [sample.position for sample in ordered]
        assert len(set(positions)) == len(positions), f"unit {unit.index}: a position is planned twice: {positions}"
        assert all(position in unit.positions for position in positions), (unit, positions)
        for sample in ordered:
            if not 1 <= sample.num_tokens <= self._microbatch_tokens:
                raise ConfigError(
                    f"position {sample.position} (source {sample.ref.source}, row {sample.ref.row}) has "
                    f"{sample.num_tokens} tokens and a microbatch holds 1 to scheduler.microbatch_tokens "
                    f"({self._microbatch_tokens}); raise the latter or lower data.max_seq_len so that it is rejected"
                )


def _in_order_of_need(slots: Slots, bins: Bins, buckets: Sequence[int]) -> Slots:
    """Order the slots of a unit: bucket by bucket, and by position where the paper's buckets leave the choice.

    Encode batches are cut along this order and leased in it, so whatever the order inside a unit, what runs first is
    encoded first; sorting by position alone would buy nothing there and give up the steady pace of similar microbatches
    that buckets are for (FlowTrain 3.4). Across units leases do follow positions, which keeps the pool free of
    deadlock. A slot waits for its last position, so it sorts by that; a bucket goes where its first slot goes. The
    members of a slot stay together: they are neighbours in cost, and only whole slots move.
    """
    need = [max((i for bin_index in slot for i in bins[bin_index]), default=0) for slot in slots]
    bucket = [min(buckets[bin_index] for bin_index in slot) for slot in slots]  # a mixed slot goes with its dearest
    bucket_need = {b: min(n for n, other in zip(need, bucket, strict=True) if other == b) for b in set(bucket)}
    order = sorted(range(len(slots)), key=lambda k: (bucket_need[bucket[k]], bucket[k], need[k], k))
    return tuple(slots[k] for k in order)


def _planned(sample: SizedSample) -> PlannedSample:
    return PlannedSample(sample.position, sample.num_tokens, sample.num_vision_tokens, sample.num_target_tokens)
