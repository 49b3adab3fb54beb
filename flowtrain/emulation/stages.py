"""A backbone rank's stages on an emulated device: each action takes its time, and nothing is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from flowtrain.costs.action_times import ActionTimes, StageWork
from flowtrain.costs.microbatches import MicrobatchWork
from flowtrain.emulation.device import RankClock
from flowtrain.emulation.meetings import Meeting, Meetings
from flowtrain.models.encoder_stage import EncoderShape
from flowtrain.pipeline.actions import Action, ActionKind, Payload, StageModule
from flowtrain.pipeline.image_parts import image_parts
from flowtrain.pipeline.partition import Partition
from flowtrain.simulator.step import stage_work
from flowtrain.training.batch import PackedBatch
from flowtrain.training.stages import span_args
from flowtrain.training.work_spans import SpanRecorder, WorkSpans
from flowtrain.types.plan import Degrees

_Key = tuple[StageModule, int]


class EmulatedStages:
    """The executor's ``StageRuntime`` of one rank.

    encoder: name of the encoder; its stages are in the partition in ``mode: monolithic``. tower: its shape there.
    gathers_each: parameters are gathered for each pass (full and hybrid sharding), else once a unit.
    reduces_each: gradients are summed with each microbatch, else with the last one.
    recomputed: layers that stages recompute; of a stage that is not there, or None: as the setup of the times tells.
    """

    def __init__(
        self,
        rank: int,
        degrees: Degrees,
        partition: Partition,
        times: ActionTimes,
        meetings: Meetings,
        clock: RankClock,
        *,
        encoder: str,
        tower: EncoderShape | None,
        gathers_each: bool,
        reduces_each: bool,
        recomputed: Mapping[_Key, int | None],
        record: SpanRecorder | None,
    ) -> None:
        self._rank, self._degrees, self._times, self._meetings = rank, degrees, times, meetings
        self._flow, self._tower = partition.stages, tower
        self._places = {(stage.module, stage.index): place for place, stage in enumerate(self._flow)}
        self._works = {
            key: replace(stage_work(partition, self._flow[place], encoder), recomputed=recomputed.get(key))
            for key, place in self._places.items()
        }
        self._encoder, self._gathers_each, self._reduces_each = encoder, gathers_each, reduces_each
        self.clock = clock
        self.spans = WorkSpans(torch.device("cpu"), record)
        dp_rank, self._pp_rank, self._tp_rank = degrees.coordinates(rank)
        first = dp_rank - dp_rank % times.shard_size
        self._shard_ranks = [
            degrees.rank(each, self._pp_rank, self._tp_rank) for each in range(first, first + times.shard_size)
        ]
        self._replica_ranks = [degrees.rank(each, self._pp_rank, self._tp_rank) for each in range(degrees.dp)]
        self._gathered: set[_Key] = set()
        self._summed: set[_Key] = set()
        self._fetched: set[int] = set()
        self._num_parts: dict[int, int] = {}
        self._link_free: dict[int, float] = {}
        self._expected: dict[Action, int] = {}
        self._num_expected: Counter[int] = Counter()

    @property
    def own_work(self) -> list[StageWork]:
        """The stages of this rank."""
        return [self._works[key] for key, place in self._places.items() if self._flow[place].rank == self._pp_rank]

    def begin(self, actions: Sequence[Action]) -> None:
        """Start a unit of which these are the actions of this rank."""
        self._gathered.clear()
        self._summed.clear()
        self._fetched.clear()
        self._num_parts = {}
        for action in actions:
            if action.sub_microbatch is not None:
                known = self._num_parts.get(action.microbatch, 0)
                self._num_parts[action.microbatch] = max(known, action.sub_microbatch + 1)

    def forward_stage(self, action: Action, microbatch: PackedBatch) -> None:
        """See ``StageRuntime``; a gather of parameters that takes longer than the forward is waited for."""
        at, key = self.clock.now(), (action.module, action.stage)
        seconds = self._times.forward_s(self._works[key], self._microbatch_work(action, microbatch))
        if action.microbatch not in self._fetched:
            self._fetched.add(action.microbatch)
            seconds += self._times.microbatch_s
        if key not in self._gathered:
            seconds += self._times.ends_s(self._works[key])[0]
        gathers = self._times.gathers_parameters(self._works[key])
        gathers = gathers and (self._gathers_each or key not in self._gathered)
        self._gathered.add(key)
        exposed = self._times.gather_s(self._works[key], seconds) if gathers else 0.0
        self._run("forward", action, microbatch, at, seconds, exposed, meets=gathers)

    def backward_stage(self, action: Action, microbatch: PackedBatch, *, is_last: bool) -> None:
        """See ``StageRuntime``; gathers and sums that take longer than the backward are waited for."""
        at, key = self.clock.now(), (action.module, action.stage)
        work = self._works[key]
        seconds = self._times.backward_s(work, self._microbatch_work(action, microbatch))
        less = self._times.first_backward_s(work, seconds) if key not in self._summed else 0.0
        self._summed.add(key)
        seconds += self._times.ends_s(work)[1] if is_last else 0.0
        gathers, reduces = self._times.gathers and self._gathers_each, is_last or self._reduces_each
        exposed = self._times.gather_s(work, seconds, of_backward=True) if gathers else 0.0
        if reduces and self._degrees.dp > 1:
            exposed += self._times.reduce_s(work, seconds, is_last=is_last)
        end = self._run("backward", action, microbatch, at, seconds - less, exposed, meets=gathers)
        if is_last:
            self.clock.skip_to(self._meetings.meet(Meeting.REPLICAS, self._rank, self._replica_ranks, end))
        elif reduces:
            self.clock.skip_to(self._meetings.meet(Meeting.SHARDS, self._rank, self._shard_ranks, end))

    def start_transfers(self, launches: Sequence[tuple[Action, PackedBatch]]) -> None:
        """See ``StageRuntime``; transfers between two ranks follow each other."""
        if self._times.launch_s:
            self.clock.compute(len(launches) * self._times.launch_s, self.clock.now())
        for action, batch in launches:
            assert action.peer is not None
            if action.kind is not ActionKind.ISEND:
                self._expected[action] = self._num_expected[action.peer]
                self._num_expected[action.peer] += 1
                continue
            starts = max(self.clock.now(), self._link_free.get(action.peer, 0.0))
            arrives = starts + self.clock.scaled(self._transfer_s(action, batch))
            self._link_free[action.peer] = arrives
            self._meetings.send(self._rank, action.peer, arrives)

    def wait_transfer(self, action: Action) -> None:
        """See ``StageRuntime``."""
        if action.kind is ActionKind.WAIT_IRECV:
            assert action.peer is not None
            here = self.clock.now()
            number = self._expected.pop(action.launch)
            self.clock.wait_until(max(here, self._meetings.receive(self._rank, action.peer, number)))

    def _run(
        self, name: str, action: Action, batch: PackedBatch, at: float, seconds: float, exposed: float, *, meets: bool
    ) -> float:
        """Compute from the moment ``at`` on, then wait for what the computation did not hide; returns the end."""
        if meets:
            at = self._meetings.meet(Meeting.SHARDS, self._rank, self._shard_ranks, at)
            self.clock.skip_to(at)
        end = self.clock.compute(seconds, at)
        if exposed:
            end += self.clock.scaled(exposed)
            self.clock.wait_until(end)
        self.spans.add(name, at, end, **span_args(name, action, batch, self._tp_rank))
        return end

    def _microbatch_work(self, action: Action, batch: PackedBatch) -> MicrobatchWork:
        patches = self._patches(action, batch) if self._tower is not None else ()
        return MicrobatchWork(batch.sequence_lengths, len(batch.feature_index), batch.num_target_tokens, patches)

    def _patches(self, action: Action, batch: PackedBatch) -> tuple[int, ...]:
        assert self._tower is not None
        if batch.images is None:
            return ()
        patches = list(map(self._tower.num_patches, batch.images.sizes))
        if action.sub_microbatch is None:
            return tuple(patches)
        part = image_parts(patches, self._num_parts[action.microbatch])[action.sub_microbatch]
        return tuple(patches[part.start : part.stop])

    def _transfer_s(self, action: Action, batch: PackedBatch) -> float:
        """Seconds of a transfer: of what the stage before its boundary hands on, or of its gradient."""
        place = self._places[action.module, action.stage]
        producer = place if action.payload is Payload.ACTIVATION else place - 1
        work = self._microbatch_work(action, batch)
        if self._flow[producer].module is StageModule.ENCODER:
            return self._times.rows_s(self._encoder, work)
        return self._times.transfer_s(work)
