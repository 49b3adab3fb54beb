"""Times of gathers and reductions of parameters among data parallel ranks, and how much of them computing hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain.allocator.candidates import CandidateColumns
from flowtrain.allocator.shards import num_shards
from flowtrain.costs.cluster import Cluster, DeviceType
from flowtrain.costs.collectives import BACKWARD_SHARE, group_link
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.module_times import ModuleTimes
from flowtrain.costs.profiled_times import CPU
from flowtrain.costs.training_setup import FLOAT32_NBYTES, TrainingSetup


@dataclass(frozen=True, slots=True, eq=False)
class StageParameters:
    """Parameters that each device of the fullest pipeline rank holds before data parallel sharding, each ``[C]``."""

    layers: FloatArray
    outer: FloatArray
    """Embedding, connector and head, which are gathered and reduced as one."""
    unit: FloatArray
    """The largest of ``layers`` that are gathered and reduced as one."""
    trained: FloatArray
    """Those of all that are trained, and so reduced and updated."""

    @property
    def total(self) -> FloatArray:
        """All of them."""
        return self.layers + self.outer

    def of(self, chosen: IntArray) -> StageParameters:
        """Return those of some configurations, by index."""
        return StageParameters(self.layers[chosen], self.outer[chosen], self.unit[chosen], self.trained[chosen])


def joined(every: Sequence[StageParameters]) -> StageParameters:
    """Return the parameters of several, one after another."""
    columns = zip(*((each.layers, each.outer, each.unit, each.trained) for each in every), strict=True)
    return StageParameters(*map(np.concatenate, columns))


class ParameterTraffic:
    """Gathers and reductions of the backbone's parameters over a step.

    ``sharding: full`` and ``hybrid`` gather each layer for the forward and again for the backward of a microbatch, and
    the outer parameters once; ``gradients`` gathers all once a step. FSDP gathers a layer while the one before
    computes, and reduces its gradients while the next one's backward computes. So hidden is all but what takes longer
    than the computation, the first gather and the last reduction. On CPUs nothing is hidden.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        setup: TrainingSetup,
        link_efficiency: float,
        ranks: IntArray,
        chunks: int,
        times: Mapping[str, ModuleTimes],
    ) -> None:
        """ranks: layers of the first, the last and the longest rank, by pipeline degree from 0 on; ``[P, 3]``."""
        self._cluster, self._model, self._setup, self._link_efficiency = cluster, model, setup, link_efficiency
        self._ranks, self._chunks, self._times = ranks, chunks, times

    def parameters(self, columns: CandidateColumns) -> StageParameters:
        """Return those of the fullest pipeline rank; of what is frozen, each rank counts as having an even share."""
        backbone, (first, last, longest) = self._model.backbone, self._ranks[columns.pp].T
        table, layer, connector = backbone.head_parameters, backbone.layer_parameters, self._model.connector
        counts, outer = (
            np.stack([first, last, longest]),
            np.array([table + connector.num_parameters, table, 0], dtype=np.float64),
        )
        fullest = np.argmax(counts * layer + outer[:, None], axis=0)
        of_alone = backbone.num_parameters - backbone.num_layers * layer + connector.num_parameters
        layers = layer * counts[fullest, np.arange(len(columns))] / columns.tp
        whole = np.where(columns.pp == 1, of_alone, outer[fullest]) / columns.tp
        return StageParameters(layers, whole, layer / columns.tp, self._model.trained_share * (layers + whole))

    def shards(self, columns: CandidateColumns) -> IntArray:
        """Return the data parallel ranks that hold one set of shards; 1 where the configuration has none."""
        per_node = self._cluster[columns.device_type].devices_per_node
        return np.maximum(num_shards(self._setup, columns.dp, columns.pp * columns.tp, per_node), 1)

    def gathering_s(self, columns: CandidateColumns, stage: FloatArray, held: StageParameters) -> FloatArray:
        """Return seconds of a microbatch's gathers that no computation hides, ``[C]``.

        stage: seconds of its forward and backward. held: parameters of the rank.
        """
        if self._setup.sharding == "gradients":
            return np.zeros(len(columns))
        if (measured := self._measured_s(columns, held)) is not None:
            return measured[0]
        each_s = self._gather_s(columns)
        forward, backward = each_s * held.total, each_s * held.layers
        if not self._overlaps(columns):
            return self._factor(columns) * (forward + backward)
        # Each pass gathers for itself, so a long backward hides nothing of the forward's.
        exposed = np.maximum(forward - (1.0 - BACKWARD_SHARE) * stage, 0.0)
        exposed += np.maximum(backward - BACKWARD_SHARE * stage, 0.0)
        return self._factor(columns) * (exposed + each_s * (self._chunks * held.unit + held.outer))

    def gathering_once_s(self, columns: CandidateColumns, stage: FloatArray, held: StageParameters) -> FloatArray:
        """Return seconds of gathers that a step makes once, and that no computation hides, ``[C]``.

        They are in the forward of the first microbatch, for which each pipeline rank waits for the one before.
        """
        if self._setup.sharding != "gradients" or self._measured_s(columns, held) is not None:
            return np.zeros(len(columns))
        each_s = self._gather_s(columns)
        every = each_s * held.total
        if self._overlaps(columns):
            hidden = np.maximum(every - (1.0 - BACKWARD_SHARE) * stage, 0.0)
            every = np.minimum(hidden + each_s * (self._chunks * held.unit + held.outer), every)
        return self._factor(columns) * columns.pp * every

    def reducing_s(
        self, columns: CandidateColumns, stage: FloatArray, num_microbatches: FloatArray, held: StageParameters
    ) -> FloatArray:
        """Return seconds of a step's reductions that no backward hides, ``[C]``; of one replica, of its copies.

        Replicas under hybrid sharding sum their shards with the last microbatch only. Copies are made in a step's first
        forward and last backward, for which each pipeline rank waits for the one before.
        """
        # Each chunk is wrapped by itself.
        copying = self._times[columns.device_type].ends_s(held.trained / self._chunks)
        summing = self._summing_s(columns, stage, num_microbatches, held)
        if copying is None:
            return summing
        return summing + np.where(columns.dp == 1, columns.pp * self._chunks * copying, 0.0)

    def _summing_s(
        self, columns: CandidateColumns, stage: FloatArray, num_microbatches: FloatArray, held: StageParameters
    ) -> FloatArray:
        if (measured := self._measured_s(columns, held)) is not None:
            each = False if columns.reduces_each is None else columns.reduces_each
            return np.where(each, num_microbatches, 1.0) * measured[1]
        device, shards, replica = self._cluster[columns.device_type], self.shards(columns), columns.pp * columns.tp
        share = FLOAT32_NBYTES * (shards - 1) / shards / self._link(device, shards, replica)
        reduce, tail = share * held.trained, share * np.minimum(held.unit + held.outer, held.trained)
        groups = columns.dp // shards
        between = 2.0 * (groups - 1) / groups * FLOAT32_NBYTES * held.trained / shards
        last = reduce + between / self._link(device, groups, shards * replica)
        if self._overlaps(columns):
            # The backward also gathers over the same link.
            gathers = 0.0 if self._setup.sharding == "gradients" else self._gather_s(columns) * held.layers
            free = np.maximum(BACKWARD_SHARE * stage - gathers, 0.0)
            last, reduce = np.maximum(last - free, 0.0) + tail, np.maximum(reduce - free, 0.0) + tail
        last, reduce = self._factor(columns) * last, self._factor(columns) * reduce
        if columns.reduces_each is None:
            return last
        return np.where(columns.reduces_each, (num_microbatches - 1) * reduce + last, last)

    def _measured_s(self, columns: CandidateColumns, held: StageParameters) -> tuple[FloatArray, FloatArray] | None:
        """A profile's seconds of a microbatch's gathers, and of a reduction with gathers that a step makes once."""
        shards = self.shards(columns).astype(np.float64)
        return self._times[columns.device_type].replicas_s(self._setup.sharding, held.total, shards)

    def _factor(self, columns: CandidateColumns) -> float:
        """Of what nothing hides, by a finished run."""
        return self._times[columns.device_type].collectives

    def _gather_s(self, columns: CandidateColumns) -> FloatArray:
        """Seconds of gathering one parameter."""
        shards = self.shards(columns)
        link = self._link(self._cluster[columns.device_type], shards, columns.pp * columns.tp)
        return self._setup.dtype_nbytes * (shards - 1) / shards / link

    def _overlaps(self, columns: CandidateColumns) -> bool:
        """Whether devices copy and reduce while they compute."""
        return self._cluster[columns.device_type].name != CPU

    def _link(self, device: DeviceType, members: IntArray, apart: IntArray) -> FloatArray:
        return group_link(device, members, apart) * self._link_efficiency
