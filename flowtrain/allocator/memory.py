"""Whether a configuration fits a device: a module's share of memory, and the backbone's peak under its schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from flowtrain.allocator.candidates import CandidateColumns
from flowtrain.allocator.slices import ONE_EACH, Slices, chunks_of_ranks
from flowtrain.costs.activations import without_idle_layers
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.memory import USABLE_SHARE, StepMemory, predict_step_memory, rank_peaks
from flowtrain.costs.model_spec import ModelSpec, TrainedBackbone, TransformerSpec
from flowtrain.costs.rank_memory import BoolArray, Ends, RankColumns, words_in_backward
from flowtrain.costs.training_setup import Checkpointing, Chunk, MicrobatchSize, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.pipeline.rank_chunks import rank_chunks
from flowtrain.pipeline.schedules.one_f_one_b import in_flight_of_chunks
from flowtrain.types.plan import Degrees


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The part of a device's memory that a module may use."""

    usable: float = USABLE_SHARE
    pool_nbytes: int = 0
    """Bytes of an encoder's device that belong to the memory pool."""

    def module_nbytes(self, device_type: DeviceType, *, is_encoder: bool) -> int:
        """Return the bytes that a module may use on each device."""
        return int(device_type.memory_nbytes * self.usable) - (self.pool_nbytes if is_encoder else 0)


def backbone_memory(
    model: ModelSpec, workload: Workload, setup: TrainingSetup, degrees: Degrees, slices: Slices = ONE_EACH
) -> StepMemory:
    """Return the predicted memory of the fullest rank under 1F1B, interleaved if ranks hold several chunks.

    setup: its ``dp``, ``tp`` and ``accumulates`` are ignored.
    """
    num_microbatches = microbatches_of_a_replica(workload, degrees.dp)
    partition = slices.partition(model.backbone.num_layers, degrees.pp)
    at = replace(setup, dp=degrees.dp, tp=degrees.tp, accumulates=num_microbatches > 1)
    size = microbatch_size(workload)
    words, trained = setup.activation_checkpointing, model.backbone.trained
    ranks = _ranks_to_compare(slices, model.backbone.num_layers, degrees.pp, words, trained)
    each = (
        predict_step_memory(
            model.backbone, model.connector, rank_chunks(partition, rank, num_microbatches).backbone, at, size
        )
        for rank in ranks
    )
    return max(each, key=lambda memory: memory.peak)


def backbone_peaks(
    model: ModelSpec,
    variants: Sequence[tuple[Workload, TrainingSetup]],
    slices: Slices,
    columns: CandidateColumns,
    variant: IntArray,
    num_shards: IntArray,
    num_microbatches: IntArray,
) -> IntArray:
    """Return the peaks of many configurations, ``[C]``, each as ``backbone_memory``.

    variants: data and setups that differ in the size of microbatches and in sharding alone. variant: of each
    configuration. num_shards: DP ranks that hold one set of shards. num_microbatches: of a step on each replica. All
    are ``[C]``. ``columns.reduces_each`` decides over the setups.
    """
    if not len(columns):
        return np.zeros(0, dtype=np.int64)
    setup = variants[0][1]
    rows = _rank_rows(slices, model.backbone, setup.activation_checkpointing, setup.checkpoint_every)
    reduces_each = np.zeros(len(columns), dtype=bool) if columns.reduces_each is None else columns.reduces_each
    row, starts = rows.of_degrees(columns.pp)
    each = np.repeat(np.arange(len(columns)), np.diff(starts, append=len(row)))
    sizes = [microbatch_size(workload) for workload, _ in variants]
    different = list(dict.fromkeys(sizes))
    size = np.array([different.index(each) for each in sizes])
    shards = np.array([own.sharding != "gradients" for _, own in variants])
    found = rank_peaks(
        model.backbone,
        model.connector,
        rows.columns(row, columns.pp[each], num_microbatches[each]),
        setup,
        different,
        size=size[variant][each],
        dp=columns.dp[each],
        tp=columns.tp[each],
        num_shards=num_shards[each],
        shards_parameters=shards[variant][each],
        accumulates=num_microbatches[each] > 1,
        reduces_each=reduces_each[each],
    )
    return np.maximum.reduceat(found, starts)


