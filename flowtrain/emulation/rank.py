"""A backbone rank on an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.keeper import Keeper
from flowtrain.actors.rank_reader import build_reader
from flowtrain.actors.reading import MicrobatchReader
from flowtrain.actors.spans import SpanLog
from flowtrain.config.run import RunConfig
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.emulation.process import BACKBONE, EmulatedProcess, HeaderReader, ScratchStaging
from flowtrain.emulation.stages import EmulatedStages
from flowtrain.emulation.thread_replica import ThreadChannel
from flowtrain.emulation.trainer import EmulatedClock, EmulatedGroup, EmulatedSaver, EmulatedTrainer
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.staging import DeviceStaging
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.recompute import Recomputation
from flowtrain.training.clock import MicrobatchClock
from flowtrain.training.memory_choice import foreseen_recomputation, foreseen_reduction, foreseen_sharding, with_choices
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.saver import CheckpointSaver, Report
from flowtrain.training.trainer import Trainer
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.plan import Degrees, DevicePeak, GradientReduction, RankStart, Sharding, StateOrigin

T = TypeVar("T")
_REAL_WAIT_S = 0.0005


class EmulatedRank(BackboneRank):
    """A backbone rank whose stages wait instead of computing."""

    def __init__(
        self,
        process: EmulatedProcess,
        config: RunConfig,
        rank: int,
        degrees: Degrees,
        name: str,
        num_steps: int,
        run_id: str,
    ) -> None:
        super().__init__(config, rank, degrees, name, num_steps, run_id)
        self._process = process
        self._spans = SpanLog(f"{name} (emulated)")

    def node_address(self) -> str:
        """Return the name of its emulated node."""
        return f"emulated-{self._rank // self._process.run.settings.devices_per_node}"

    def open_rendezvous(self, host: str) -> int:
        """No process group is opened."""
        return 0

    def start(
        self,
        host: str,
        port: int,
        origin: StateOrigin,
        evaluations: tuple[EvalRounds, ...],
        shard_size: int | None,
        keeper: Keeper | None = None,
    ) -> RankStart:
        """Take the place in the emulated backbone; no process group and no model is built."""
        process, run = self._process, self._process.run
        self._evaluations, self._family, self._keeper = evaluations, process.family, None
        rooms, member = process.rooms(self._dp_rank), self._rank % self._degrees.replica_size
        self._replica, self._reading = ThreadChannel(member, rooms.training), ThreadChannel(member, rooms.reading)
        group = EmulatedGroup(self._rank, self._degrees, rooms.tensor[self._pp_rank])
        self._group = cast(BackboneGroup, group)
        times, device = process.times(BACKBONE), run.device_type(BACKBONE)
        size = shard_size or self._degrees.dp
        reduction, sharding = self._choices(times, size)
        setup = replace(times.setup, sharding=sharding.name, gradient_reduction=reduction.name)
        self._clock = process.clock(BACKBONE, self._rank)
        foresee = with_choices(self._config, reduction.name, sharding.name), self._family, self._degrees
        recomputation = foreseen_recomputation(*foresee, times.device.memory_nbytes, size)
        times = replace(times, setup=setup)
        self.trainer = cast(Trainer, self._make_trainer(group, times, size, recomputation))
        source = "profile" if run.profile is not None else "data sheet"
        recomputed = recomputation.text if recomputation is not None else ""
        return RankStart(DevicePeak(f"emulated {device.name}", device.flops, source), reduction, sharding, recomputed)

    def _choices(self, times: DeviceTimes, shard_size: int) -> tuple[GradientReduction, Sharding]:
        foresee = (self._config, self._family, self._degrees, times.device.memory_nbytes, shard_size)
        return foreseen_reduction(*foresee), foreseen_sharding(*foresee)

    def _make_trainer(
        self, group: EmulatedGroup, times: DeviceTimes, shard_size: int, recomputation: Recomputation | None
    ) -> EmulatedTrainer:
        config, process, encoder = self._config, self._process, self._family.encoder_names[0]
        partition = configured_partition(config, times.model, self._degrees.pp)
        tower = None
        if config.mode == "monolithic":
            tower = self._family.tower_shape
        actions = ActionTimes(times, self._degrees, shard_size)
        stages = EmulatedStages(
            self._rank,
            self._degrees,
            partition,
            actions,
            process.meetings,
            self._clock,
            encoder=encoder,
            tower=tower,
            gathers_each=times.setup.sharding != "gradients",
            reduces_each=times.setup.gradient_reduction == "microbatch",
            recomputed=recomputation.counts(partition) if recomputation is not None else {},
            record=self._spans.add,
        )
        return EmulatedTrainer(config, group, partition, tower, stages, actions, process.meetings, self._num_steps)

    def _build_reader(self, pool: Pool | None) -> MicrobatchReader:
        name, limit = self._family.encoder_names[0], self._config.data.max_image_pixels
        return build_reader(
            self._config,
            self._family,
            self._group,
            self.trainer.model,
            pool,
            self._spans,
            staging=cast(DeviceStaging, ScratchStaging(self._process, pool)),
            image_reader=partial(HeaderReader, family=self._family, encoder=name, max_pixels=limit),
        )

    def _starving(self, wait: Callable[[], T]) -> T:
        before = self._starved_s
        item = super()._starving(wait)
        if (waited := self._starved_s - before) > _REAL_WAIT_S:
            self._clock.idled(waited)
        return item

    def _make_clock(self) -> MicrobatchClock:
        clock, settings = self._clock, self._process.run.settings
        return cast(MicrobatchClock, EmulatedClock(lambda: clock.busy_s, settings.time_scale))

    def _make_saver(self, saved_step: int, report: Report) -> CheckpointSaver:
        return cast(CheckpointSaver, EmulatedSaver(saved_step))

    def _take_host_s(self) -> float | None:
        host_s, self._clock.host_s = self._clock.host_s, 0.0
        return host_s
