"""Emulated actors of a large run, many in a process: each asks the coordinator as a real one does, and does no work.

``_startup_nodes.py`` puts them into processes. What a real actor does and an emulated one does not: the start of its
own process, imports, weights, process groups, bytes in the pool (every part is zeros), compute.
"""

from __future__ import annotations

import cProfile
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from _positions import FEATURE_NBYTES, encode, feed, sample_of
from ray.actor import ActorHandle

from flowtrain.actors.coordinator import Coordinator
from flowtrain.actors.link import P, Question, R, RayLink
from flowtrain.actors.pooling import address_space
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.actors.reading import Fetched, MicrobatchReader
from flowtrain.actors.replica_channel import Alone
from flowtrain.config.run import RunConfig
from flowtrain.flow.api import CoordinatorApi
from flowtrain.training.batch import PackedBatch
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.events import Event, UnitDone
from flowtrain.types.memory import Extent, Tier
from flowtrain.types.messages import LocatedTexts, MicrobatchLocation, RankReport
from flowtrain.types.plan import Degrees, DevicePeak, GradientReduction, RankStart, Sharding, StepPlan
from flowtrain.types.sources import SourceIndex

RECORDS = "FLOWTRAIN_STARTUP_RECORDS"
"""Environment variable: the directory into which emulated actors and the coordinator write what they measured."""
PROFILE = "FLOWTRAIN_STARTUP_PROFILE"
"""Environment variable: a file into which the coordinator's calls are profiled, over ``PROFILED_STEPS``."""
PROFILED_STEPS = (5, 25)
STEP_S = 1.0
ENCODE_S = 0.5
"""Seconds of an emulated encoder's batch: half of a step."""
LIMIT_S = 120.0


class NodeLink(RayLink):
    """A link of an emulated node. calls: questions of this process so far, by name."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, coordinator: ActorHandle, node: int) -> None:
        super().__init__(coordinator)
        self._node = node

    def ask(self, question: Question[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``RayLink``."""
        self.calls[question.__name__] += 1
        return super().ask(question, *args, **kwargs)

    @property
    def node_id(self) -> str:
        """Id of the emulated node."""
        return f"emulated-{self._node}"


class ZerosPool:
    """Stands in for ``Pool``: knows which owners it can read, and reads zeros."""

    def __init__(self, config: RunConfig, link: RayLink) -> None:
        self._space = address_space(config.pool)
        self._link = link
        self._known: set[int] = set()

    def get_batch(self, parts: Sequence[Sequence[Extent]]) -> list[np.ndarray]:
        """As ``Pool.get_batch``; asks for the exports whenever an owner is unknown, as a pool does."""
        owners = {self._space.translate(extent.gva).process_index for part in parts for extent in part}
        if not owners <= self._known:
            self._known = {export.process_index for export in self._link.ask(CoordinatorApi.exports)}
        return [_ZEROS[: sum(extent.nbytes for extent in part)] for part in parts]


class ZerosReader:
    """Stands in for ``MicrobatchReader``: reads zeros, and assembles nothing."""

    def __init__(self, pool: ZerosPool) -> None:
        self._pool = pool

    def lead(self, location: MicrobatchLocation) -> LocatedTexts:
        """See ``MicrobatchReader``."""
        self._pool.get_batch([part.extents for part in location.parts])
        return LocatedTexts(location, ())

    def read(self, plan: StepPlan, order: LocatedTexts) -> Fetched:
        """See ``MicrobatchReader``."""
        return Fetched(order.location.slot, cast(PackedBatch, None), 0.0)

    def complete(self, fetched: Fetched) -> Fetched:
        """See ``MicrobatchReader``."""
        return fetched


_ZEROS = np.zeros(FEATURE_NBYTES, np.uint8)


