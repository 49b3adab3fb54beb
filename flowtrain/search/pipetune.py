"""PipeTune's search for a step: number of microbatches, order, what the first stage encodes ahead (its 4, A.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np

from flowtrain.config.pipeline import PipeTuneConfig
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchColumns
from flowtrain.costs.training_setup import MicrobatchSize
from flowtrain.pipeline.actions import Schedule, parse_schedule, schedule_text
from flowtrain.pipeline.schedules.build import ScheduleName
from flowtrain.scheduler.buckets import ALIKE
from flowtrain.scheduler.layout import Arrangement, deal
from flowtrain.scheduler.packing.balanced import balanced_into
from flowtrain.scheduler.packing.base import Bins, Lengths, PackingRules
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import in_order_of_need
from flowtrain.search.early import early_schedule
from flowtrain.search.one_f_one_b import IN_TIME, NOTHING_EARLY, best_of, improve, step_s
from flowtrain.search.orders import MOST_TRIED, cluster_orders, neighbour_places, slot_counts, starting_orders
from flowtrain.search.room import StepRoom
from flowtrain.search.works import SlotTimes, encodes_apart, slot_times, works_of
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.program import Program
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import CostModel

_IMPROVED = 2
"""Drafts that are improved and then simulated."""
_STRETCHES = (1.0, 1.5, 2.0, 4.0)
_TRIES = 400
"""Changes of the order of each of them: with the orders of at most five clusters, the budget of a search."""
_SHORT, _STARTS, _TRIES_OF_SHORT = 16, 16, 100
"""Changes of so few slots soon end in an order that no single change improves, so they start from several."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Bins, and the best order found for their slots so far."""

    bins: Bins
    slots: IntArray
    times: SlotTimes
    held: FloatArray
    """As of ``step_s``."""
    room: float
    order: IntArray
    seconds: float

    @property
    def facts(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, float]:
        """The arguments of ``step_s`` that follow the order."""
        times = self.times
        return times.forward, times.backward, times.encode, times.moved, self.held, self.room

    @property
    def ordered(self) -> IntArray:
        """The slots in this order."""
        return np.ascontiguousarray(self.slots[self.order])

    def early(self) -> tuple[IntArray, float]:
        """Return where images are best encoded, as of ``step_s``, and the seconds with that.

        It may pay to delay a gradient on the first rank, since no other rank waits for it.
        """
        best_s, best = np.inf, self.order
        for stretch in _STRETCHES:
            early = np.empty(len(self.order), dtype=np.int64)
            seconds = step_s(self.order, *self.facts, stretch, early)
            if seconds < best_s:
                best_s, best = seconds, early
        return best, best_s


