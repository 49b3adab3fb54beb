"""The prefetch thread of a backbone rank: plans, locations and bytes, ahead of the training thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flowtrain.actors.link import CoordinatorLink, Patience
from flowtrain.config.flow import LimitsConfig
from flowtrain.errors import OwnerLostError
from flowtrain.mempool.pool import Pool
from flowtrain.training.batch import PackedBatch, SampleArrays
from flowtrain.types import TEXT_PART, Microbatch, MicrobatchLocation, Span, StepPlan

BuildBatch = Callable[[list[SampleArrays]], PackedBatch]


@dataclass(frozen=True)
class Fetched:
    """A microbatch on the rank's side: ready to run. fetch_s: time to read and assemble it."""

    slot: int
    batch: PackedBatch
    fetch_s: float


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class Prefetcher:
    """Fetches unit after unit in the order of the run; ``next_plan`` and ``next_microbatch`` hand them over in order.

    depth: microbatches that may wait assembled. arrival: take whatever is READY next instead of the plan's order.
    build: assembles a microbatch from its samples' arrays (copies them, so nothing refers to the pool afterwards).
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
        record: Callable[[Span], None],
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
        self._record = record
        self._stopping = threading.Event()
        self._plans: queue.Queue[StepPlan | _Failed] = queue.Queue()
        self._microbatches: queue.Queue[Fetched | _Failed] = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._run, args=(first_unit,), name="prefetch", daemon=True)
        self._thread.start()

    def next_plan(self) -> StepPlan:
        """The next unit's plan; waits for it. Raises what went wrong in the thread."""
        return _unwrap(self._plans.get())

    def next_microbatch(self) -> Fetched:
        """The next microbatch of the unit whose plan was taken last; waits for it."""
        return _unwrap(self._microbatches.get())

    def close(self) -> None:
        """End the thread; what it fetched ahead is dropped."""
        self._stopping.set()
        self._thread.join(timeout=self._limits.stop_timeout_s)

    def _run(self, unit: int) -> None:
        try:
            while (plan := self._wait_for_plan(unit)) is not None:
                self._plans.put(plan)
                for microbatch in plan.rank_microbatches(self._dp_rank):
                    fetched = self._fetch(plan, microbatch)
                    if fetched is None or not self._offer(fetched):
                        return
                unit += 1
        except BaseException as error:  # handed to the training thread, which raises it wherever it waits
            self._plans.put(_Failed(error))
            self._offer(_Failed(error))

    def _offer(self, item: Fetched | _Failed) -> bool:
        while not self._stopping.is_set():
            try:
                self._microbatches.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def _wait_for_plan(self, unit: int) -> StepPlan | None:
        patience = self._patience(unit, None)
        while not self._stopping.is_set():
            plan, past_end = self._link.call("next_plan", unit)
            if plan is not None or past_end:
                return plan
            patience.tick()
        return None

    def _fetch(self, plan: StepPlan, microbatch: Microbatch) -> Fetched | None:
        """Wait until the microbatch is READY and read it; asks again when an owner died in between."""
        wanted = None if self._arrival else microbatch.slot
        patience = self._patience(plan.unit.index, wanted)
        while not self._stopping.is_set():
            location = self._link.call("locate", plan.unit.index, wanted, self._dp_rank)
            if location is not None:
                wanted = location.slot
                try:
                    return self._read(plan, location)
                except OwnerLostError:
                    # The owner died after the answer; the directory learns of it from the controller and has the part
                    # made again, and a lookup by position finds the new place.
                    time.sleep(0.05)
            patience.tick()
        return None

    def _patience(self, unit: int, slot: int | None) -> Patience:
        return Patience(
            self._name, self._limits, lambda: str(self._link.call("describe_wait", unit, slot, self._dp_rank))
        )

    def _read(self, plan: StepPlan, location: MicrobatchLocation) -> Fetched:
        started = time.time()
        microbatch = plan.slots[location.slot][self._dp_rank]
        rejected = set(location.rejected)
        parts = {(part.position, part.part): part.extents for part in location.parts}
        samples = []
        for sample in microbatch.samples:
            if sample.position in rejected:
                continue
            text = self._pool.get(parts.pop((sample.position, TEXT_PART))).view(np.int32).reshape(2, -1)
            features = [self._features(parts[key]) for key in parts if key[0] == sample.position]
            samples.append(SampleArrays(sample.position, text, torch.cat(features) if features else None))
        batch = self._build(samples)
        finished = time.time()
        args: dict[str, int | float | str] = {"unit": plan.unit.index, "microbatch": location.slot}
        self._record(Span(self._name, "fetch", started, finished, args))
        return Fetched(location.slot, batch, finished - started)

    def _features(self, extents: tuple[object, ...]) -> torch.Tensor:
        data = self._pool.get(extents)
        return torch.frombuffer(data, dtype=self._feature_dtype).view(-1, self._feature_dim)


def _unwrap(item: object) -> object:
    if isinstance(item, _Failed):
        raise item.error
    return item
