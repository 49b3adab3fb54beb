"""Times of one training step of the backbone: its replicas' action lists with what each action takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from flowtrain.costs.action_times import ActionTimes, StageWork
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.microbatches import MicrobatchColumns
from flowtrain.costs.profiled_times import CPU
from flowtrain.costs.training_setup import FLOAT32_NBYTES
from flowtrain.pipeline.actions import Schedule, StageModule
from flowtrain.pipeline.dataflow import WHOLE
from flowtrain.pipeline.image_parts import image_parts
from flowtrain.pipeline.partition import Partition, Stage
from flowtrain.pipeline.schedules.build import ScheduleName
from flowtrain.simulator.folding import Fold
from flowtrain.simulator.lists import program_of
from flowtrain.simulator.named import named_program
from flowtrain.simulator.program import BoolArray, Computations, Meets, Op, Program, Transfers, side_by_side


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Forwards and backwards of one stage, as ``Computations`` has them, ``[C]``."""

    is_backward: BoolArray
    is_last: BoolArray
    is_first: BoolArray


@dataclass(frozen=True)
class StepSimulator:
    """Times steps of one backbone, whose data parallel ranks are symmetric in tensor parallelism.

    times: of its actions; they know degrees and sharding.
    encoder: its name in ``mode: monolithic``, where the partition has its stages; otherwise unused.
    buffered: as in ``Timeline``.
    recomputed: layers that each stage recomputes; None, of all or of one: as the setup of its times tells.
    """

    partition: Partition
    times: ActionTimes
    encoder: str = ""
    buffered: bool = True
    recomputed: Mapping[tuple[StageModule, int], int | None] | None = None

    def named(self, schedule: ScheduleName, num_microbatches: int, num_replicas: int) -> Program:
        """Return the operations of replicas that all train by a named schedule."""
        meets = self._meets if num_replicas > 1 else None
        program = named_program(schedule, self.partition, num_microbatches, meets)
        return program if num_replicas == 1 else side_by_side([program] * num_replicas, self._set_sizes(num_replicas))

    def folded(
        self, schedule: ScheduleName, works: MicrobatchColumns, num_replicas: int
    ) -> tuple[Program, MicrobatchColumns]:
        """Return what replicas run that all train by a named schedule, and their microbatches; equal ones once.

        works: microbatches of all replicas, one replica after another.
        """
        count = len(works) // num_replicas
        fold = Fold.of(works, self._set_sizes(num_replicas))
        if len(fold.kept) == num_replicas:
            return self.named(schedule, count, num_replicas), works
        kept = fold.works(works)
        if len(fold.kept) == 1:
            return replace(self.named(schedule, count, 1), stands_for=fold.stands_for), kept
        program = named_program(schedule, self.partition, count, self._meets)
        return side_by_side([program] * len(fold.kept), fold.set_sizes, fold.stands_for), kept

    def program(self, replicas: Sequence[Schedule]) -> Program:
        """Return the operations of all replicas, by their action lists; equal lists are read once."""
        meets = self._meets if len(replicas) > 1 else None
        different = {id(lists): lists for lists in replicas}
        read = {key: program_of(lists, self.partition, meets) for key, lists in different.items()}
        programs = [read[id(lists)] for lists in replicas]
        return programs[0] if len(programs) == 1 else side_by_side(programs, self._set_sizes(len(programs)))

    def _set_sizes(self, num_replicas: int) -> list[int]:
        """Replicas of each set of shards; one set of all, where only some of the run's replicas are timed."""
        size = self.times.shard_size if num_replicas % self.times.shard_size == 0 else num_replicas
        return [size] * (num_replicas // size)

    def optimizer_s(self) -> float:
        """Return seconds of the update after a step, on the rank with the most to update."""
        ranks = range(self.partition.pp_size)
        return max(
            self.times.optimizer_s([self._work(each) for each in self.partition.of_rank(rank)]) for rank in ranks
        )

    def computing_s(self, program: Program, works: MicrobatchColumns) -> float:
        """Return the seconds of a step in which a mean device can do nothing else, the update included.

        An accelerator may compute while collectives run; a CPU's cores run them.
        """
        seconds, _ = self.durations(program, works, with_collectives=self.times.times.device.name == CPU)
        each = np.bincount(program.computations.rank, seconds, program.num_ranks)
        return program.mean(each.astype(np.float64)) + self.optimizer_s()

    def durations(
        self, program: Program, works: MicrobatchColumns, *, with_collectives: bool = True
    ) -> tuple[FloatArray, FloatArray]:
        """Return seconds of each computation, with what it does not hide of collectives, and of each transfer.

        works: microbatches of all replicas, by their number in the lists, one replica after another.
        """
        columns, pp = program.computations, self.partition.pp_size
        each = len(works) // program.num_replicas
        at = columns.rank // pp * each + columns.microbatch
        seconds = np.zeros(len(columns))
        for places in self._alike():
            mine = np.isin(columns.place, places)
            stage, own = self.partition.stages[places[0]], _only(columns, mine)
            seconds[mine] = self._computing_s(self._work(stage), own, works, at[mine])
            begins = np.flatnonzero(mine & program.first_backwards)
            less = self.times.first_backward_s(self._work(stage), seconds[begins])
            if with_collectives:
                seconds[mine] += self.exposed_s(stage, own, seconds[mine])
            seconds[begins] -= less
        if host_s := self.times.microbatch_s:  # where a rank fetches a microbatch, not at each of its stages
            _, firsts = np.unique(columns.rank * (each + 1) + columns.microbatch, return_index=True)
            seconds[firsts] += host_s
        seconds += self.launches_s(program)
        transfers = program.transfers
        sent = transfers.source // pp * each + transfers.microbatch
        return seconds, self._transfers_s(transfers, works, sent)

    def launches_s(self, program: Program) -> FloatArray:
        """Return what ranks take to start their transfers and to wait for them, with the next computation, ``[C]``.

        What comes after a rank's last computation counts with that. A rank that runs takes this time before the
        transfer begins, so there a pipeline fills and drains later by as much; its steady state is the same.
        """
        ends = np.flatnonzero((program.op == Op.ISEND) | (program.op == Op.IRECV))
        if not self.times.launch_s or not len(ends):
            return np.zeros(len(program.computations))
        columns, rank = program.computations, np.searchsorted(program.first, ends, side="right") - 1
        at = np.minimum(np.searchsorted(columns.op, ends), len(columns) - 1)
        at -= columns.rank[at] != rank
        count = np.bincount(at, minlength=len(columns))
        return self.times.launch_s * count.astype(np.float64)

    def _alike(self) -> list[list[int]]:
        """Places of stages that take the same time for the same microbatch, in groups."""
        groups: dict[StageWork, list[int]] = {}
        for place, stage in enumerate(self.partition.stages):
            groups.setdefault(self._work(stage), []).append(place)
        return list(groups.values())

    def _computing_s(
        self, work: StageWork, columns: Computations, works: MicrobatchColumns, at: IntArray
    ) -> FloatArray:
        """Seconds of the computations of stages that are alike; at: the number of each one's microbatch."""
        if work.encoder is not None and (columns.part != WHOLE).any():
            works, at = cut(works, at, columns.part), np.arange(len(at))
        forward, backward = self.times.passes_s(work, works)
        return np.where(columns.is_backward, backward[at], forward[at])

    def exposed_s(self, stage: Stage, columns: Computations | Passes, computing: FloatArray) -> FloatArray:
        """Return seconds of collectives that a stage's computations do not hide, ``[C]``; computing: of each.

        One replica alone has copies of its parameters and gradients instead.
        """
        times, meets, work = self.times, self._meets, self._work(stage)
        if times.degrees.dp == 1:
            of_forward, of_backward = times.ends_s(work)
            return columns.is_first * of_forward + (columns.is_backward & columns.is_last) * of_backward
        exposed = np.zeros_like(computing)
        reduced = columns.is_backward & (columns.is_last | meets.reduces_each)
        if (measured := self._measured_s(stage)) is not None:
            gathering, reducing = measured
            if meets.gathers == "once":  # what was measured of a step is the gather and the reduction, in float32
                nbytes = times.times.setup.dtype_nbytes
                gathered = nbytes / (nbytes + FLOAT32_NBYTES) * reducing
                return columns.is_first * gathered + reduced * (reducing - gathered)
            gathering /= 2 if stage.has_backward else 1  # the forward gathers, and the backward again
            exposed += gathering + reduced * reducing
            return exposed
        if meets.gathers != "never":
            forward = times.gather_s(work, computing)
            backward = times.gather_s(work, computing, of_backward=True)
            each = meets.gathers == "each"
            exposed += np.where(columns.is_backward, backward if each else 0.0, forward * (each | columns.is_first))
        last, other = (times.reduce_s(work, computing, is_last=is_last) for is_last in (True, False))
        return exposed + reduced * np.where(columns.is_last, last, other)

    def _measured_s(self, stage: Stage) -> tuple[float, float] | None:
        """A stage's share of its rank's gathers of a microbatch and of a reduction, where a profile has them."""
        times = self.times
        own = times.sharded_parameters(self._work(stage)).total
        whole = sum(times.sharded_parameters(self._work(each)).total for each in self.partition.of_rank(stage.rank))
        asked = times.times.setup.sharding, np.array([whole]), np.array([times.shard_size])
        measured = times.times.of_any_data.replicas_s(*asked)
        if measured is None:
            return None
        share = own / whole if whole else 0.0
        gathering, reducing = (share * float(each[0]) for each in measured)
        return gathering, reducing

    def _transfers_s(self, transfers: Transfers, works: MicrobatchColumns, at: IntArray) -> FloatArray:
        """Seconds of transfers: hidden states or their gradients, or rows of an encoder."""
        producer = np.where(transfers.is_gradient, transfers.place - 1, transfers.place)  # of what it is the gradient
        of_encoder = np.array([stage.module is StageModule.ENCODER for stage in self.partition.stages])[producer]
        seconds = self.times.token_transfer_s * works.num_tokens[at]
        if of_encoder.any():
            sent = cut(works, at[of_encoder], transfers.part[of_encoder])
            patches = sent.of_images(sent.patches.astype(np.float64))
            seconds[of_encoder] = self.times.patch_transfer_s(self.encoder) * patches
        return seconds

    @cached_property
    def _meets(self) -> Meets:
        setup = self.times.times.setup
        gathers = "never" if not self.times.gathers else "once" if setup.sharding == "gradients" else "each"
        return Meets(gathers, reduces_each=setup.gradient_reduction == "microbatch")

    def _work(self, stage: Stage) -> StageWork:
        work = stage_work(self.partition, stage, self.encoder)
        if self.recomputed is None:
            return work
        return replace(work, recomputed=self.recomputed[stage.module, stage.index])


def stage_work(partition: Partition, stage: Stage, encoder: str) -> StageWork:
    """Return what a stage's time depends on. encoder: name of the encoder, whose stages the partition may have."""
    return StageWork(
        num_layers=len(stage.layers),
        is_first=stage.index == 0,
        is_last=stage.index == len(partition.of_module(stage.module)) - 1,
        has_backward=stage.has_backward,
        encoder=encoder if stage.module is StageModule.ENCODER else None,
    )


def _only(columns: Computations, mask: BoolArray) -> Computations:
    return Computations(**{each.name: getattr(columns, each.name)[mask] for each in fields(Computations)})


def cut(works: MicrobatchColumns, at: IntArray, part: IntArray) -> MicrobatchColumns:
    """Return the work of microbatches ``at``, each with the images of one part of it alone; both ``[N]``."""
    first = np.concatenate([[0], np.cumsum(works.num_images)])
    num_parts: defaultdict[int, int] = defaultdict(int)
    for number, each in zip(at.tolist(), part.tolist(), strict=True):
        num_parts[number] = max(num_parts[number], each + 1)
    patches: list[list[int]] = []
    for number, each in zip(at.tolist(), part.tolist(), strict=True):
        whole = works.patches[first[number] : first[number + 1]].tolist()
        span = image_parts(whole, num_parts[number])[each] if each != WHOLE else range(len(whole))
        patches.append(whole[span.start : span.stop])
    return MicrobatchColumns(
        works.num_tokens[at],
        works.squares[at],
        works.ragged[at],
        works.vision_tokens[at],
        works.target_tokens[at],
        np.array([each for images in patches for each in images], dtype=np.int64),
        np.array([len(images) for images in patches], dtype=np.int64),
    )
