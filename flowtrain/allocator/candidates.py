"""Parallel configurations that a module can have, and the numbers left out, by reason (FlowTrain 3.3).

A configuration is a number of replicas with their degrees. Replicas are neighbours: a module that starts at a node
keeps tensor parallel groups inside nodes, and its last node may be filled in part. That is harmless for encoders, whose
replicas do not talk to each other, and for replicas of a node or more, of which no node has two of one group. Smaller
ones have fewer network links on the last node; ``parameter_traffic.group_link`` counts that. So any number of replicas
up to ``FINE_GRAINED_REPLICAS`` is a configuration; larger numbers are in steps of a power of two, at most 1 / 64 of
them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flowtrain.allocator.degrees import degree_faults, encoder_degree_faults
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.flops import IntArray
from flowtrain.costs.model_spec import TransformerSpec, VisionSpec
from flowtrain.costs.training_setup import ReductionName
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings

FINE_GRAINED_REPLICAS = 128

BoolArray = NDArray[np.bool_]


class PruneReason(enum.StrEnum):
    """Why configurations are left out, in the order of the checks."""

    CROSSES_NODES = "tensor parallel group does not divide a node"
    HEADS = "tensor parallel degree does not divide heads or widths"
    WHOLE = "no plan to split its layers by tensor parallelism"
    LAYERS = "more pipeline stages than layers"
    CHUNKS = "no pipeline, which several chunks a rank need"
    BATCH = "more replicas than samples of a batch"
    GRAIN = "more than 128 replicas, between steps of at most 1/64"
    SHARDS = "hybrid shards do not divide the replicas evenly"
    MEMORY = "does not fit the device memory"
    SLOWER = "other settings fit and are never slower"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of one module on one type of devices."""

    module: str
    device_type: str
    degrees: Degrees
    rate: float = float("nan")
    """Samples/s that it handles; for an encoder, samples that have images for it. NaN before it is predicted."""
    gradient_reduction: ReductionName = "step"
    """Of the backbone."""
    settings: BackboneSettings | None = None
    """Of the backbone, if a plan chooses them; None: as the request says."""

    @property
    def devices(self) -> int:
        """Number of its devices."""
        return self.degrees.world_size


@dataclass(frozen=True, slots=True, eq=False)
class CandidateColumns:
    """Many configurations of one module on one type of devices; degrees are int64 ``[C]``."""

    module: str
    device_type: str
    dp: IntArray
    pp: IntArray
    tp: IntArray
    reduces_each: BoolArray | None = None
    """Of the backbone: whether gradients are reduced with each microbatch, ``[C]``; None: none does."""
    settings: BackboneSettings | None = None
    """Of the backbone: those of all columns, if a plan chooses them."""

    @classmethod
    def of(cls, candidate: Candidate) -> CandidateColumns:
        """Return a single configuration as columns."""
        degrees = candidate.degrees
        dp, pp, tp = (np.array([degree], dtype=np.int64) for degree in (degrees.dp, degrees.pp, degrees.tp))
        each = np.array([candidate.gradient_reduction == "microbatch"])
        return cls(candidate.module, candidate.device_type, dp, pp, tp, each, candidate.settings)

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, chosen: IntArray | BoolArray) -> CandidateColumns:
        """Return some of them, by index or mask."""
        each = None if self.reduces_each is None else self.reduces_each[chosen]
        dp, pp, tp = self.dp[chosen], self.pp[chosen], self.tp[chosen]
        return CandidateColumns(self.module, self.device_type, dp, pp, tp, each, self.settings)

    @property
    def tps(self) -> list[int]:
        """The different tensor parallel degrees, ascending."""
        found: list[int] = np.flatnonzero(np.bincount(self.tp)).tolist()
        return found

    @property
    def devices(self) -> IntArray:
        """Number of devices of each configuration."""
        return self.dp * self.pp * self.tp

    def candidate(self, index: int, rate: float) -> Candidate:
        """Return one configuration with its rate."""
        degrees = Degrees(int(self.dp[index]), int(self.pp[index]), int(self.tp[index]))
        reduces_each = self.reduces_each is not None and bool(self.reduces_each[index])
        reduction: ReductionName = "microbatch" if reduces_each else "step"
        return Candidate(self.module, self.device_type, degrees, rate, reduction, self.settings)


@dataclass(frozen=True, slots=True)
class Enumeration:
    """Feasible configurations of one module, and the number left out."""

    every: tuple[CandidateColumns, ...]
    """The feasible ones, for each of the settings that a plan may choose; a single entry where it chooses none."""
    pruned: dict[PruneReason, int] = field(default_factory=dict)
    """Number of those left out, by reason, over all settings."""
    least_peak_nbytes: int | None = None
    """The smallest predicted peak if no configuration fits the memory; None if one fits."""

    def __len__(self) -> int:
        return sum(map(len, self.every))

    @property
    def columns(self) -> CandidateColumns:
        """The feasible ones of a request with nothing to choose."""
        (columns,) = self.every
        return columns


def data_degrees(most: int) -> IntArray:
    """Return the numbers of replicas that a module may have, ascending, at most ``most``; int64 ``[N]``."""
    parts, start, step = [np.arange(1, min(most, FINE_GRAINED_REPLICAS) + 1)], FINE_GRAINED_REPLICAS, 2
    while start < most:
        parts.append(np.arange(start + step, min(most, 2 * start) + 1, step))
        start, step = 2 * start, 2 * step
    return np.concatenate(parts).astype(np.int64)


