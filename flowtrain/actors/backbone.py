"""A backbone rank runs units with the microbatches that its prefetch thread fetches."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

import torch

from flowtrain.actors.answering import answering_of
from flowtrain.actors.keeper import Keeper
from flowtrain.actors.link import CoordinatorLink, node_address, node_id
from flowtrain.actors.pooling import join_pool
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.actors.rank_reader import build_reader, reads_pool
from flowtrain.actors.reading import Fetched, MicrobatchReader
from flowtrain.actors.replica_channel import COLLECTIVE_MARGIN_S, channel_of
from flowtrain.actors.saving import RankSaves, Snapshots
from flowtrain.actors.spans import SpanLog
from flowtrain.actors.timed_stages import TimedStages
from flowtrain.actors.whereabouts import Diary, dump_stacks
from flowtrain.actors.windows import Windows
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, SnapshotLostError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.mempool.pool import Pool
from flowtrain.models.device import opened_device
from flowtrain.models.families.registry import unchecked_family
from flowtrain.pipeline.executor import execute
from flowtrain.training.checkpoint_store import probe_directory
from flowtrain.training.clock import MicrobatchClock
from flowtrain.training.health import TrainingHealth, Verdict
from flowtrain.training.kept_snapshot import KeptSnapshot, read_memory
from flowtrain.training.memory_choice import (
    decide_recomputation,
    decide_reduction,
    decide_sharding,
    with_choices,
    with_recomputation,
)
from flowtrain.training.memory_guard import MemoryGuard
from flowtrain.training.mesh import init_backbone_group, open_listener
from flowtrain.training.peak import device_peak
from flowtrain.training.saver import CheckpointSaver, Report, writes_in_background
from flowtrain.training.trainer import StepResult, Trainer
from flowtrain.types.evaluation import EvalRounds, GeneratedAnswer
from flowtrain.types.messages import RankReport
from flowtrain.types.plan import Degrees, RankStart, StateOrigin, StepPlan, UnitKind
from flowtrain.types.tracing import TraceOrder
from flowtrain.types.whereabouts import WAIT_FOR_DATA, Whereabouts

T = TypeVar("T")


class BackboneRank:
    """One rank of the backbone's (dp, pp, tp) group: a thin shell round ``Trainer``.

    The first rank of each replica, its leader, talks to the coordinator for all of them. Texts are read by the leader,
    features by the first stage, each rank its share. Every rank knows every shape.

    rank: index among all backbone ranks.
    name: of the actor.
    num_steps: steps of the whole run, for the learning-rate schedule.
    run_id: unique to the run.
    """

    def __init__(self, config: RunConfig, rank: int, degrees: Degrees, name: str, num_steps: int, run_id: str) -> None:
        self._config = config
        self._rank = rank
        self._degrees = degrees
        self._dp_rank, self._pp_rank, self._tp_rank = degrees.coordinates(rank)
        self._name = name
        self._num_steps = num_steps
        self._run_id = run_id
        self._listener: socket.socket | None = None
        self._spans = SpanLog(name)
        self._windows = Windows(name)
        self._diary = Diary()
        self._starved_s = 0.0
        self._fetch_s = 0.0
        self._read_nbytes = 0
        self._pool: Pool | None = None

    # --- start --------------------------------------------------------------------------------------------------

    def node_address(self) -> str:
        """Return the address of this rank's node; the driver compares them to see whether all ranks share a node."""
        return node_address()

    def node_id(self) -> str:
        """Return the id of this rank's node."""
        return node_id()

    def open_rendezvous(self, host: str) -> int:
        """On rank 0: listen on ``host`` for the other ranks; returns the port."""
        self._listener = open_listener(host)
        return int(self._listener.getsockname()[1])

    def start(
        self,
        host: str,
        port: int,
        origin: StateOrigin,
        evaluations: tuple[EvalRounds, ...],
        shard_size: int | None,
        keeper: Keeper | None = None,
    ) -> RankStart:
        """Join the group, build the model, load the state.

        shard_size: data parallel ranks that share one set of shards; None: all.
        evaluations: of each held-out set. A checkpoint that is due waits for those after its step.
        keeper: keeps this node's snapshots; None: there are none.
        """
        self._evaluations, self._origin, self._keeper = evaluations, origin, keeper
        device = opened_device(self._config.model.device)
        self._family = unchecked_family(self._config)
        limits = self._config.limits
        self._group = init_backbone_group(
            self._rank,
            self._degrees,
            device,
            host=host,
            port=port,
            listener=self._listener,
            shard_size=shard_size,
            start_timeout_s=limits.start_limit_s,
            # Ranks that wait for a starved rank must not give up before it reports what it waits for, nor before a
            # rank that still reads its state.
            collective_timeout_s=max(limits.stall_timeout_s, limits.start_limit_s) + COLLECTIVE_MARGIN_S,
        )
        reduction = decide_reduction(self._config, self._family, self._group)
        sharding = decide_sharding(self._config, self._family, self._group)
        self._config = with_choices(self._config, reduction.name, sharding.name)
        recomputation = decide_recomputation(self._config, self._family, self._group)
        if recomputation is not None:
            self._config = with_recomputation(self._config, recomputation)
        self._replica, self._reading = channel_of(self._group.replica_group), channel_of(self._group.reading_group)
        self.trainer = self.make_trainer(self._state())
        if recomputation is not None and device.type != "cpu":  # what a CPU's step takes is not measured
            rank = recomputation.ranks[self._pp_rank]
            self.trainer.guard_memory(MemoryGuard.of(self.trainer.model.partition, rank, self._group))
        recomputed = recomputation.text if recomputation is not None else ""
        return RankStart(device_peak(device, self._dtype), reduction, sharding, recomputed)

    def _state(self) -> Path | KeptSnapshot | None:
        step, checkpoint = self._origin.snapshot_step, self._origin.checkpoint
        if step is None:
            return None if checkpoint is None else Path(checkpoint)
        assert self._keeper is not None, "a snapshot has a keeper"
        file = self._keeper.find(self._rank, step)
        if file is None:
            raise SnapshotLostError(f"node {node_address()} has no snapshot of {self._name} after step {step}")
        return read_memory(file)

    def make_trainer(self, resume_from: Path | KeptSnapshot | None) -> Trainer:
        """Build this rank's trainer, with the state of a checkpoint or a snapshot if there is one; collective."""
        return Trainer(
            self._config,
            self._family,
            self._group,
            self._num_steps,
            record=self._spans.add,
            resume_from=resume_from,
        )

    @property
    def _dtype(self) -> torch.dtype:
        dtype = getattr(torch, self._config.model.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    # --- the loop -----------------------------------------------------------------------------------------------

    def whereabouts(self) -> Whereabouts:
        """Return what this rank does now."""
        return self._diary.read()

    def dump_stacks(self, directory: str) -> None:
        """Write what all threads of this process are in."""
        dump_stacks(Path(directory) / f"{self._name}.txt")

    def trace(self, order: TraceOrder) -> tuple[str, ...]:
        """Trace as the order says, from the next unit on, and wait for the end; returns what failed, and why."""
        return self._windows.ask(order).result()

    def run(
        self,
        link: CoordinatorLink,
        first_unit: int,
        first_step: int,
        checkpoint_dir: str,
        nonce: str,
        last_traced_step: int = 0,
        saved_step: int | None = None,
    ) -> None:
        """Run units until the coordinator sends stop; write checkpoints into temporaries under ``checkpoint_dir``.

        first_step: steps already done. nonce: part of the temporaries' names. last_traced_step: spans are recorded
        until it is done. saved_step: step of the last checkpoint; None: ``first_step``.
        Raises ConfigError if this node does not see the driver's ``checkpoint_dir``. Also raises the errors of the
        prefetch thread and of the training step.
        """
        if not probe_directory(Path(checkpoint_dir), nonce).is_dir():
            raise ConfigError(
                f"{self._name} on node {node_address()} does not see the run's directory {checkpoint_dir}; runs_dir "
                f"({self._config.runs_dir}) must lie on a file system that all nodes share"
            )
        self._link = link
        self._saves = self._make_saves(link, checkpoint_dir, nonce, first_step if saved_step is None else saved_step)
        self._health = TrainingHealth(self._config.training, self.trainer, Path(checkpoint_dir), self._saves.wait)
        self._health.recall(first_step)
        self._answering = answering_of(self._config, self._family, self.trainer, self._replica.is_leader)
        self._spans.follow(link)
        self._windows.last_step = last_traced_step
        pool = self._pool = self._join_pool() if reads_pool(self._config, self.trainer.model, self._group) else None
        prefetcher = self._prefetcher(pool, first_unit)
        step = first_step
        try:
            self._diary.begin("its first question to the coordinator", may_last=True)
            goes_on = self._replica.lead(partial(self._link.ask, CoordinatorApi.begin, first_unit))
            while goes_on:
                step, goes_on = self._run_unit(prefetcher)
            self._diary.begin("the end of the run", may_last=True)
            prefetcher.close()
            self._health.check_end(step)
            if self._config.checkpoint.at_end:
                self._saves.at_end(step)
            self._saves.wait()  # for what uses the groups
        finally:
            self._windows.close()
            prefetcher.close(failed=True)
            if pool is not None:
                pool.close()
        # Not after an error: this would wait for what other ranks never send, and delay the error.
        self._group.close()

    def _join_pool(self) -> Pool:
        return join_pool(
            self._link, self._config.pool, self._run_id, self._name, 0, "backbone", self._group.device
        ).pool

    def _prefetcher(self, pool: Pool | None, first_unit: int) -> Prefetcher:
        return Prefetcher(
            name=self._name,
            link=self._link,
            channel=self._reading,
            dp_rank=self._dp_rank,
            reader=self._build_reader(pool),
            limits=self._config.limits,
            depth=self._config.backbone.prefetch_microbatches,
            arrival=self._config.data.order == "arrival",
            first_unit=first_unit,
            whole_units=self._config.exchanges_units,
        )

    def _build_reader(self, pool: Pool | None) -> MicrobatchReader:
        return build_reader(self._config, self._family, self._group, self.trainer.model, pool, self._spans)

    def _run_unit(self, prefetcher: Prefetcher) -> tuple[int, bool]:
        """Run a unit; returns its step, and whether another unit follows."""
        started = self._spans.now_s()
        plan = self._starving(prefetcher.next_plan)
        self._diary.begin_unit(plan.unit.index, plan.unit.step)
        is_traced = self._windows.begin(self._group.device, plan.unit.step)
        self._spans.is_on = self.trainer.stages.spans.is_on = is_traced
        actions = self.trainer.begin_unit(plan)
        is_training = plan.unit.kind is UnitKind.TRAIN
        clock = self._make_clock() if is_training else None
        execute(
            actions,
            TimedStages(self.trainer.stages, clock, self._diary),
            self._microbatches(prefetcher),
            partial(self._ran, plan),
        )
        self._diary.begin("the end of the unit")
        result = self.trainer.finish_unit()
        self._diary.begin("what follows the unit", may_last=True)
        generated = () if is_training else self._answers(plan)
        step = plan.unit.step
        verdict = self._health.after_step(step, result) if is_training else Verdict()
        microbatch_s = clock.times() if clock is not None else ()
        goes_on = self._report(plan, result, started, microbatch_s, verdict.rewound_to, generated)
        self._windows.end(step)
        self._health.raise_together(verdict.error)
        if is_training:
            self._saves.prepare(step)
        self._saves.after_unit(plan.unit, self._health, is_last=not goes_on)
        return step, goes_on

    def _make_clock(self) -> MicrobatchClock:
        return MicrobatchClock(self._group.device)

    def _microbatches(self, prefetcher: Prefetcher) -> Callable[[int], Fetched]:
        """Return a function that gives a unit's microbatches; all ranks of a replica get the same one for a number."""
        numbers = count()

        def next_microbatch(number: int) -> Fetched:
            expected = next(numbers)
            assert number == expected, f"the actions ask for microbatch {number} before {expected}"
            return self._starving(prefetcher.next_microbatch)

        return next_microbatch

    def _ran(self, plan: StepPlan, fetched: Fetched) -> None:
        """Note that a microbatch is done; its bytes in the pool were released when it was read."""
        self._fetch_s += fetched.fetch_s
        self._read_nbytes += fetched.read_nbytes
        if self._answering is not None and plan.unit.kind is UnitKind.EVAL:
            self._answering.keep(plan, fetched)

    def _answers(self, plan: StepPlan) -> tuple[GeneratedAnswer, ...]:
        """Let the model answer some samples of an evaluation; the leader of a replica returns the answers."""
        if self._answering is None:
            return ()
        spans, started = self.trainer.stages.spans, time.monotonic()
        is_on, spans.is_on = spans.is_on, False  # a span of every token would bury others
        answers = self._answering.answers(plan)
        spans.is_on = is_on
        self._spans.add("generate", started, time.monotonic(), samples=len(answers))
        return answers

    def _starving(self, wait: Callable[[], T]) -> T:
        """Wait for the prefetch thread, counting the time."""
        started = time.monotonic()
        self._diary.begin(WAIT_FOR_DATA, may_last=True)
        item = wait()
        self._diary.begin("its work")
        self._starved_s += time.monotonic() - started
        return item

    def _report(
        self,
        plan: StepPlan,
        result: StepResult,
        started: float,
        microbatch_s: tuple[float, ...],
        rewound_to: int | None,
        generated: tuple[GeneratedAnswer, ...],
    ) -> bool:
        """Report a unit; returns whether another one follows."""
        report = RankReport(
            unit=plan.unit.index,
            kind=plan.unit.kind,
            step=plan.unit.step,
            dp_rank=self._dp_rank,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            num_samples=result.num_samples,
            num_tokens=result.num_tokens,
            num_target_tokens=result.num_target_tokens,
            started_s=started,
            finished_s=self._spans.now_s(),
            starved_s=self._starved_s,
            fetch_s=self._fetch_s,
            read_nbytes=self._read_nbytes,
            microbatch_s=microbatch_s,
            rewound_to=rewound_to,
            host_s=self._take_host_s(),
            generated=generated,
            read_by_transport=self._pool.take_read_nbytes() if self._pool is not None else {},
            is_spike=result.is_spike,
            sample_losses=result.sample_losses,
        )
        self._starved_s = self._fetch_s = 0.0
        self._read_nbytes = 0
        self.trainer.stages.spans.collect()
        self._diary.begin("its report")
        members = self._replica.collect((report, self._spans.take()))

        def finish() -> bool:
            self._diary.begin("a question to the coordinator", may_last=True)
            assert members is not None, "the leader has them all"
            reports, spans = zip(*members, strict=True)
            return self._link.ask(CoordinatorApi.finish, reports, tuple(chain.from_iterable(spans)))

        return self._replica.lead(finish)

    def _take_host_s(self) -> float | None:
        """Return what ``RankReport.host_s`` says; it is known on emulated devices alone."""
        return None

    # --- saving -------------------------------------------------------------------------------------------------

    def _make_saves(self, link: CoordinatorLink, checkpoint_dir: str, nonce: str, saved_step: int) -> RankSaves:
        every_steps, snapshots = self._config.checkpoint.snapshot_every_steps, None
        if self._keeper is not None and every_steps is not None:
            name = f"flowtrain-{self._run_id}-{self._name}"
            complete = self._origin.snapshot_step
            snapshots = Snapshots(every_steps, self.trainer, self._group, link, self._keeper, name, complete)
            if not self._origin.again:  # the run has started with what it needs; it must not end for a snapshot now
                snapshots.check_room()
        return RankSaves(
            self._config.checkpoint,
            partial(self._make_saver, saved_step),
            link,
            self._rank,
            self._evaluations,
            Path(checkpoint_dir),
            nonce,
            partial(self._diary.begin, may_last=True),
            self._num_steps,
            snapshots,
        )

    def _make_saver(self, saved_step: int, report: Report) -> CheckpointSaver:
        setting, trainer = self._config.checkpoint.background, self.trainer
        return CheckpointSaver(
            self._group,
            trainer.snapshot,
            trainer.write_snapshot,
            report,
            self._spans.add,
            background=writes_in_background(setting, trainer.copy_nbytes(), self._group),
            saved_step=saved_step,
        )
