"""Adaptive recomputation (OmniBal 4.3): each pipeline rank recomputes as few layers as its memory allows.

The paper records what a rank has left with all layers recomputed (step 1) and with some kept (step 2), takes the bytes
that a layer saves from the difference (step 3), and from both the fewest layers that fit (step 4). Here the first three
steps are predictions, tensor by tensor (``costs.memory``), and the fourth asks them for every choice. A rank recomputes
its first layers: their backward comes last, when the activations of the layers after them are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from flowtrain.config.model import LayerCheckpointing
from flowtrain.costs.memory import StepMemory
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import MicrobatchSize, TrainingSetup
from flowtrain.pipeline.actions import MemoryKind, StageMemory, StageModule, stage_memory
from flowtrain.pipeline.partition import Partition
from flowtrain.pipeline.rank_chunks import RankChunks, memory_of_rank, rank_chunks

Words = tuple[LayerCheckpointing, ...]
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Recomputable:
    """Layers of one module on a rank, which take the same time and the same memory."""

    num_layers: int
    layer_cost: float
    """Time of one forward of a layer, in any unit."""


def least_recomputed(
    modules: Sequence[Recomputable], peak_nbytes: Callable[[tuple[int, ...]], int], usable_nbytes: int
) -> tuple[int, ...] | None:
    """Return how many layers of each module to recompute so that the peak fits: the least time, then the fewest layers.

    peak_nbytes: of so many recomputed layers of each module. None: it does not fit with any choice.
    """
    choices = sorted(
        product(*(range(each.num_layers + 1) for each in modules)),
        key=lambda counts: (
            sum(count * each.layer_cost for count, each in zip(counts, modules, strict=True)),
            sum(counts),
            counts,
        ),
    )
    return next((counts for counts in choices if peak_nbytes(counts) <= usable_nbytes), None)


@dataclass(frozen=True, slots=True)
class RankRecomputation:
    """What one pipeline rank recomputes."""

    recomputed: Mapping[StageModule, tuple[int, int]]
    """Of each adaptive module that the rank trains: recomputed layers, and all."""
    peak_nbytes: int
    """Predicted."""
    usable_nbytes: int
    saved_nbytes: Mapping[StageModule, int]
    """What each recomputed layer of a module saves, over all microbatches in flight (M_t and M_v of the paper)."""

    @property
    def fits(self) -> bool:
        """Whether the prediction is within the usable memory."""
        return self.peak_nbytes <= self.usable_nbytes

    @property
    def text(self) -> str:
        """Recomputed layers of each module, and the memory."""
        parts = [f"{count} of {whole} {module} layers" for module, (count, whole) in self.recomputed.items()]
        peak, usable = (f"{nbytes / _GIB:.1f}" for nbytes in (self.peak_nbytes, self.usable_nbytes))
        return f"{' and '.join(parts) or 'nothing'} ({peak} of {usable} GiB)"


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What all ranks recompute."""

    encoder: Words | None
    """Of each encoder layer; None: they follow a word of the configuration."""
    backbone: Words | None
    """Of each decoder layer; None as above."""
    ranks: tuple[RankRecomputation, ...]
    """By pipeline rank."""

    @property
    def text(self) -> str:
        """What each pipeline rank recomputes."""
        return "; ".join(f"pp{rank}: {each.text}" for rank, each in enumerate(self.ranks))

    def counts(self, partition: Partition) -> dict[tuple[StageModule, int], int | None]:
        """Return the recomputed layers of every (module, stage); None: as a word of the configuration tells."""
        words = {StageModule.ENCODER: self.encoder, StageModule.BACKBONE: self.backbone}
        found: dict[tuple[StageModule, int], int | None] = {}
        for stage in partition.stages:
            each = words[stage.module]
            found[stage.module, stage.index] = (
                None if each is None else sum(each[layer] == "full" for layer in stage.layers)
            )
        return found


def adaptive_recomputation(
    partition: Partition,
    model: ModelSpec,
    setup: TrainingSetup,
    size: MicrobatchSize,
    usable_nbytes: Sequence[int],
    *,
    adaptive: Collection[StageModule],
    num_microbatches: int,
) -> Recomputation:
    """Choose what every pipeline rank recomputes.

    setup: gives the strategy of modules that are not adaptive. size: of the largest microbatch. usable_nbytes: by
    pipeline rank. adaptive: modules whose layers are chosen. num_microbatches: of a step on each replica. A rank that
    fits with no choice recomputes all its layers; ``RankRecomputation.fits`` tells.
    """
    words, ranks = _nothing_recomputed(model), []
    for rank, usable in enumerate(usable_nbytes):
        layers = {module: _layers(partition, rank, module, model) for module in StageModule if module in adaptive}
        layers = {module: each for module, each in layers.items() if each}
        held = rank_chunks(partition, rank, num_microbatches)
        memory = partial(_memory, model, held, setup, size, adaptive, layers)

        def peak(counts: tuple[int, ...], memory: Callable[[Sequence[int]], StepMemory] = memory) -> int:
            return memory(counts).peak

        costs = _layer_costs(model, size)
        modules = [Recomputable(len(each), costs[module]) for module, each in layers.items()]
        counts = least_recomputed(modules, peak, usable) or tuple(each.num_layers for each in modules)
        _recompute(words, layers, counts)
        found = {module: (count, len(layers[module])) for count, module in zip(counts, layers, strict=True)}
        ranks.append(RankRecomputation(found, peak(counts), usable, _saved_nbytes(layers, memory)))
    return Recomputation(
        tuple(words[StageModule.ENCODER]) if StageModule.ENCODER in adaptive else None,
        tuple(words[StageModule.BACKBONE]) if StageModule.BACKBONE in adaptive else None,
        tuple(ranks),
    )


