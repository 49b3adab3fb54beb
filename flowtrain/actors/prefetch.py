"""The prefetch thread of a backbone rank fetches plans and microbatches ahead of the training thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from flowtrain.actors.link import CoordinatorLink, Patience
from flowtrain.actors.spans import SpanLog
from flowtrain.config.flow import LimitsConfig
from flowtrain.errors import OwnerLostError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.staging import DeviceStaging
from flowtrain.training.batch import PackedBatch, SampleArrays
from flowtrain.types.messages import LocateReply, MicrobatchLocation, PartLocation
from flowtrain.types.plan import StepPlan
from flowtrain.types.samples import TEXT_PART

Part = np.ndarray | torch.Tensor
"""A part's bytes, uint8: on the host, or on the rank's accelerator."""
BuildBatch = Callable[[list[SampleArrays]], PackedBatch]
T = TypeVar("T")
logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a waiting thread checks its limit and whether it must end."""
RETRY_S = 0.05
"""Pause before the thread asks again for the place of a part whose owner died."""


@dataclass(frozen=True)
class Fetched:
    """A microbatch that the rank has read and assembled."""

    slot: int
    batch: PackedBatch
    fetch_s: float
    """Time to read and assemble it."""
    ready: torch.Event | None = None
    """On an accelerator, an event after the copies that brought it there."""


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class Prefetcher:
    """Fetches unit after unit in the order of the run; ``next_plan`` and ``next_microbatch`` return them in order.

    Delivers each microbatch once read; later ones wait for one whose owner died, which the thread asks for again. The
    thread itself waits without a limit, since it may be far ahead; ``limits`` hold for the training thread, which waits
    for it.

    A microbatch is released once it is read: with the next question, or before any other wait. So memory that a rank
    has been asked to read never waits for this rank's training, nor, while its owner lives, for another rank.

    name: of the rank's actor, for messages.
    dp_rank: replica whose microbatches it reads.
    build: assembles a microbatch from its samples' arrays. It copies them, so that nothing refers to the pool later.
    feature_dim, feature_dtype: width and type of a feature row in the pool.
    depth: microbatches that may wait assembled.
    arrival: take any microbatch that is READY next, instead of the plan's order.
    first_unit: index of the first unit that it fetches.
    text_only: leave out the features; other ranks read them.
    staging: brings parts onto an accelerator; None where the rank computes on the CPU.
    """

    def __init__(
        self,
        *,
        name: str,
        dp_rank: int,
        link: CoordinatorLink,
        pool: Pool,
        limits: LimitsConfig,
        build: BuildBatch,
        feature_dim: int,
        feature_dtype: torch.dtype,
        depth: int,
        arrival: bool,
        first_unit: int,
        spans: SpanLog,
        text_only: bool = False,
        staging: DeviceStaging | None = None,
    ) -> None:
        self._name = name
        self._dp_rank = dp_rank
        self._link = link
        self._pool = pool
        self._limits = limits
        self._build = build
        self._feature_dim = feature_dim
        self._feature_dtype = feature_dtype
        self._arrival = arrival
        self._spans = spans
        self._text_only = text_only
        self._staging = staging
        self._wanted: tuple[int, int | None] = (first_unit, None)
        self._unreleased: tuple[int, ...] = ()  # slots of the current unit that are read and not released
        # Microbatches of the current unit that are not delivered yet, by slot, in their order. None: lost; it and all
        # after it wait.
        self._kept: dict[int, Fetched | None] = {}
        self._stopping = threading.Event()
        self._plans: queue.Queue[StepPlan | _Failed] = queue.Queue()
        self._microbatches: queue.Queue[Fetched | _Failed] = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._run, args=(first_unit,), name="prefetch", daemon=True)
        self._thread.start()

    def next_plan(self) -> StepPlan:
        """Wait for the next unit's plan. Raises the error that ended the thread, and StallError at the limit."""
        return self._take(self._plans)

    def next_microbatch(self) -> Fetched:
        """Wait for the next microbatch of the unit whose plan was taken last; raises as ``next_plan``."""
        fetched = self._take(self._microbatches)
        if self._staging is not None and fetched.ready is not None:
            self._staging.hand_over(fetched.batch.tensors(), fetched.ready)
        return fetched

    def close(self) -> None:
        """End the thread and drop what it fetched ahead. Idempotent."""
        self._stopping.set()
        self._thread.join(timeout=self._limits.stop_timeout_s)

    def _take(self, items: queue.Queue[T | _Failed]) -> T:
        patience = Patience(self._name, self._limits, self._describe_wait)
        while True:
            try:
                item = items.get(timeout=POLL_S)
            except queue.Empty:
                patience.tick()
                continue
            if isinstance(item, _Failed):
                raise item.error
            return item

    def _describe_wait(self) -> str:
        unit, slot = self._wanted
        return self._link.ask(CoordinatorApi.describe_wait, unit, slot, self._dp_rank)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self, unit: int) -> None:
        try:
            while (plan := self._wait_for_plan(unit)) is not None:
                self._plans.put(plan)
                num_done = 0
                while num_done < plan.num_slots:
                    locations = self._wait_for_locations(unit, num_done)
                    if not locations:
                        return
                    for location in locations:
                        self._kept[location.slot] = self._try_read(plan, location)
                        for fetched in self._take_complete():
                            num_done += 1
                            self._hand_over(fetched, unit, is_last=num_done == plan.num_slots)
                unit += 1
        except BaseException as error:  # the training thread raises it at its next wait
            self._plans.put(_Failed(error))
            self._offer(_Failed(error))

    def _take_complete(self) -> Iterator[Fetched]:
        """Take the microbatches that were read, up to the first that is lost."""
        while (first := next(iter(self._kept.values()), None)) is not None:
            del self._kept[first.slot]
            yield first

    def _hand_over(self, fetched: Fetched, unit: int, is_last: bool) -> None:
        if is_last or not self._num_free():  # a unit ends when all its microbatches are released
            self._link.ask(CoordinatorApi.release, unit, self._unreleased, self._dp_rank)
            self._unreleased = ()
        self._offer(fetched)

    def _num_free(self) -> int:
        return self._microbatches.maxsize - self._microbatches.qsize()

    def _offer(self, item: Fetched | _Failed) -> None:
        while not self._stopping.is_set():
            try:
                self._microbatches.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return

    def _wait_for_plan(self, unit: int) -> StepPlan | None:
        self._wanted = (unit, None)
        while not self._stopping.is_set():
            reply = self._link.ask(CoordinatorApi.next_plan, unit)
            if reply.plan is not None or reply.is_past_end:
                return reply.plan
        return None

    def _wait_for_locations(self, unit: int, number: int) -> tuple[MicrobatchLocation, ...]:
        """Wait for the unit's microbatch ``number``; returns its place, and those of later ones that have room.

        A lost microbatch comes alone. Empty if the unit will not come.
        """
        while not self._stopping.is_set():
            lost = next(iter(self._kept), None)
            wanted = lost if lost is not None else None if self._arrival else number
            reply = self._locate(unit, wanted, 1 if lost is not None else max(1, self._num_free()))
            if reply.locations or reply.is_past_end:
                return reply.locations
        return ()

    def _locate(self, unit: int, slot: int | None, limit: int) -> LocateReply:
        """Ask where microbatches lie, and report which ones were read."""
        self._wanted = (unit, slot)
        read, self._unreleased = self._unreleased, ()
        return self._link.ask(CoordinatorApi.locate, unit, slot, self._dp_rank, read, limit)

    def _try_read(self, plan: StepPlan, location: MicrobatchLocation) -> Fetched | None:
        """Read a microbatch; None if an owner died since the answer."""
        try:
            fetched = self._read(plan, location)
        except OwnerLostError as error:
            logger.warning("%s asks again where microbatch %d lies: %s", self._name, location.slot, error)
            # The owner died after the answer. The controller tells the flow, which has the part produced again; a
            # lookup by position then finds the new place.
            time.sleep(RETRY_S)
            return None
        self._unreleased += (location.slot,)
        return fetched

    def _read(self, plan: StepPlan, location: MicrobatchLocation) -> Fetched:
        started = time.time()
        microbatch = plan.microbatch(location.slot, self._dp_rank)
        rejected = set(location.rejected)
        # All in one call, so that parts on other nodes come in one transfer from each owner.
        wanted = [part for part in location.parts if part.position not in rejected and self._reads(part.part)]
        positions = [sample.position for sample in microbatch.samples if sample.position not in rejected]
        with self._staging.aside() if self._staging is not None else nullcontext():
            parts: dict[int, dict[str, Part]] = {}
            for part, data in self._bring(wanted):
                parts.setdefault(part.position, {})[part.part] = data
            batch = self._build([self._sample(position, parts[position]) for position in positions])
        ready = self._staging.mark() if self._staging is not None else None
        finished = time.time()
        self._spans.add("fetch", started, finished, unit=plan.unit.index, microbatch=location.slot)
        return Fetched(location.slot, batch, finished - started, ready)

    def _reads(self, part: str) -> bool:
        return part == TEXT_PART or not self._text_only

    def _bring(self, wanted: Sequence[PartLocation]) -> Iterator[tuple[PartLocation, Part]]:
        """Read parts: text to the host, which packs it, and features to the rank's device."""
        staging = self._staging
        on_host = [part for part in wanted if staging is None or part.part == TEXT_PART]
        yield from zip(on_host, self._pool.get_batch([part.extents for part in on_host]), strict=True)
        if staging is not None:
            features = [part for part in wanted if part.part != TEXT_PART]
            yield from zip(features, staging.get_batch([part.extents for part in features]), strict=True)

    def _sample(self, position: int, parts: dict[str, Part]) -> SampleArrays:
        text = parts[TEXT_PART]
        assert isinstance(text, np.ndarray)
        features = [self._features(data) for name, data in parts.items() if name != TEXT_PART]
        return SampleArrays(position, text.view(np.int32).reshape(2, -1), torch.cat(features) if features else None)

    def _features(self, data: Part) -> torch.Tensor:
        flat = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
        return flat.view(self._feature_dtype).view(-1, self._feature_dim)
