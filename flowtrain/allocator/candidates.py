"""Parallel configurations that a module can have, and the numbers left out, by reason (FlowTrain 3.3).

A configuration is a number of devices with degrees for them. A module may take any number of devices up to
``FINE_GRAINED_DEVICES``, and only whole nodes above that.
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

FINE_GRAINED_DEVICES = 64

BoolArray = NDArray[np.bool_]
PeakMemory = Callable[[Degrees], int]
"""Predicted peak bytes on a module's fullest device; it must not grow with dp."""


class PruneReason(enum.StrEnum):
    """Why configurations are left out, in the order of the checks."""

    NODE_GRAIN = "more than 64 devices that are not whole nodes"
    CROSSES_NODES = "tensor parallel group does not divide a node"
    HEADS = "tensor parallel degree does not divide heads or widths"
    WHOLE = "no plan to split its layers by tensor parallelism"
    LAYERS = "more pipeline stages than layers"
    CHUNKS = "no pipeline, which several chunks a rank need"
    FACTORS = "degrees do not factorise the module's devices"
    BATCH = "data parallel degree does not divide the global batch"
    SHARDS = "hybrid shards do not divide the replicas evenly"
    MEMORY = "does not fit the device memory"


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

    def __len__(self) -> int:
        return len(self.dp)

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

    columns: CandidateColumns
    """The feasible ones."""
    pruned: dict[PruneReason, int] = field(default_factory=dict)
    """Number of those left out, by reason."""
    least_peak_nbytes: int | None = None
    """The smallest predicted peak if no configuration fits the memory; None if one fits."""


def device_counts(device_type: DeviceType) -> IntArray:
    """Return the numbers of devices that a module may take, ascending; int64 ``[N]``."""
    fine = np.arange(1, min(device_type.count, FINE_GRAINED_DEVICES) + 1)
    nodes = np.arange(1, device_type.num_whole_nodes + 1) * device_type.devices_per_node
    return np.concatenate([fine, nodes[nodes > FINE_GRAINED_DEVICES]]).astype(np.int64)


