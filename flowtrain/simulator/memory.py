"""What backbone ranks hold during each operation of a step, from the lifetimes of tensors (PipeWeaver 4.1).

A rank runs its list in order, so the list alone decides what it holds during each operation; times say when that is.
Weights and optimizer state are always there, a stage's gathered parameters until its last backward. A microbatch's
activations live from the start of its forward to the end of its backward, the buffer of a transfer from its launch to
its use, the sum of a stage's gradients from the stage's first backward to its last, which reduces it to a shard for the
update. What one operation alone needs is there while it runs: the loss, recomputed activations, gradients on their way.
At a backward's end these are gone; the embedding's gradient and then the reduction are there. The bytes are those of
``costs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate

import numpy as np

from flowtrain.costs.flops import IntArray
from flowtrain.costs.microbatches import MicrobatchColumns
from flowtrain.costs.model_spec import ModelSpec, VisionSpec
from flowtrain.costs.training_setup import MicrobatchSize, TrainingSetup
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.program import Op, Program
from flowtrain.simulator.stage_memory import PassBytes, RankModel, StageModel, rank_models, stage_models
from flowtrain.simulator.step import StepSimulator, cut


class Kind(IntEnum):
    """What bytes are for."""

    WEIGHTS = 0
    """Master weights, weights of a frozen encoder, and parameters that are unsharded."""
    OPTIMIZER_STATE = 1
    GRADIENTS = 2
    """Sums of earlier microbatches, and shards that wait for the update."""
    ACTIVATIONS = 3
    """Kept from a forward to its backward."""
    TRANSFERS = 4
    """Buffers of transfers between ranks."""
    WORKING = 5
    """What one operation needs while it runs."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldMemory:
    """Bytes on each rank of a program, by ``Kind``."""

    program: Program
    resting: IntArray
    """Between steps, ``[K, R]``."""
    during: IntArray
    """At the fuller moment of each operation, ``[K, N]``."""
    after: IntArray
    """After each operation, ``[K, N]``."""

    @property
    def peak_nbytes(self) -> IntArray:
        """The most on each rank, ``[R]``."""
        return np.asarray(np.maximum.reduceat(self.during.sum(axis=0), self.program.first[:-1]))

    def at_peak(self, rank: int) -> dict[str, int]:
        """Return the bytes of a rank at its fullest moment, by kind; their sum is its peak."""
        mine = self.during[:, self.program.first[rank] : self.program.first[rank + 1]]
        fullest = mine[:, int(mine.sum(axis=0).argmax())]
        return {kind.name.lower(): int(fullest[kind]) for kind in Kind}

    def levels(self, timeline: Timeline, rank: int) -> Iterator[tuple[float, int]]:
        """Yield when a rank's memory changes, and the bytes from then on; the update frees what the step took."""
        resting, most, after = int(self.resting[:, rank].sum()), self.during.sum(axis=0), self.after.sum(axis=0)
        level = -1
        for op in range(self.program.first[rank], self.program.first[rank + 1]):
            for when, nbytes in ((timeline.starts[op], most[op]), (timeline.ends[op], after[op])):
                if nbytes != level:
                    level = int(nbytes)
                    yield float(when), level
        yield timeline.makespan_s, resting