def backbone_columns(
    device_type: DeviceType,
    spec: TransformerSpec,
    *,
    global_batch_size: int,
    chunks_per_rank: int = 1,
    splits_tensors: bool = True,
    module: str = "backbone",
) -> tuple[CandidateColumns, Counter[PruneReason]]:
    """Return all (dp, tp, pp) of the backbone, whatever memory they take, and the number left out.

    splits_tensors: whether its layers can be split by tensor parallelism.
    """
    pruned: Counter[PruneReason] = Counter()
    total = device_type.count
    most = min(total, spec.most_stages // chunks_per_rank)

    def is_even(tp: int) -> bool:
        return not degree_faults(Degrees(tp=tp), spec)

    tps = _tensor_degrees(device_type, spec.num_heads, is_even, splits_tensors, total, pruned)
    shapes = []
    for tp in tps:
        replicas = total // (tp * np.arange(1, total // tp + 1))
        pruned[PruneReason.LAYERS] += int(replicas[most:].sum())
        if chunks_per_rank > 1:
            pruned[PruneReason.CHUNKS] += int(replicas[: min(1, most)].sum())
        # Some widths may be split unevenly by a single replica, but not by several.
        several = not degree_faults(Degrees(2, tp=tp), spec)
        for pp in range(1 if chunks_per_rank == 1 else 2, min(most, len(replicas)) + 1):
            shapes.append((tp, pp, int(replicas[pp - 1]), several))
    columns = []
    for tp, pp, fitting, several in shapes:
        allowed = fitting if several else min(fitting, 1)
        fed = min(allowed, global_batch_size)
        dp = data_degrees(fed)
        pruned[PruneReason.HEADS] += fitting - allowed
        pruned[PruneReason.BATCH] += allowed - fed
        pruned[PruneReason.GRAIN] += fed - len(dp)
        columns.append(np.stack([dp, np.full_like(dp, pp), np.full_like(dp, tp)]))
    dp, pp, tp = np.concatenate(columns, axis=1) if columns else np.zeros((3, 0), dtype=np.int64)
    return CandidateColumns(module, device_type.name, dp, pp, tp), pruned


def enumerate_encoder(
    device_type: DeviceType,
    spec: VisionSpec,
    *,
    module: str,
    peak_nbytes: Callable[[Degrees], int],
    memory_nbytes: int,
    splits_tensors: bool = True,
) -> Enumeration:
    """Return all (dp, tp) of an encoder, whose replicas lease the next batch each when they are free.

    peak_nbytes: predicted peak bytes on the fullest device. splits_tensors: as in ``backbone_columns``.
    """
    pruned: Counter[PruneReason] = Counter()
    total = device_type.count

    def is_even(tp: int) -> bool:
        return not encoder_degree_faults(module, tp, spec) and spec.intermediate_size % tp == 0

    tps = _tensor_degrees(device_type, spec.num_heads, is_even, splits_tensors, 1, pruned)
    # An encoder is frozen and its replicas shard nothing, so its memory does not depend on dp.
    peaks = {tp: peak_nbytes(Degrees(tp=tp)) for tp in tps}
    dps: list[IntArray] = []
    for tp in tps:
        dp = data_degrees(total // tp)
        pruned[PruneReason.GRAIN] += total // tp - len(dp)
        if peaks[tp] > memory_nbytes:
            pruned[PruneReason.MEMORY] += len(dp)
            dp = dp[:0]
        dps.append(dp)
    of_tp = np.repeat(np.array(tps, dtype=np.int64), [len(dp) for dp in dps])
    columns = CandidateColumns(module, device_type.name, np.concatenate(dps), np.ones_like(of_tp), of_tp)
    return Enumeration((columns,), counted(pruned), None if len(columns) else min(peaks.values()))


def counted(pruned: Counter[PruneReason]) -> dict[PruneReason, int]:
    """Return the reasons that left something out, in their order."""
    return {reason: pruned[reason] for reason in PruneReason if pruned[reason]}


def _tensor_degrees(
    device_type: DeviceType,
    num_heads: int,
    is_even: Callable[[int], bool],
    splits_tensors: bool,
    most_stages: int,
    pruned: Counter[PruneReason],
) -> Sequence[int]:
    """Tensor parallel degrees that stay inside a node and divide the module; counts the others in ``pruned``."""
    total = device_type.count

    def number(tp: int) -> int:
        return int((total // (tp * np.arange(1, min(most_stages, total // tp) + 1))).sum())

    tps = range(1, min(num_heads, total) + 1)
    inside = [tp for tp in tps if device_type.devices_per_node % tp == 0]
    even = [tp for tp in inside if is_even(tp)]
    split = even if splits_tensors else even[:1]
    pruned[PruneReason.CROSSES_NODES] += sum(number(tp) for tp in tps if tp not in inside)
    pruned[PruneReason.HEADS] += sum(number(tp) for tp in inside if tp not in even)
    pruned[PruneReason.WHOLE] += sum(number(tp) for tp in even if tp not in split)
    return split