def enumerate_backbone(
    device_type: DeviceType,
    spec: TransformerSpec,
    *,
    global_batch_size: int,
    peak_nbytes: PeakMemory,
    memory_nbytes: int,
    chunks_per_rank: int = 1,
    splits_tensors: bool = True,
    module: str = "backbone",
    peak_of_step: PeakMemory | None = None,
    splits_evenly: Callable[[IntArray, IntArray], BoolArray] | None = None,
) -> Enumeration:
    """Return all (dp, tp, pp) of the backbone.

    memory_nbytes: memory of a device that it may use.
    splits_tensors: whether its layers can be split by tensor parallelism.
    peak_of_step: the peak if gradients are reduced once a step, which is chosen where it fits; ``peak_nbytes`` is then
        that with a reduction each microbatch. None: there is no choice, and no ``reduces_each``.
    splits_evenly: for replicas ``[C]`` of so many devices ``[C]``, whether they form equal groups; None: all do.
    """
    counts = device_counts(device_type)
    pruned: Counter[PruneReason] = Counter()
    most = min(device_type.count, spec.num_layers // chunks_per_rank)
    pps = range(1 if chunks_per_rank == 1 else 2, most + 1)

    def is_even(tp: int) -> bool:
        return not degree_faults(Degrees(tp=tp), spec)

    tps = _tensor_degrees(device_type, spec.num_heads, is_even, splits_tensors, len(pps), counts, pruned)
    pruned[PruneReason.LAYERS] += (device_type.count - most) * len(tps) * len(counts)
    pruned[PruneReason.CHUNKS] += (most - len(pps)) * len(tps) * len(counts)
    shapes = np.array([(tp, pp) for tp in tps for pp in pps], dtype=np.int64).reshape(-1, 2)
    replica = shapes[:, 0] * shapes[:, 1]
    factorises = counts[:, None] % replica[None, :] == 0
    pruned[PruneReason.FACTORS] += int(factorises.size - factorises.sum())
    which_count, which_shape = np.nonzero(factorises)
    dp = counts[which_count] // replica[which_shape]
    divides = global_batch_size % dp == 0
    pruned[PruneReason.BATCH] += int(len(dp) - divides.sum())
    dp, which_shape = dp[divides], which_shape[divides]
    if splits_evenly is not None:
        in_groups = splits_evenly(dp, replica[which_shape])
        pruned[PruneReason.SHARDS] += int(len(dp) - in_groups.sum())
        dp, which_shape = dp[in_groups], which_shape[in_groups]
    # Some widths may be split unevenly by a single replica, but not by several.
    is_even_sharded = np.array([not degree_faults(Degrees(2, tp=tp), spec) for tp in shapes[:, 0].tolist()], dtype=bool)
    shards = (dp == 1) | is_even_sharded[which_shape]
    pruned[PruneReason.HEADS] += int(len(dp) - shards.sum())
    dp, which_shape = dp[shards], which_shape[shards]
    each = np.ones(len(dp), dtype=bool)
    if peak_of_step is not None:
        least_of_step, _ = _least_data_degrees(shapes, which_shape, dp, peak_of_step, memory_nbytes)
        each = dp < least_of_step[which_shape]
    least_dp, least_peak = _least_data_degrees(shapes, which_shape[each], dp[each], peak_nbytes, memory_nbytes)
    fits = ~each | (dp >= least_dp[which_shape])
    pruned[PruneReason.MEMORY] += int(len(dp) - fits.sum())
    dp, which_shape = dp[fits], which_shape[fits]
    pp, tp = shapes[which_shape, 1], shapes[which_shape, 0]
    reduces_each = each[fits] if peak_of_step is not None else None
    columns = CandidateColumns(module, device_type.name, dp, pp, tp, reduces_each)
    return Enumeration(columns, _counted(pruned), None if len(columns) else least_peak)


def enumerate_encoder(
    device_type: DeviceType,
    spec: VisionSpec,
    *,
    module: str,
    peak_nbytes: PeakMemory,
    memory_nbytes: int,
    splits_tensors: bool = True,
) -> Enumeration:
    """Return all (dp, tp) of an encoder; dp need not divide the batch, because encoders lease the next batch each.

    splits_tensors: as in ``enumerate_backbone``.
    """
    counts = device_counts(device_type)
    pruned: Counter[PruneReason] = Counter()

    def is_even(tp: int) -> bool:
        return not encoder_degree_faults(module, tp, spec) and spec.intermediate_size % tp == 0

    tps = _tensor_degrees(device_type, spec.num_heads, is_even, splits_tensors, 1, counts, pruned)
    factorises = counts[:, None] % np.array(tps, dtype=np.int64)[None, :] == 0
    pruned[PruneReason.FACTORS] += int(factorises.size - factorises.sum())
    # An encoder is frozen and its replicas shard nothing, so its memory does not depend on dp.
    peaks = np.array([peak_nbytes(Degrees(tp=tp)) for tp in tps], dtype=np.int64)
    too_large = peaks > memory_nbytes
    pruned[PruneReason.MEMORY] += int(factorises[:, too_large].sum())
    factorises &= ~too_large
    which_count, which_tp = np.nonzero(factorises)
    tp = np.array(tps, dtype=np.int64)[which_tp]
    columns = CandidateColumns(module, device_type.name, counts[which_count] // tp, np.ones_like(tp), tp)
    return Enumeration(columns, _counted(pruned), None if len(columns) else int(peaks.min()))


def _tensor_degrees(
    device_type: DeviceType,
    num_heads: int,
    is_even: Callable[[int], bool],
    splits_tensors: bool,
    num_pipeline_degrees: int,
    counts: IntArray,
    pruned: Counter[PruneReason],
) -> list[int]:
    """Tensor parallel degrees that stay inside a node and divide the module; counts the others in ``pruned``."""
    tps = range(1, min(num_heads, device_type.count) + 1)
    inside = [tp for tp in tps if device_type.devices_per_node % tp == 0]
    even = [tp for tp in inside if is_even(tp)]
    split = even if splits_tensors else even[:1]
    pruned[PruneReason.NODE_GRAIN] += (device_type.count - len(counts)) * len(split) * num_pipeline_degrees
    pruned[PruneReason.CROSSES_NODES] += (len(tps) - len(inside)) * num_pipeline_degrees * len(counts)
    pruned[PruneReason.HEADS] += (len(inside) - len(even)) * num_pipeline_degrees * len(counts)
    pruned[PruneReason.WHOLE] += (len(even) - len(split)) * num_pipeline_degrees * len(counts)
    return split


def _least_data_degrees(
    shapes: IntArray, which_shape: IntArray, dp: IntArray, peak_nbytes: PeakMemory, memory_nbytes: int
) -> tuple[IntArray, int | None]:
    """The smallest dp of each (tp, pp) that fits, and the smallest peak of those that do not fit.

    By bisection, because peaks fall with dp and predicting one is slow.
    """
    least = np.full(len(shapes), np.iinfo(np.int64).max)
    least_peak: int | None = None
    order = np.lexsort((dp, which_shape))
    starts = np.flatnonzero(np.diff(which_shape[order], prepend=-1))
    for start, stop in zip(starts, np.append(starts, len(order))[1:], strict=True):
        shape = which_shape[order[start]]
        tp, pp = shapes[shape].tolist()
        choices: Sequence[int] = dp[order[start:stop]].tolist()
        low, high = 0, len(choices)
        while low < high:
            middle = (low + high) // 2
            peak = peak_nbytes(Degrees(choices[middle], pp, tp))
            if peak <= memory_nbytes:
                high = middle
            else:
                low = middle + 1
                least_peak = peak if least_peak is None else min(least_peak, peak)
        if low < len(choices):
            least[shape] = choices[low]
    return least, least_peak


def _counted(pruned: Counter[PruneReason]) -> dict[PruneReason, int]:
    return {reason: pruned[reason] for reason in PruneReason if pruned[reason]}
