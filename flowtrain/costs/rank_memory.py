"""What backbone ranks hold at a training step, many ranks at once; ``costs.memory`` gives names to the sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flowtrain.costs.activations import (
    backward_nbytes,
    chunk_activation_nbytes,
    kept_nbytes,
    layer_activation_nbytes,
    selective_activation_nbytes,
    without_idle_layers,
)
from flowtrain.costs.flops import FloatArray, IntArray
from flowtrain.costs.model_spec import ConnectorSpec, TransformerSpec
from flowtrain.costs.training_setup import FLOAT32_NBYTES, Chunk, MicrobatchSize, ReductionName, TrainingSetup

BoolArray = NDArray[np.bool_]
Ends = tuple[bool, bool]
"""Whether a chunk is the first of the backbone, and whether it is the last."""
TpT = TypeVar("TpT", int, IntArray)
"""A tensor parallel degree, or one for each rank."""
_ENDS: tuple[Ends, ...] = ((False, False), (False, True), (True, False), (True, True))

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True, slots=True, eq=False)
class RankColumns:
    """What ranks have of the backbone; arrays are ``[N]``, a column for each rank."""

    num_chunks: int
    """Chunks of each rank."""
    num_layers: IntArray
    trained_layers: FloatArray
    """Decoder layers, each counted by its share of trained parameters."""
    has_first: BoolArray
    """Whether embedding and connector are there."""
    has_last: BoolArray
    """Whether final norm, head and loss are there."""
    kept_layers: Mapping[str, IntArray]
    """Decoder layers times the microbatches that they keep at once, by memory strategy."""
    kept_chunks: Mapping[Ends, IntArray]
    """Chunks times the microbatches that they keep at once, by kind."""
    examples: tuple[tuple[Chunk, ...], ...]
    """Chunks of ranks that need different memory in addition while a layer runs backward."""
    example: IntArray
    """Which of ``examples`` a rank is like."""
    first_layers: Mapping[str, IntArray]
    """Decoder layers of the first chunk, by memory strategy."""

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...], setup: TrainingSetup, spec: TransformerSpec) -> RankColumns:
        """Return one rank with these chunks."""
        layers: dict[str, int] = {}
        first: Mapping[str, int] = {}
        ends: dict[Ends, int] = {}
        for chunk in chunks:
            kind = chunk.is_first, chunk.is_last
            ends[kind] = ends.get(kind, 0) + chunk.in_flight
            words = without_idle_layers(chunk, spec).layers_by_strategy(setup)
            first = first or words
            for word, count in words.items():
                layers[word] = layers.get(word, 0) + chunk.in_flight * count
        return cls(
            len(chunks),
            np.array([sum(chunk.num_layers for chunk in chunks)]),
            np.array([sum(spec.trained_layers(chunk.layers) for chunk in chunks)]),
            np.array([any(chunk.is_first for chunk in chunks)]),
            np.array([any(chunk.is_last for chunk in chunks)]),
            {word: np.array([count]) for word, count in layers.items()},
            {kind: np.array([count]) for kind, count in ends.items()},
            (chunks,),
            np.zeros(1, dtype=np.int64),
            {word: np.array([count]) for word, count in first.items()},
        )


def rank_nbytes(
    spec: TransformerSpec,
    connector: ConnectorSpec,
    ranks: RankColumns,
    setup: TrainingSetup,
    microbatches: Sequence[MicrobatchSize],
    *,
    size: IntArray,
    dp: IntArray,
    tp: IntArray,
    num_shards: IntArray,
    shards_parameters: BoolArray,
    accumulates: BoolArray,
    reduces_each: BoolArray,
) -> dict[str, IntArray]:
    """Return the bytes of ranks by the names of ``costs.memory.StepMemory``, each ``[N]``.

    setup: its own dp, tp, sharding, ``accumulates`` and ``gradient_reduction`` do not count, those of the arrays do.
    size: which of the microbatches is a rank's largest. shards_parameters: whether several replicas share them.
    """
    dtype, of_each = setup.dtype_nbytes, _BySize.of(setup, tp, microbatches, size)
    per_layer = layer_parameters(spec, tp)
    outer = _outer_parameters(spec, connector, ranks, tp)
    trained_outer = _trained_outer(spec, connector, ranks, tp)
    whole = ranks.num_layers * per_layer + outer
    trained = np.ceil(ranks.trained_layers * per_layer).astype(np.int64) + trained_outer
    shard, trained_shard = -(-whole // num_shards), -(-trained // num_shards)
    # In each chunk, FSDP gathers the next layer while one computes, and keeps the root's own parameters gathered. A
    # single replica keeps all parameters.
    shards_parameters = shards_parameters & (dp > 1)
    num_gathered = np.where(shards_parameters, np.minimum(ranks.num_layers, 2 * ranks.num_chunks), ranks.num_layers)
    last_reduced = np.where(trained_outer > 0, trained_outer, np.where(ranks.trained_layers > 0, per_layer, 0))
    gathered = dtype * (num_gathered * per_layer + outer)
    # The head's gradient waits for the root's reduction, and that of the embedding comes beside it.
    table = dtype * -(-spec.vocab_size // tp) * spec.hidden_size
    head = np.where(ranks.has_last, table if trains_head(spec) else 0, 0)
    sums_whole = accumulates & ~reduces_each
    activations, in_flight, host = _activations_nbytes(spec, connector, ranks, of_each)
    working = np.where(
        sums_whole,
        _working_nbytes(spec, ranks, of_each, "step"),
        _working_nbytes(spec, ranks, of_each, "microbatch"),
    )
    return {
        "parameters": FLOAT32_NBYTES * shard,
        "gradients": FLOAT32_NBYTES * trained_shard,
        "optimizer_state": FLOAT32_NBYTES * trained_shard * OPTIMIZER_STATES[setup.optimizer],
        "accumulated": FLOAT32_NBYTES * np.where(accumulates, np.where(reduces_each, trained_shard, trained), 0),
        "gathered": gathered,
        "activations": activations,
        "working": working + head,
        "loss": np.where(ranks.has_last, of_each(partial(loss_nbytes, spec)), 0),
        "reduced": reduction_nbytes(
            dtype, last_reduced, num_shards, sums_whole, accumulates & reduces_each, _last_gradient(spec, ranks, table)
        ),
        "remaining": np.where(accumulates & reduces_each, in_flight + np.where(shards_parameters, 0, gathered), 0),
        "tables": np.where(ranks.has_first & trains_embedding(spec), table + head, 0),
        "in_flight": in_flight,
        "host": host,
    }


@dataclass(frozen=True, slots=True, eq=False)
class _BySize:
    """What differs by the tensor parallel degree and the microbatch, computed once for each pair."""

    pairs: tuple[tuple[TrainingSetup, MicrobatchSize], ...]
    which: IntArray
    """Of them, by rank, ``[N]``."""

    @classmethod
    def of(cls, setup: TrainingSetup, tp: IntArray, microbatches: Sequence[MicrobatchSize], size: IntArray) -> _BySize:
        """Return the pairs of some ranks; arguments as in ``rank_nbytes``."""
        number, count = tp * len(microbatches) + size, len(microbatches)
        found = np.flatnonzero(np.bincount(number))
        setups = {each: replace(setup, tp=each) for each in dict.fromkeys((found // count).tolist())}
        pairs = tuple((setups[each // count], microbatches[each % count]) for each in found.tolist())
        return cls(pairs, np.searchsorted(found, number))

    def __call__(self, nbytes: Callable[[TrainingSetup, MicrobatchSize], int]) -> IntArray:
        """Return the bytes that a pair gives, by rank, ``[N]``."""
        return np.array([nbytes(*each) for each in self.pairs], dtype=np.int64)[self.which]


def _kept_nbytes(spec: TransformerSpec, word: str, setup: TrainingSetup, microbatch: MicrobatchSize) -> int:
    return kept_nbytes(spec, setup, microbatch.num_tokens, word)


def _empty_nbytes(
    spec: TransformerSpec, connector: ConnectorSpec, ends: Ends, setup: TrainingSetup, microbatch: MicrobatchSize
) -> int:
    """Activations of a chunk without layers."""
    return chunk_activation_nbytes(spec, connector, Chunk(0, *ends), setup, microbatch)


def _activations_nbytes(
    spec: TransformerSpec, connector: ConnectorSpec, ranks: RankColumns, of_each: _BySize
) -> tuple[IntArray, IntArray, IntArray]:
    """All activations, those of the other microbatches in flight at a backward's end, and those offloaded; ``[N]``."""
    words = {**ranks.kept_layers, **ranks.first_layers}
    kept = {word: of_each(partial(_kept_nbytes, spec, word)) for word in words}
    empty = {ends: of_each(partial(_empty_nbytes, spec, connector, ends)) for ends in _ENDS}
    activations = np.zeros(len(of_each.which), dtype=np.int64)
    for word, count in ranks.kept_layers.items():
        activations += count * kept[word]
    for ends, count in ranks.kept_chunks.items():
        activations += count * empty[ends]
    in_flight, host = activations - _ended_nbytes(ranks, kept, empty), np.zeros_like(activations)
    if "offload" in ranks.kept_layers:
        # The layer called last stays on the device; in the backward its place is that of the layer before.
        layer = of_each(lambda setup, microbatch: layer_activation_nbytes(spec, setup, microbatch.num_tokens))
        activations += np.where(ranks.kept_layers["offload"] > 0, layer, 0)
        host = ranks.kept_layers["offload"] * layer
    return activations, in_flight, host


