"""Global batches drawn from a workload's representative samples, packed as a run packs its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flowtrain.allocator.request import Request
from flowtrain.config.flow import SchedulerConfig
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.workload import Workload
from flowtrain.scheduler.cost import eq3, make_cost_model
from flowtrain.scheduler.layout import lay_out
from flowtrain.scheduler.packing.base import Lengths, PackingRules
from flowtrain.types.plan import CostModel

MOST_BATCHES = 8
SIMULATED_BATCHES = 4
"""The first ones, which have the data's mix as all have; lists of long pipelines take time to build."""
_DRAWN_SAMPLES = 2048
"""Samples of all batches that ``draw`` draws by itself, if batches are small."""
_WHOLE = 1024
"""A batch of up to so many samples is packed as a whole."""
_PART = 512
"""Samples of each part of a larger batch: the packer's time grows faster than the batch."""
_PACKED = 2048
"""Samples of all parts together, and about the most of a rank's that are packed at once: what a rank has more repeats
these, one time after the other."""
_LEAST_SLOTS = 64
"""Microbatches that such a part fills at least: each time the last one may be hardly filled."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatches:
    """Microbatches of all drawn batches for one ``dp``, in the order in which a run encodes and trains them."""

    dp: int
    """Ranks that were packed for; fewer than the candidate has if batches are large."""
    share: float
    """Share of each batch, and of the ranks, that was packed."""
    samples: IntArray
    """Indices of representative samples; int64 ``[N]``."""
    places: IntArray
    """Each sample's microbatch: its slot, counted over all batches, times ``dp``, plus its rank; ascending, ``[N]``."""
    slot_ends: IntArray
    """Number of slots up to the end of each batch, ``[B]``."""

    @property
    def num_slots(self) -> int:
        """Slots of all batches."""
        return int(self.slot_ends[-1])

    def sums(self, values: FloatArray | IntArray) -> FloatArray:
        """Return the sum of a column ``[S]`` over each microbatch, ``[num_slots, dp]``."""
        weights = values[self.samples].astype(np.float64)
        sums: FloatArray = np.bincount(self.places, weights, self.num_slots * self.dp).astype(np.float64)
        return sums.reshape(self.num_slots, self.dp)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnBatches:
    """The same batches for all candidates, so that their rates differ by the candidates alone."""

    batches: IntArray
    """Indices of representative samples; int64 ``[B, global_batch_size]``."""
    scheduler: SchedulerConfig
    """Methods of packing and dispatch, and the lookahead; ``microbatch_tokens`` is the request's."""
    _packed: dict[tuple[int, int, CostModel], PackedBatches] = field(default_factory=dict)
    _by_length: list[IntArray] = field(default_factory=list)
    """Each batch in the order of its samples' lengths, once a part of one was needed."""

    @classmethod
    def draw(
        cls, workload: Workload, count: int | None = None, seed: int = 0, scheduler: SchedulerConfig | None = None
    ) -> DrawnBatches:
        """Draw ``count`` batches, by default fewer the larger they are; one if all samples are alike.

        Batches differ as a run's do, but each ``SIMULATED_BATCHES`` of them together have the data's mix: otherwise
        the rates of all candidates would err by as much as these few batches are lighter or heavier than the data.
        """
        if count is None:
            count = max(1, min(MOST_BATCHES, _DRAWN_SAMPLES // workload.global_batch_size))
        num_samples = len(workload.lengths)
        if num_samples == 1:
            count = 1
        generator, ordered = np.random.default_rng(seed), np.argsort(workload.lengths, kind="stable")
        groups = [min(SIMULATED_BATCHES, count - first) for first in range(0, count, SIMULATED_BATCHES)]
        drawn = [_spread(ordered, (size, workload.global_batch_size), generator) for size in groups]
        return cls(np.concatenate(drawn), scheduler if scheduler is not None else SchedulerConfig())

    def packed(self, request: Request, dp: int) -> PackedBatches:
        """Return the batches packed for ``dp`` ranks and the request's microbatches."""
        workload = request.workload
        cost = packing_cost(self.scheduler, request)
        key = dp, workload.microbatch_tokens, cost
        if key not in self._packed:
            self._packed[key] = self._pack(workload, dp, cost)
        return self._packed[key]

    def _pack(self, workload: Workload, dp: int, cost: CostModel) -> PackedBatches:
        size = self.batches.shape[1]
        part_dp = dp if size <= _WHOLE else max(1, round(dp * _PART / size))
        of_slots = _LEAST_SLOTS * workload.microbatch_tokens / workload.tokens_per_sample
        turns = max(1, round(size * part_dp / dp / max(_PACKED, of_slots)))
        part_size = round(size * part_dp / dp / turns)
        num_parts = max(1, min(dp // part_dp, _PACKED // part_size))
        ranks = num_parts * part_dp
        rules = PackingRules(workload.microbatch_tokens, cost, part_dp)
        samples: list[IntArray] = []
        places: list[IntArray] = []
        num_slots: list[int] = []
        is_whole = part_size == size
        if not is_whole and not self._by_length:
            self._by_length.extend(batch[np.argsort(workload.lengths[batch], kind="stable")] for batch in self.batches)
        for number, batch in enumerate(self.batches):
            parts = [batch] if is_whole else _parts(self._by_length[number], part_size, num_parts)
            slots, ordered, where = self._lay_out(workload, parts, rules)
            firsts = (sum(num_slots) + slots * np.arange(turns)) * ranks
            samples.append(np.tile(ordered, turns))
            places.append((firsts[:, None] + where).reshape(-1))
            num_slots.append(turns * slots)
        share = ranks / dp
        return PackedBatches(ranks, share, np.concatenate(samples), np.concatenate(places), np.cumsum(num_slots))

    def _lay_out(
        self, workload: Workload, parts: list[IntArray], rules: PackingRules
    ) -> tuple[int, IntArray, IntArray]:
        """Pack parts of a batch side by side; returns the number of slots, the samples and their places."""
        scheduler, laid_out = self.scheduler, []
        for part in parts:
            lengths = Lengths(workload.lengths[part], workload.vision_lengths[part])
            layout = lay_out(lengths, rules, scheduler.packing, scheduler.dispatch, scheduler.num_buckets)
            laid_out.append((part[layout.bins.members], np.diff(layout.bins.offsets), layout.slots))
        # A part with a slot more than the others would pass for a straggler; packed as a whole, no rank has one more.
        num_slots = int(np.bincount([len(slots) for _, _, slots in laid_out]).argmax())
        laid_out = [each for each in laid_out if len(each[2]) == num_slots]
        ranks = len(parts) * rules.dp_size
        samples, places = [], []
        for index in range(len(parts)):
            members, sizes, slots = laid_out[index % len(laid_out)]
            place_of = np.empty(slots.size, dtype=np.int64)
            slot, rank = np.divmod(np.arange(slots.size), rules.dp_size)
            place_of[slots.reshape(-1)] = slot * ranks + index * rules.dp_size + rank
            samples.append(members)
            places.append(np.repeat(place_of, sizes))
        found, where = np.concatenate(samples), np.concatenate(places)
        order = np.argsort(where, kind="stable")
        return num_slots, found[order], where[order]


def packing_cost(scheduler: SchedulerConfig, request: Request) -> CostModel:
    """Return the cost that microbatches are packed by; Eq. 3 for one that is fitted to a run's own measurements."""
    capacity = request.workload.microbatch_tokens
    if scheduler.cost == "profile":
        return eq3(capacity)
    return make_cost_model(scheduler.cost, capacity, request.model.backbone, request.workload.freeze)


def _spread(ordered: IntArray, shape: tuple[int, int], generator: np.random.Generator) -> IntArray:
    """Draw batches, ``[B, global_batch_size]``, that together have all samples equally often, as far as they go.

    ordered: all samples by length. One sample comes from each of as many equal spans of them, at a random place.
    """
    count = shape[0] * shape[1]
    at = (np.arange(count) + generator.random(count)) * (len(ordered) / count)
    chosen = ordered[np.minimum(at.astype(np.int64), len(ordered) - 1)]
    return generator.permutation(chosen).reshape(shape)


def _parts(ordered: IntArray, size: int, count: int) -> list[IntArray]:
    """Return ``count`` parts of a batch, of ``size`` samples each, with the same mix of lengths.

    ordered: the batch's samples by length.
    """
    starts = (np.arange(count) + 0.5) / count
    return [ordered[((np.arange(size) + start) * (len(ordered) / size)).astype(np.int64)] for start in starts]
