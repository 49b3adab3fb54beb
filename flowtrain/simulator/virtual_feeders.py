"""Feeders of a simulated run: they ask the flow as the actors do, and size in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from flowtrain.mempool.gva import AddressSpace
from flowtrain.simulator.producers import PER_NODE, LostWork, Producer
from flowtrain.simulator.samples import DrawnSamples
from flowtrain.simulator.virtual import Occupancy, VirtualFlow
from flowtrain.types.messages import FeedReport, PartReady, Remake
from flowtrain.types.plan import Unit
from flowtrain.types.samples import IMAGES_PART, TEXT_PART, SamplerState


@dataclass(frozen=True, slots=True)
class FeederGroup:
    """The feeders of a run."""

    count: int
    sample_s: float = 0.0
    """Seconds of a feeder for each sample: reading, sizing, putting it into the pool."""
    segment_nbytes: int | None = None
    """Of each feeder; None: it never waits for room."""


class VirtualFeeder(Producer):
    """Sizes its share of each unit, and puts texts and images once there is room for the share."""

    def __init__(
        self,
        run: VirtualFlow,
        group: FeederGroup,
        number: int,
        samples: DrawnSamples,
        space: AddressSpace,
        occupancy: Occupancy,
        lost: LostWork,
    ) -> None:
        super().__init__(run, f"feeder-{number}", f"feeders-{number // PER_NODE}", space)
        self._group = group
        self._number = number
        self._samples = samples
        self._occupancy = occupancy
        self._lost = lost
        self._unit: Unit | None = None
        self._todo: list[tuple[int, str, int]] = []  # parts to put, once there is room for all, with their bytes
        self._needed_nbytes = 0
        self._is_sizing = False
        self.busy_s = 0.0
        """Seconds that it worked."""

    def start(self) -> None:
        """See ``Producer``."""
        self._join(self._group.segment_nbytes, self._occupancy, self._number)
        self._unit, self._is_sizing = None, False
        self._todo.clear()
        self._hand_over(FeedReport())

    def ask(self) -> None:
        """Ask for work, if it waits for that."""
        if not self._is_there or self._is_sizing or self._todo:
            return
        order = self._run.flow.feed_order(self._index)
        if order is None:
            return
        self._segment.free(self._run.aligned(order.released))
        if order.stop:
            return
        self._unit = order.unit
        if order.unit is not None:
            self._size(self._share(order.unit))
        else:
            self._remake(order.remake)

    def _share(self, unit: Unit) -> Sequence[int]:
        positions, count = unit.positions, self._group.count
        return positions[(self._number - unit.first_position) % count :: count]

    def _size(self, positions: Sequence[int]) -> None:
        kinds, todo = self._samples.kinds, self._todo
        for position, index in zip(positions, self._samples.kinds_of(positions), strict=True):
            kind = kinds[index]
            todo.append((position, TEXT_PART, kind.text_nbytes))
            if kind.images_nbytes:
                todo.append((position, IMAGES_PART, kind.images_nbytes))
        self._work(len(positions))

    def _remake(self, remake: Sequence[Remake]) -> None:
        for each in remake:
            kind = self._samples.kind(each.ref.position)
            sizes = {TEXT_PART: kind.text_nbytes, IMAGES_PART: kind.images_nbytes}
            self._todo += [(each.ref.position, part, sizes[part]) for part in each.parts]
        self._lost.num_remade += len(self._todo)
        self._work(len(remake))

    def _work(self, num_samples: int) -> None:
        self._is_sizing = True
        alignment = self._run.alignment
        self._needed_nbytes = sum([-(-nbytes // alignment) * alignment for _, _, nbytes in self._todo])
        seconds = num_samples * self._group.sample_s
        self._run.at(self._run.now_s + seconds, partial(self._sized, self._life, seconds))

    def _sized(self, life: int, seconds: float) -> None:
        if self._is_alive(life):
            self.busy_s += seconds
            self._is_sizing = False
            self._put()

    def put(self) -> None:
        """Go on, if it waits for room."""
        if self._is_there and not self._is_sizing and self._todo:
            self._put()

    def _put(self) -> None:
        """Put all parts and report them; or wait for room, since a report has all of them."""
        run, needed = self._run, self._needed_nbytes
        if needed > self._segment.free_nbytes:
            order = run.flow.room_order(self._index)
            if order is not None:
                self._segment.free(run.aligned(order.released))
            if needed > self._segment.free_nbytes:
                return
        self._segment.take(needed)
        extents, todo = self._segment.extents, self._todo
        if self._unit is None:
            remade = [PartReady(position, part, 0, extents(nbytes)) for position, part, nbytes in todo]
            report = FeedReport(remade=tuple(remade))
        else:
            texts = [PartReady(at, TEXT_PART, 0, extents(nbytes)) for at, part, nbytes in todo if part is TEXT_PART]
            images = [PartReady(at, part, 0, extents(nbytes)) for at, part, nbytes in todo if part is IMAGES_PART]
            report = self._report(self._unit, tuple(texts), tuple(images))
        self._unit = None
        todo.clear()
        self._hand_over(report)

    def _report(self, unit: Unit, texts: tuple[PartReady, ...], images: tuple[PartReady, ...]) -> FeedReport:
        return FeedReport(
            unit=unit,
            sized=tuple(self._samples.sized(self._share(unit))),
            texts=texts,
            images=images,
            sampler_state=SamplerState(unit.first_position + unit.num_positions),
        )

    def _hand_over(self, report: FeedReport) -> None:
        run = self._run
        self._segment.free(run.aligned(run.flow.feed(self._index, report)))
        run.may_feed = run.may_lease = run.may_plan = True
        run.all_may_read |= bool(report.remade)