class EmulatedFeeder:
    """Sizes its share of the samples, which are a function of their position."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        indexes: Sequence[SourceIndex],
        feeder: int = 0,
        num_feeders: int = 1,
        segment_nbytes: int = 0,
    ) -> None:
        self._config, self._feeder, self._num_feeders = config, feeder, num_feeders

    def run(self, link: RayLink) -> None:
        """See ``Feeder``."""
        base = address_space(self._config.pool).gva(Tier.DRAM, 0, 0)
        feed(link, f"feeder-{self._feeder}", base, self._samples(), self._feeder)

    def _samples(self) -> Iterator[list[Any]]:
        size, first = self._config.training.global_batch_size, 0
        while True:
            mine = (p for p in range(first, first + size) if p % self._num_feeders == self._feeder)
            yield [sample_of(position) for position in mine]
            first += size


class EmulatedEncoder:
    """Leases batches, waits, and hands them in."""

    def __init__(self, config: RunConfig, encoder: str, name: str, run_id: str) -> None:
        self._config, self._name = config, name

    def run(self, link: RayLink) -> None:
        """See ``Encoder``."""
        encode(link, self._name, address_space(self._config.pool).gva(Tier.DRAM, 0, 0), ENCODE_S)


class EmulatedRank:
    """A backbone rank. The leader of each replica fetches with the real ``Prefetcher`` and waits out each step."""

    def __init__(self, config: RunConfig, rank: int, degrees: Degrees, name: str, num_steps: int, run_id: str) -> None:
        self._config, self._rank, self._degrees, self._name = config, rank, degrees, name
        self._dp_rank, *others = degrees.coordinates(rank)
        self._is_leader = not any(others)
        self.node = 0

    def node_address(self) -> str:
        """The address of the emulated node."""
        return f"10.64.0.{self.node + 1}"

    def open_rendezvous(self, host: str) -> int:
        """No rank meets another."""
        return 1

    def start(
        self,
        host: str,
        port: int,
        checkpoint: str | None,
        evaluations: tuple[EvalRounds, ...],
        shard_size: int | None,
    ) -> RankStart:
        """Load nothing."""
        reduction, sharding = GradientReduction("step", "emulated"), Sharding("full", "emulated")
        return RankStart(DevicePeak("emulated", 1e15, "emulated"), reduction, sharding)

    def run(self, link: RayLink, first_unit: int, first_step: int, *where: object) -> None:
        """Run units until the coordinator sends stop."""
        link.ask(CoordinatorApi.join, self._name, link.node_id, None)
        pool = ZerosPool(self._config, link)
        if not self._is_leader:
            return
        prefetcher = self._prefetcher(link, pool, first_unit)
        first = True
        goes_on = link.ask(CoordinatorApi.begin, first_unit)
        while goes_on:
            started = time.time()
            plan = prefetcher.next_plan()
            for _ in range(plan.num_slots):
                prefetcher.next_microbatch()
                if first:
                    note("first-microbatch", {"at_s": time.time(), "dp_rank": self._dp_rank})
                    first = False
                time.sleep(0.9 * STEP_S / plan.num_slots)
            wait_for_step_end()
            goes_on = link.ask(CoordinatorApi.finish, self._reports(plan, started), ())
        prefetcher.close()

    def _prefetcher(self, link: RayLink, pool: ZerosPool, first_unit: int) -> Prefetcher:
        return Prefetcher(
            name=self._name,
            link=link,
            channel=Alone(),
            dp_rank=self._dp_rank,
            reader=cast(MicrobatchReader, ZerosReader(pool)),
            limits=self._config.limits,
            depth=self._config.backbone.prefetch_microbatches,
            arrival=self._config.data.order == "arrival",
            first_unit=first_unit,
        )

    def _reports(self, plan: StepPlan, started: float) -> tuple[RankReport, ...]:
        unit, slots = plan.unit, plan.num_slots
        counts = plan.num_samples, plan.num_tokens, plan.num_target_tokens
        times = started, time.time(), 0.0, 0.0
        each = (STEP_S / slots,) * slots
        report = RankReport(unit.index, unit.kind, unit.step, self._dp_rank, 1.0, 1.0, 0.1, *counts, *times, each)
        return (report,) * self._degrees.replica_size


def wait_for_step_end() -> None:
    """Wait for the next multiple of a step's length on the clock, at which all ranks of all processes end a step."""
    time.sleep(STEP_S - time.time() % STEP_S)


def note(name: str, record: Mapping[str, Any]) -> None:
    """Write down something measured, for the benchmark."""
    with (Path(os.environ[RECORDS]) / f"{name}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


class MeasuredCoordinator(Coordinator):
    """A coordinator that also writes down its process's processor time, at each finished unit."""

    def __init__(self, make_flow: Callable[[], Any], poll_s: float = 5.0) -> None:
        super().__init__(make_flow, poll_s)
        self._profile = cProfile.Profile() if PROFILE in os.environ else None
        self._note(0)

    async def events(self) -> tuple[Event, ...]:
        """See ``Coordinator``."""
        events = await super().events()
        for event in events:
            if isinstance(event, UnitDone):
                if [row.position for row in event.ledger] != list(event.unit.positions):
                    raise RuntimeError(f"unit {event.unit.index} consumed other positions than its own")
                self._note(event.unit.step)
        return events

    def _note(self, step: int) -> None:
        if self._profile is not None:
            if step == PROFILED_STEPS[0]:
                self._profile.enable()
            elif step == PROFILED_STEPS[1]:
                self._profile.disable()
                self._profile.dump_stats(os.environ[PROFILE])
        note("coordinator", {"step": step, "at_s": time.time(), "cpu_s": time.process_time()})