_Lists = dict[StageModule, list[LayerCheckpointing]]


def _nothing_recomputed(model: ModelSpec) -> _Lists:
    """A word for each layer of each module."""
    depth = {StageModule.BACKBONE: model.backbone.num_layers}
    depth[StageModule.ENCODER] = max((spec.num_layers for spec in model.encoders.values()), default=0)
    return {module: ["none"] * num_layers for module, num_layers in depth.items()}


def _recompute(words: _Lists, layers: Mapping[StageModule, Sequence[int]], counts: Sequence[int]) -> None:
    """Let the first ``counts`` of a rank's layers of each module recompute."""
    for count, (module, own) in zip(counts, layers.items(), strict=True):
        for layer in own[:count]:
            words[module][layer] = "full"


def _memory(
    model: ModelSpec,
    held: RankChunks,
    setup: TrainingSetup,
    size: MicrobatchSize,
    adaptive: Collection[StageModule],
    layers: Mapping[StageModule, Sequence[int]],
    counts: Sequence[int],
) -> StepMemory:
    """Predicted memory of a rank that recomputes so many of its layers of each module."""
    words = _nothing_recomputed(model)
    _recompute(words, layers, counts)
    return memory_of_rank(model, held, _with_words(setup, words, adaptive), size)


def _saved_nbytes(
    layers: Mapping[StageModule, Sequence[int]], memory: Callable[[Sequence[int]], StepMemory]
) -> dict[StageModule, int]:
    """Steps 1 to 3: activations with nothing recomputed, less those with all layers of one module, by its layers."""
    saved, kept = {}, memory([0] * len(layers)).activations
    for module, own in layers.items():
        recomputed = memory([len(own) if other is module else 0 for other in layers]).activations
        saved[module] = (kept - recomputed) // len(own)
    return saved


def _layers(partition: Partition, rank: int, module: StageModule, model: ModelSpec) -> list[int]:
    """A rank's layers of a module that keep something for the backward, in the order of the flow."""
    stages = [stage for stage in partition.of_rank(rank) if stage.module is module and stage.has_backward]
    layers = [layer for stage in stages for layer in stage.layers]
    if module is StageModule.ENCODER or model.backbone.trained is None:
        return layers
    return [layer for layer in layers if layer >= model.backbone.trained.num_idle_layers]


def _layer_costs(model: ModelSpec, size: MicrobatchSize) -> dict[StageModule, float]:
    """Multiply-adds of a layer's matrix products over the largest microbatch."""
    costs = {StageModule.BACKBONE: float(size.num_tokens * model.backbone.layer_matmul_parameters)}
    for spec in model.encoders.values():
        costs[StageModule.ENCODER] = float(size.num_tower_tokens * spec.layer_matmul_parameters)
    return costs


def _with_words(
    setup: TrainingSetup, words: Mapping[StageModule, Sequence[LayerCheckpointing]], adaptive: Collection[StageModule]
) -> TrainingSetup:
    """The setup with a list for each adaptive module."""
    # Without its own words a trained encoder follows the backbone's word, which a list would hide.
    encoder = tuple(words[StageModule.ENCODER]) if StageModule.ENCODER in adaptive else setup.of_encoder
    backbone = tuple(words[StageModule.BACKBONE])
    if StageModule.BACKBONE not in adaptive:
        return replace(setup, encoder_checkpointing=encoder)
    return replace(setup, encoder_checkpointing=encoder, activation_checkpointing=backbone)


def stepped_up(
    memory: Mapping[tuple[StageModule, int], StageMemory],
    stages: Sequence[tuple[StageModule, int, int]],
    saved_nbytes: Mapping[StageModule, int],
    excess_nbytes: int,
) -> dict[tuple[StageModule, int], StageMemory] | None:
    """Return the strategies with more recomputed layers, for a step that took too much memory; None if none is left.

    The end of the paper's step 4: the prediction was too low, and what is missing is known.

    memory: of every stage. stages: this rank's, in the order of the flow: module, index, number of layers.
    saved_nbytes: what recomputing one more layer of a module saves. excess_nbytes: what the step took too much.
    """
    changed, left = dict(memory), excess_nbytes
    for module, index, num_layers in stages:
        if left <= 0 or saved_nbytes.get(module, 0) <= 0:
            continue
        kinds = list(changed[module, index].of_layers(num_layers))
        for layer, kind in enumerate(kinds):
            if left > 0 and kind is MemoryKind.KEEP:
                kinds[layer] = MemoryKind.RECOMPUTE
                left -= saved_nbytes[module]
        changed[module, index] = stage_memory(kinds)
    return None if left == excess_nbytes else changed