@dataclass(frozen=True, slots=True, eq=False)
class _RankRows:
    """The ranks of every pipeline degree of which one is the fullest, degree by degree; arrays are ``[R, ...]``."""

    first_row: IntArray
    """Of each pipeline degree, ``[num_degrees + 2]``; the degree is the index."""
    rank: IntArray
    layers: Mapping[str, IntArray]
    """Layers of each chunk by memory strategy, without those that no gradient passes; ``[R, chunks]``."""
    num_layers: IntArray
    """All layers, ``[R]``."""
    trained_layers: FloatArray
    """As in ``RankColumns``."""
    examples: tuple[tuple[Chunk, ...], ...]
    """As in ``RankColumns``."""
    example: IntArray

    def of_degrees(self, pp: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows of all configurations ``[C]``, one configuration after the other, and where each starts."""
        counts = self.first_row[pp + 1] - self.first_row[pp]
        starts = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(starts, counts)
        return np.repeat(self.first_row[pp], counts) + within, starts

    def columns(self, row: IntArray, pp: IntArray, num_microbatches: IntArray) -> RankColumns:
        """Return what these rows hold with so many microbatches; all ``[N]``."""
        chunks = next(iter(self.layers.values())).shape[1]
        kept = in_flight_of_chunks(pp, self.rank[row], num_microbatches, chunks)
        is_first, is_last = self.rank[row] == 0, self.rank[row] == pp - 1
        ends = _kept_by_kind(kept, is_first, is_last)
        each = {word: layers[row] for word, layers in self.layers.items()}
        return RankColumns(
            chunks,
            self.num_layers[row],
            self.trained_layers[row],
            is_first,
            is_last,
            {word: (kept * layers).sum(axis=1) for word, layers in each.items()},
            ends,
            self.examples,
            self.example[row],
            {word: layers[:, 0] for word, layers in each.items()},
        )


def _kept_by_kind(kept: IntArray, is_first: BoolArray, is_last: BoolArray) -> dict[Ends, IntArray]:
    """Chunks in flight by kind, from those of each chunk ``[N, chunks]``: ends are the outer chunks of outer ranks."""
    if kept.shape[1] == 1:
        count = kept[:, 0]
        return {
            (first, last): np.where((is_first == first) & (is_last == last), count, 0)
            for first in (False, True)
            for last in (False, True)
        }
    first, last = np.where(is_first, kept[:, 0], 0), np.where(is_last, kept[:, -1], 0)
    return {(True, False): first, (False, True): last, (False, False): kept.sum(axis=1) - first - last}


@lru_cache(maxsize=64)
def _rank_rows(slices: Slices, spec: TransformerSpec, checkpointing: Checkpointing, every: int) -> _RankRows:
    setup = TrainingSetup(activation_checkpointing=checkpointing, checkpoint_every=every)
    first_row, ranks, found, num_layers = [0, 0], [], [], spec.num_layers
    for pp in range(1, slices.most_ranks(num_layers) + 1):
        partition = slices.partition(num_layers, pp)
        for rank in _ranks_to_compare(slices, num_layers, pp, checkpointing, spec.trained):
            ranks.append(rank)
            found.append(rank_chunks(partition, rank, 1).backbone)
        first_row.append(len(ranks))
    counts = [[without_idle_layers(chunk, spec).layers_by_strategy(setup) for chunk in chunks] for chunks in found]
    words = sorted({word for row in counts for chunk in row for word in chunk})
    layers = {word: np.array([[chunk.get(word, 0) for chunk in row] for row in counts]) for word in words}
    examples: dict[tuple[str, ...], int] = {}
    kinds = [tuple(words_in_backward(chunks, setup)) for chunks in found]
    example = np.array([examples.setdefault(kind, len(examples)) for kind in kinds])
    like = tuple(found[kinds.index(kind)] for kind in examples)
    whole = np.array([sum(chunk.num_layers for chunk in chunks) for chunks in found])
    trained = np.array([sum(spec.trained_layers(chunk.layers) for chunk in chunks) for chunks in found])
    return _RankRows(np.array(first_row), np.array(ranks), layers, whole, trained, like, example)


def microbatches_of_a_replica(workload: Workload, dp: int) -> int:
    """Return the microbatches of a step on each replica."""
    return int(workload.num_microbatches(np.array([dp]))[0])


def microbatch_size(workload: Workload) -> MicrobatchSize:
    """Return the size of a full microbatch with the data's mean shares of images and of tokens with loss."""
    tokens = workload.microbatch_tokens
    return MicrobatchSize(tokens, math.ceil(tokens * workload.target_share), math.ceil(tokens * workload.vision_share))


@lru_cache(maxsize=4096)
def _ranks_to_compare(
    slices: Slices, num_layers: int, pp: int, checkpointing: Checkpointing, trained: TrainedBackbone | None
) -> tuple[int, ...]:
    """Ranks of which one is the fullest: of those with the same layers the first, which keeps most, and the last.

    The last has the loss. Layers are the same if as much of them is trained.
    """
    words = checkpointing if not isinstance(checkpointing, str) else None
    first: dict[tuple[object, ...], int] = {}
    for rank, chunks in enumerate(chunks_of_ranks(slices, num_layers, pp)):
        same = tuple(
            (
                len(layers),
                *(sorted(Counter(words[layer] for layer in layers).items()) if words else ()),
                *_trained_parts(trained, layers),
            )
            for layers in chunks
        )
        first.setdefault(same, rank)
    return tuple(sorted({0, pp - 1, *first.values()}))


def _trained_parts(trained: TrainedBackbone | None, layers: range) -> tuple[tuple[bool, int], ...]:
    """Whether no gradient passes a layer, and how much of it is trained, by layer; empty if all is trained."""
    if trained is None:
        return ()
    return tuple((layer < trained.num_idle_layers, trained.layers[layer]) for layer in layers)