def rank_peaks(every: Sequence[HeldMemory]) -> tuple[dict[str, int], ...]:
    """Return what each pipeline rank holds at its fullest moment in any replica and any of these steps, by kind."""
    found: list[dict[str, int]] = []
    for rank in range(every[0].program.num_ranks // every[0].program.num_replicas):
        fullest: dict[str, int] = {}
        for held in every:
            pp = held.program.num_ranks // held.program.num_replicas
            replica = int(held.peak_nbytes[rank::pp].argmax())
            fullest = max(fullest, held.at_peak(replica * pp + rank), key=lambda each: sum(each.values()))
        found.append(fullest)
    return tuple(found)


def held_memory(simulator: StepSimulator, program: Program, works: MicrobatchColumns) -> HeldMemory:
    """Return what ranks hold during a step. works: microbatches of all replicas, as for ``StepSimulator.durations``."""
    return _Step.of(simulator, program, works).held()


@dataclass(frozen=True, slots=True, eq=False)
class _Bytes:
    """Columns of ``PassBytes`` for each computation, ``[C]``."""

    kept: IntArray
    forward: IntArray
    backward: IntArray
    output: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step's operations with what decides their memory."""

    simulator: StepSimulator
    program: Program
    works: MicrobatchColumns
    setup: TrainingSetup
    stages: tuple[StageModel, ...]

    @classmethod
    def of(cls, simulator: StepSimulator, program: Program, works: MicrobatchColumns) -> _Step:
        times = simulator.times
        setup = replace(
            times.times.setup,
            dp=times.degrees.dp,
            tp=times.degrees.tp,
            shard_size=times.shard_size,
            accumulates=len(works) > program.num_replicas,
        )
        model = times.times.model
        vision = model.encoders[simulator.encoder] if simulator.encoder else None
        return cls(simulator, program, works, setup, stage_models(model, simulator.partition, setup, vision))

    @property
    def model(self) -> ModelSpec:
        return self.simulator.times.times.model

    def held(self) -> HeldMemory:
        program, kinds, count = self.program, len(Kind), len(self.program.op)
        # Changes when an operation starts and when it ends; what only it needs at these two moments.
        starts, ends = np.zeros((kinds, count), dtype=np.int64), np.zeros((kinds, count), dtype=np.int64)
        working = np.zeros((2, count), dtype=np.int64)
        each = self._bytes()
        ranks = rank_models(self.model, self.simulator.partition, self.stages, self.setup)
        self._add_computations(each, ranks, starts, ends, working)
        self._add_transfers(each, starts, ends)
        self._add_handed_on(each, starts, ends)
        resting, gathered = self._always(ranks)
        first, num_ops = program.first[:-1], np.diff(program.first)
        changes = np.concatenate([np.zeros((kinds, 1), dtype=np.int64), np.cumsum(starts + ends, axis=1)], axis=1)
        base = resting - changes[:, first]
        base[Kind.WEIGHTS] += gathered
        after = changes[:, 1:] + np.repeat(base, num_ops, axis=1)
        moments = np.stack([after - ends, after])
        moments[:, Kind.WORKING] += working
        fuller = moments.sum(axis=1).argmax(axis=0)
        during = np.where(fuller == 0, moments[0], moments[1])
        return HeldMemory(program, resting, during, after)

    def _always(self, ranks: Sequence[RankModel]) -> tuple[IntArray, IntArray]:
        """What ranks hold between steps, ``[K, R]``, and the gathered parameters, ``[R]``."""
        resting = np.zeros((len(Kind), len(ranks)), dtype=np.int64)
        resting[Kind.WEIGHTS] = [each.parameters for each in ranks]
        resting[Kind.OPTIMIZER_STATE] = [each.optimizer_state for each in ranks]
        gathered = np.array([each.gathered for each in ranks], dtype=np.int64)
        return np.tile(resting, self.program.num_replicas), np.tile(gathered, self.program.num_replicas)

    def _bytes(self) -> _Bytes:
        """Bytes of each computation; stages that are alike and microbatches of one size are asked once."""
        columns, sizes = self.program.computations, self._sizes()
        found = np.zeros((4, len(columns)), dtype=np.int64)
        alike: dict[StageModel, list[int]] = {}
        for place, stage in enumerate(self.stages):
            alike.setdefault(stage, []).append(place)
        for stage, places in alike.items():
            mine = np.flatnonzero(np.isin(columns.place, places))
            different, which = np.unique(stage.asked(sizes[mine]), axis=0, return_inverse=True)
            each = [stage.pass_bytes(self.model, MicrobatchSize(*size)) for size in different.tolist()]
            rows = np.array([_row(one) for one in each], dtype=np.int64).reshape(-1, 4)
            found[:, mine] = rows[which.reshape(-1)].T
        return _Bytes(*found)

    def _sizes(self) -> IntArray:
        """Tokens, tokens with loss, feature rows and tokens inside the encoder of each computation, ``[C, 4]``."""
        columns, works = self.program.computations, self.works
        at = self._microbatch(columns.rank, columns.microbatch)
        sizes = np.zeros((len(columns), 4), dtype=np.int64)
        for column, values in enumerate((works.num_tokens, works.target_tokens, works.vision_tokens)):
            sizes[:, column] = values[at]
        encoder = [place for place, stage in enumerate(self.stages) if stage.vision is not None]
        if encoder:
            mine = np.flatnonzero(np.isin(columns.place, encoder))
            vision = self.stages[encoder[0]].vision
            assert vision is not None
            sizes[mine, 2:] = _image_sizes(vision, works, at[mine], columns.part[mine])
        return sizes

    def _microbatch(self, rank: IntArray, microbatch: IntArray) -> IntArray:
        """Numbers of microbatches over all replicas."""
        each = len(self.works) // self.program.num_replicas
        return rank // self.simulator.partition.pp_size * each + microbatch

    def _add_computations(
        self, each: _Bytes, ranks: Sequence[RankModel], starts: IntArray, ends: IntArray, working: IntArray
    ) -> None:
        columns, stages = self.program.computations, [stage.of_step(self.model) for stage in self.stages]
        op, is_backward = columns.op, columns.is_backward
        has_backward = np.array([stage.has_backward for stage in self.simulator.partition.stages])[columns.place]
        kept = np.where(has_backward, each.kept, 0)
        np.add.at(starts[Kind.ACTIVATIONS], op, np.where(is_backward, 0, kept))
        np.add.at(ends[Kind.ACTIVATIONS], op, np.where(is_backward, -kept, 0))
        working[0, op] = np.where(is_backward, each.backward, each.forward)
        summed, shard, reduced, remaining, tables = (
            np.array([getattr(stage, name) for stage in stages], dtype=np.int64)[columns.place]
            for name in ("accumulated", "gradients", "reduced", "remaining", "tables")
        )
        first_tables = np.array([stage.first_tables(self.model) for stage in self.stages], dtype=np.int64)
        gathered = self._gathered(ranks, [stage.gathered for stage in stages])[columns.place]
        is_last, is_first = columns.is_last, self.program.first_backwards
        sums = np.where(is_first, summed, 0) - np.where(is_last, summed, 0)
        np.add.at(ends[Kind.GRADIENTS], op, sums + np.where(is_last, shard, 0))
        np.add.at(ends[Kind.WEIGHTS], op, np.where(is_last, -gathered, 0))
        # In addition to what is there afterwards: the last backward leaves neither gathered parameters nor sums.
        at_last = np.maximum(reduced, gathered + tables + summed - shard)
        reduces_each = self.setup.gradient_reduction == "microbatch"
        tables = np.where(is_first, first_tables[columns.place], tables)
        before = np.maximum(tables, reduced + remaining - gathered if reduces_each else 0)
        working[1, op] = np.where(is_last, at_last, np.where(is_backward, before, 0))

    def _gathered(self, ranks: Sequence[RankModel], alone: Sequence[int]) -> IntArray:
        """Gathered parameters of each stage, ``[S]``, as shares of its rank's. alone: of ranks with that stage only.

        Together stages have less than alone: a tied table is there once.
        """
        mine = [stage.rank for stage in self.simulator.partition.stages]
        found = np.zeros(len(mine), dtype=np.int64)
        for number, rank in enumerate(ranks):
            places = [place for place, at in enumerate(mine) if at == number]
            ends = list(accumulate(alone[place] for place in places))
            found[places] = np.diff([end * rank.gathered // max(1, ends[-1]) for end in ends], prepend=0)
        return found

    def _add_transfers(self, each: _Bytes, starts: IntArray, ends: IntArray) -> None:
        """Buffers that are received into, until a computation takes them over, and results until they are sent.

        A backbone's or a trained encoder's output is among the kept activations, as the root of its backward.
        """
        program, moved = self.program, self.program.transfers
        if not len(moved):
            return
        producer = np.where(moved.is_gradient, moved.place - 1, moved.place)
        # The stage before the boundary decides the size; its computation is on the end that holds that stage.
        holder = np.where(moved.is_gradient, moved.destination, moved.source)
        nbytes = each.output[program.find(holder, producer, moved.microbatch, moved.part, moved.is_gradient)]
        used_by = np.where(moved.is_gradient, moved.place - 1, moved.place + 1)
        user = program.find(moved.destination, used_by, moved.microbatch, moved.part, moved.is_gradient)
        np.add.at(starts[Kind.TRANSFERS], program.computations.op[user], -nbytes)
        self._add_launches(starts, Op.IRECV, nbytes)
        frozen = np.array([not stage.has_backward for stage in self.simulator.partition.stages])
        owned = np.where(moved.is_gradient | frozen[moved.place], nbytes, 0)
        self._add_launches(starts, Op.ISEND, owned)
        self._add_launches(ends, Op.WAIT_ISEND, -owned)

    def _add_launches(self, changes: IntArray, kind: Op, nbytes: IntArray) -> None:
        at = np.flatnonzero(self.program.op == kind)
        changes[Kind.TRANSFERS, at] += nbytes[self.program.index[at]]

    def _add_handed_on(self, each: _Bytes, starts: IntArray, ends: IntArray) -> None:
        """What a frozen stage hands to the next stage on its rank."""
        program, stages = self.program, self.simulator.partition.stages
        columns = program.computations
        places = [
            at for at, stage in enumerate(stages[:-1]) if not stage.has_backward and stages[at + 1].rank == stage.rank
        ]
        mine = np.flatnonzero(np.isin(columns.place, places))
        if not len(mine):
            return
        of_next = columns.place[mine] + 1
        user = program.find(columns.rank[mine], of_next, columns.microbatch[mine], columns.part[mine])
        np.add.at(ends[Kind.ACTIVATIONS], columns.op[mine], each.output[mine])
        np.add.at(starts[Kind.ACTIVATIONS], columns.op[user], -each.output[mine])


def _row(each: PassBytes) -> tuple[int, int, int, int]:
    return each.kept, each.forward, each.backward, each.output


def _image_sizes(vision: VisionSpec, works: MicrobatchColumns, at: IntArray, part: IntArray) -> IntArray:
    """Feature rows and tokens inside the encoder of the images of microbatches ``at``, or of a part; ``[N, 2]``."""
    own = cut(works, at, part)
    patches = own.of_images(own.patches.astype(np.float64)).astype(np.int64)
    return np.stack([patches // vision.patches_per_row, patches + vision.num_prefix_tokens * own.num_images], axis=1)