@dataclass(frozen=True)
class PipeTune:
    """Arranges a step so that the simulator gives it the least seconds. As ``Arrange``; it can be pickled.

    packing_cost: by which the balance algorithm evens microbatches out. dispatch, num_buckets: as in ``scheduler``.
    parts: what is searched.
    """

    simulator: StepSimulator
    schedule: ScheduleName
    room: StepRoom
    packing_cost: CostModel
    dispatch: str
    num_buckets: int
    parts: PipeTuneConfig

    def __call__(self, sizes: SampleSizes, rules: PackingRules, default: Arrangement) -> Arrangement:
        """Return the best arrangement found; see ``Arrange``."""
        drafts = sorted(self.drafts(sizes, rules, default), key=lambda draft: draft.seconds)[:_IMPROVED]
        drafts = sorted(map(self.improved, drafts), key=lambda draft: draft.seconds)
        best, best_s = default, self.seconds(sizes, default)
        for draft in drafts:
            found = Arrangement(draft.bins, draft.ordered)
            if (found_s := self.seconds(sizes, found)) < best_s:
                best, best_s = found, found_s
        early, ahead_s = drafts[0].early()
        if (early != IN_TIME).any() and ahead_s < best_s * (1.0 - ALIKE):
            # Lists of its own cost each rank some milliseconds, so they must be worth it.
            lists = early_schedule(self.simulator.partition, drafts[0].order, early.tolist(), drafts[0].times)
            found = Arrangement(drafts[0].bins, drafts[0].ordered)
            if self.listed_s(sizes, found, lists) < best_s * (1.0 - ALIKE):
                best = replace(found, schedules=(schedule_text(lists),) * rules.dp_size)
        return best

    def seconds(self, sizes: SampleSizes, arrangement: Arrangement) -> float:
        """Return the simulated seconds of an arrangement, without the update."""
        if arrangement.schedules:
            return self.listed_s(sizes, arrangement, parse_schedule(arrangement.schedules[0]))
        num_slots, dp_size = arrangement.slots.shape
        return self._simulated_s(sizes, arrangement, self.simulator.named(self.schedule, num_slots, dp_size))

    def listed_s(self, sizes: SampleSizes, arrangement: Arrangement, lists: Schedule) -> float:
        """Return the simulated seconds of an arrangement whose replicas all run these lists, without the update."""
        program = self.simulator.program([lists] * arrangement.slots.shape[1])
        return self._simulated_s(sizes, arrangement, program)

    def _simulated_s(self, sizes: SampleSizes, arrangement: Arrangement, program: Program) -> float:
        simulator = self.simulator
        works = works_of(sizes, arrangement.bins, arrangement.slots, simulator.encoder)
        return Timeline(program, *simulator.durations(program, works), buffered=simulator.buffered).makespan_s

    # --- candidates -----------------------------------------------------------------------------------------------

    def drafts(self, sizes: SampleSizes, rules: PackingRules, default: Arrangement) -> Iterator[Draft]:
        """Yield the default's microbatches, and those of each number of slots that fits memory; in the best order."""
        yield self._draft(sizes, default.bins, default.slots)
        lengths, pp = Lengths(sizes.tokens, sizes.vision_tokens), self.simulator.partition.pp_size
        counts = slot_counts(len(sizes), int(sizes.tokens.sum()), rules.capacity, rules.dp_size, pp)
        even, fitting = replace(rules, cost=self.packing_cost), None
        for count in counts if self.parts.size else counts[:1]:
            layout = deal(
                balanced_into(lengths, even, count * rules.dp_size), lengths, even, self.dispatch, self.num_buckets
            )
            slots = in_order_of_need(layout, self.num_buckets)
            works = works_of(sizes, layout.bins, slots, self.simulator.encoder)
            size = self.room.largest(works)
            # Once the pipeline is full, what is smaller in each respect takes less memory.
            is_smaller = fitting is not None and len(slots) > pp and _is_within(size, fitting)
            if is_smaller or self.room.fits(works, len(slots)):
                fitting = size
                yield self._draft(sizes, layout.bins, slots, works)

    def _draft(self, sizes: SampleSizes, bins: Bins, slots: IntArray, works: MicrobatchColumns | None = None) -> Draft:
        works = works_of(sizes, bins, slots, self.simulator.encoder) if works is None else works
        num_slots, dp_size = slots.shape
        times = slot_times(self.simulator, works, dp_size)
        held, room = np.zeros(num_slots), NOTHING_EARLY
        if self._encodes_ahead:
            held = self.room.held_nbytes(works, dp_size)
            room = float(max(self.room.first_left_nbytes(works, num_slots), 0))
        orders = cluster_orders(times.latency) if self.parts.order else np.arange(num_slots)[None, :]
        draft = Draft(bins, slots, times, held, room, orders[0], np.inf)
        index, seconds = best_of(orders, *draft.facts)
        return replace(draft, order=orders[index], seconds=seconds)

    @property
    def _encodes_ahead(self) -> bool:
        return self.parts.precompute and self.schedule == "1f1b" and encodes_apart(self.simulator.partition)

    def improved(self, draft: Draft) -> Draft:
        """Return a draft with a better order, where changes of single microbatches give one."""
        if not self.parts.order or len(draft.order) <= MOST_TRIED:
            return draft
        num_slots = len(draft.order)
        starts, tries = (_STARTS, _TRIES_OF_SHORT) if num_slots <= _SHORT else (1, _TRIES)
        places, best = neighbour_places(num_slots, tries), draft
        for order in starting_orders(draft.order, starts):
            seconds = improve(order, places, *draft.facts)
            if seconds < best.seconds:
                best = replace(draft, order=order, seconds=seconds)
        return best


def _is_within(size: MicrobatchSize, other: MicrobatchSize) -> bool:
    return all(one <= two for one, two in zip(astuple(size), astuple(other), strict=True))