def _ended_nbytes(ranks: RankColumns, kept: Mapping[str, IntArray], empty: Mapping[Ends, IntArray]) -> IntArray:
    """Activations of one microbatch in the first chunk, whose backward comes last, ``[N]``.

    kept: by a layer of each strategy. empty: by a chunk without layers.
    """
    is_last = ranks.has_last & (ranks.num_chunks == 1)
    ended = np.zeros(len(is_last), dtype=np.int64)
    for (first, last), nbytes in empty.items():
        ended += np.where((ranks.has_first == first) & (is_last == last), nbytes, 0)
    for word, count in ranks.first_layers.items():
        ended += count * kept[word]
    return ended


def reduction_nbytes(
    dtype_nbytes: int,
    num_parameters: IntArray,
    num_shards: IntArray,
    sums_whole: BoolArray,
    adds: BoolArray,
    last_gradient: IntArray | int = 0,
) -> IntArray:
    """Return the buffer that the ranks reduce and, beside it, one unit's gradient before and its shard after.

    sums_whole: whole float32 gradients wait for the reduction. adds: a shard has the sum of earlier microbatches;
    otherwise the result becomes the shard, which counts among the gradients and does not yet exist before.
    last_gradient: bytes of the gradient that autograd computed last, which it holds until the reduction is over.
    """
    gradient = np.where(sums_whole, FLOAT32_NBYTES, dtype_nbytes) * num_parameters
    result = FLOAT32_NBYTES * -(-num_parameters // num_shards)
    held = np.where(sums_whole, 0, last_gradient)
    beside = np.where(adds, np.maximum(gradient, held + result), np.maximum(gradient - result, held))
    return FLOAT32_NBYTES * num_parameters + beside


def _last_gradient(spec: TransformerSpec, ranks: RankColumns, table: IntArray) -> IntArray:
    """Bytes of the embedding's own gradient; with a tied head on the rank, both are in one sum."""
    is_sum = ranks.has_last if spec.tied_embeddings else np.zeros_like(ranks.has_last)
    return np.where(ranks.has_first & ~is_sum & trains_embedding(spec), table, 0)


def layer_parameters(spec: TransformerSpec, tp: TpT) -> TpT:
    """Return the parameters of one decoder layer on one rank of tensor parallel groups."""
    return (spec.layer_parameters - 2 * spec.hidden_size) // tp + 2 * spec.hidden_size


def _outer_parameters(spec: TransformerSpec, connector: ConnectorSpec, ranks: RankColumns, tp: IntArray) -> IntArray:
    """Parameters outside the layers: embedding, connector, final norm, head; tied ones once per rank."""
    num_tables = ranks.has_first.astype(np.int64) + ranks.has_last
    if spec.tied_embeddings:
        num_tables = np.minimum(num_tables, 1)
    tables = num_tables * (-(-spec.vocab_size // tp) * spec.hidden_size)
    return tables + ranks.has_first * -(-connector.num_parameters // tp) + ranks.has_last * spec.hidden_size


def _trained_outer(spec: TransformerSpec, connector: ConnectorSpec, ranks: RankColumns, tp: IntArray) -> IntArray:
    """Those of ``_outer_parameters`` that are trained."""
    if spec.trained is None:
        return _outer_parameters(spec, connector, ranks, tp)
    has_table = ranks.has_first | ranks.has_last if spec.tied_embeddings else ranks.has_first
    tables = has_table * -(-spec.trained.embedding // tp) + ranks.has_last * -(-spec.trained.head // tp)
    norm = ranks.has_last * spec.trained.norm
    return tables + norm + ranks.has_first * -(-connector.num_trained_parameters // tp)


def trains_head(spec: TransformerSpec) -> bool:
    """Whether the output head's weight is trained."""
    trained = spec.trained
    return trained is None or (trained.embedding if spec.tied_embeddings else trained.head) > 0


def trains_embedding(spec: TransformerSpec) -> bool:
    """Whether the embedding's weight is trained."""
    return spec.trained is None or spec.trained.embedding > 0


def _working_nbytes(spec: TransformerSpec, ranks: RankColumns, of_each: _BySize, reduction: ReductionName) -> IntArray:
    """The most that the backward of decoder layers holds in addition to all activations, ``[N]``."""
    by_tp = {setup.tp: setup for setup, _ in of_each.pairs}
    setups = {tp: replace(each, accumulates=True, gradient_reduction=reduction) for tp, each in by_tp.items()}
    each = [
        [_example_working_nbytes(spec, chunks, setups[setup.tp], microbatch.num_tokens) for chunks in ranks.examples]
        for setup, microbatch in of_each.pairs
    ]
    return np.array(each, dtype=np.int64)[of_each.which, ranks.example]


@lru_cache(maxsize=4096)
def _example_working_nbytes(
    spec: TransformerSpec, chunks: tuple[Chunk, ...], setup: TrainingSetup, num_tokens: int
) -> int:
    layer = layer_activation_nbytes(spec, setup, num_tokens)
    per_layer = layer_parameters(spec, setup.tp) if spec.trained_layers(range(spec.num_layers)) else 0
    words = words_in_backward(chunks, setup)
    freed = {"none": layer, "full": 0, "offload": 0}
    if "selective" in words:
        freed["selective"] = selective_activation_nbytes(spec, setup, num_tokens)
    # While an offloaded layer runs, the one before it is fetched.
    first = words.index("offload") if "offload" in words else -1
    layers = [(0 if word == "none" or at == first else layer, freed[word]) for at, word in enumerate(words)]
    return backward_peak_nbytes(setup, layers[::-1], backward_nbytes(spec, setup, num_tokens), per_layer)


def words_in_backward(chunks: Sequence[Chunk], setup: TrainingSetup) -> list[str]:
    """Return the strategies of a rank's layers, in order, from the first that can decide a backward's peak."""
    words = [word for chunk in chunks for word in chunk.words(setup)]
    if isinstance(setup.activation_checkpointing, str):
        return words[-1 - setup.checkpoint_every :]  # one more period has no other peak
    return words


def backward_peak_nbytes(
    setup: TrainingSetup, layers: Sequence[tuple[int, int]], gradients: int, per_layer: int
) -> int:
    """Return the most that a backward holds in addition to all activations, with gradients of weights on their way.

    FSDP reduces a layer's gradients once its activations are gone, and the buffer of that waits for the next
    reduction, so it is there during the next layer's backward. layers: in the order of the backward, what each one
    restores, and the activations that it frees. gradients: of activations.
    """
    # A float32 run adds each gradient to the accumulated one at once.
    adds_at_once = sums_whole(setup) and setup.dtype_nbytes == FLOAT32_NBYTES
    of_weights = 0 if adds_at_once else setup.dtype_nbytes * per_layer
    peak = gone = buffer = 0
    for restored, freed in layers:
        computing = restored + gradients + of_weights
        # With the last microbatch the buffer takes the place of the layer's accumulated gradient.
        held = max(computing, buffer) if sums_whole(setup) else computing + buffer
        peak, gone, buffer = max(peak, held - gone), gone + freed, FLOAT32_NBYTES * per_layer
    return max(peak, buffer - gone)


def sums_whole(setup: TrainingSetup) -> bool:
    """Whether whole float32 gradients wait for a step's last microbatch."""
    return setup.accumulates and setup.gradient_reduction == "step"


def loss_nbytes(spec: TransformerSpec, setup: TrainingSetup, microbatch: MicrobatchSize) -> int:
    """Return the most that the fused loss holds at once, either with a chunk's probabilities or the head's gradient.

    Logits are in the compute type and are overwritten by their gradient. Probabilities are float32. A CPU has
    logits of another type in float32 beside them; without tensor parallelism it computes few at once. With several
    chunks, the head's gradient is summed in float32.
    """
    dtype, vocabulary = setup.dtype_nbytes, -(-spec.vocab_size // setup.tp)
    num_rows = max(1, microbatch.num_target_tokens)
    num_logits = min(num_rows, setup.loss_chunk_tokens) * vocabulary
    head = vocabulary * spec.hidden_size if trains_head(spec) else 0
    rows = 2 * dtype * num_rows * spec.hidden_size  # rows with a target, and their gradient
    summed = FLOAT32_NBYTES * head if num_rows > setup.loss_chunk_tokens else 0
    at_once, copies = num_logits, 1
    if setup.probabilities_at_once is not None:
        at_once = num_logits if setup.tp > 1 else min(num_logits, setup.probabilities_at_once)
        copies = 1 if dtype == FLOAT32_NBYTES else 2
    computing = dtype * num_logits + copies * FLOAT32_NBYTES * at_once + summed
    adding = dtype * (num_logits + head) + summed
    return rows + max(computing, adding)
