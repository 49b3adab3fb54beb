"""Which layers of which module lie on which pipeline stage, rank and segment: the one object that all of it reads.

A microbatch passes the stages in the order of ``Partition.stages``. Stages of one (rank, segment) are neighbours there
and run one after another; a segment is one pass of the microbatch over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from flowtrain.errors import ConfigError, FaultCode
from flowtrain.pipeline.actions import StageModule

_PARTITION = "pipeline.partition"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage."""

    module: StageModule
    index: int
    """Number of the stage within its module."""
    rank: int
    """Pipeline rank that holds it."""
    segment: int
    """Pass over the ranks to which it belongs."""
    layers: range
    """Its layers, by their numbers in the whole module."""
    has_backward: bool = True
    """False for a frozen module that gets no gradients."""

    @property
    def text(self) -> str:
        """Its module and layers."""
        if not self.layers:
            return f"{self.module.value} no layers"
        start, last = self.layers.start, self.layers.stop - 1
        return f"{self.module.value} {start}" if start == last else f"{self.module.value} {start}-{last}"


@dataclass(frozen=True, slots=True)
class EncoderSplit:
    """The encoder of a monolithic pipeline."""

    num_layers: int
    """Layers that are computed."""
    place: Literal["first", "mixed", "own"]
    """``pipeline.encoder_layers``."""
    layer_cost: float
    """Expected time of one encoder layer, forward and backward, over that of one decoder layer."""
    is_trained: bool = False


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages in the order in which a microbatch passes them."""

    stages: tuple[Stage, ...]

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(stage.rank for stage in self.stages)

    @property
    def num_segments(self) -> int:
        """Passes of a microbatch over the ranks; above 1 the schedule interleaves them."""
        return 1 + max(stage.segment for stage in self.stages)

    def of_module(self, module: StageModule) -> tuple[Stage, ...]:
        """Return the stages of a module, by index."""
        return tuple(stage for stage in self.stages if stage.module is module)

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages on a pipeline rank, in the order of the flow."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def frozen(self) -> frozenset[StageModule]:
        """Modules whose stages have no backward."""
        return frozenset(stage.module for stage in self.stages if not stage.has_backward)

    @property
    def text(self) -> str:
        """Each stage's layers and its rank, in the order of the flow; a semicolon ends a segment."""
        segments: list[list[str]] = [[] for _ in range(self.num_segments)]
        for stage in self.stages:
            segments[stage.segment].append(f"{stage.text} @{stage.rank}")
        return "; ".join(", ".join(segment) for segment in segments)

    def rank_text(self, rank: int) -> str:
        """Return the layers on a rank, in the order of the flow."""
        return ", ".join(stage.text for stage in self.of_rank(rank))

    @property
    def entry_rank(self) -> int:
        """The rank on which data enter: images if there is an encoder, else tokens."""
        return self.stages[0].rank

    @property
    def token_rank(self) -> int:
        """The rank on which tokens and features enter the backbone."""
        return self.of_module(StageModule.BACKBONE)[0].rank


@lru_cache(maxsize=4096)
def build_partition(
    num_layers: int,
    pp_size: int = 1,
    chunks: int = 1,
    *,
    counts: tuple[int, ...] | None = None,
    encoder: EncoderSplit | None = None,
    first_layers: int = 1,
) -> Partition:
    """Return the partition of ``num_layers`` decoder layers, and of an encoder's, over the ranks.

    counts: ``pipeline.partition``; None: balanced by cost. Chunk c of rank r is the ``c * pp_size + r``-th slice of the
    layers. first_layers: the first decoder layers that must lie in one stage, since deepstack rows enter after them.
    Raises ConfigError if the layers cannot be cut so.
    """
    num_slices = pp_size * chunks
    mixed = encoder is not None and encoder.place == "mixed"
    available = num_layers + (encoder.num_layers if encoder is not None and mixed else 0)
    if num_slices > available - (first_layers - 1):
        is_bound = first_layers > 1
        together = f", of which the first {first_layers} decoder layers must lie in one stage" if is_bound else ""
        raise ConfigError.of(
            "backbone.pipeline_parallel_size",
            FaultCode.DEGREES,
            f"backbone.pipeline_parallel_size ({pp_size}) times pipeline.chunks ({chunks}) is more than the "
            f"{available} layers that the stages share{together}; lower one of them",
        )
    if encoder is not None and mixed:
        return _checked(_mixed(num_layers, pp_size, num_slices, counts, encoder, first_layers), first_layers)
    slices = _backbone_slices(num_layers, num_slices, counts, encoder, first_layers)
    stages: list[Stage] = []
    first_segment = 0
    if encoder is not None and encoder.place == "own":
        if encoder.num_layers < pp_size:
            raise ConfigError.of(
                "pipeline.encoder_layers",
                FaultCode.DEGREES,
                f"pipeline.encoder_layers ('own') needs an encoder layer for each of "
                f"backbone.pipeline_parallel_size ({pp_size}) ranks, and the encoder computes {encoder.num_layers}; "
                "lower the size, or set the key to 'first' or 'mixed'",
            )
        first_segment = 1
        own = split_layers(encoder.num_layers, pp_size)
        stages += [
            Stage(StageModule.ENCODER, rank, rank, 0, layers, encoder.is_trained) for rank, layers in enumerate(own)
        ]
    elif encoder is not None:
        stages.append(Stage(StageModule.ENCODER, 0, 0, 0, range(encoder.num_layers), encoder.is_trained))
    stages += [
        Stage(StageModule.BACKBONE, index, index % pp_size, first_segment + index // pp_size, layers)
        for index, layers in enumerate(slices)
    ]
    return _checked(Partition(tuple(stages)), first_layers)


def _checked(partition: Partition, first_layers: int) -> Partition:
    """Raise ConfigError if the first stage of the backbone lacks layers that deepstack rows enter."""
    first = partition.of_module(StageModule.BACKBONE)[0]
    if len(first.layers) < first_layers:
        raise ConfigError.of(
            _PARTITION,
            FaultCode.DEGREES,
            f"{_PARTITION} puts {len(first.layers)} decoder layers into the backbone's first stage, and deepstack rows "
            f"enter after each of the first {first_layers}; give that stage at least {first_layers}, or leave out the "
            "key",
        )
    return partition


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage: contiguous runs whose lengths differ by at most one.

    Stages in the middle get the extra layers, because the first stage also embeds and the last also computes the loss.
    """
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    each, extra = divmod(num_layers, num_stages)
    first_longer = (num_stages - extra) // 2
    return _ranges([each + (first_longer <= stage < first_longer + extra) for stage in range(num_stages)])


def balanced_counts(costs: Sequence[float], num_stages: int, least: int = 1) -> tuple[int, ...]:
    """Return how many neighbours each stage takes, so that the costliest stage costs as little as possible.

    costs: of each layer, in order. least: layers of each stage. Of equal solutions the first stages take the most.
    """
    total, count = np.array([0.0, *accumulate(costs)]), len(costs)
    assert num_stages >= 1 and num_stages * least <= count, (num_stages, least, count)
    at = np.arange(count + 1)
    # between[i, j]: cost of a stage that holds the layers from i to j.
    between = np.where(at - at[:, None] >= least, total - total[:, None], np.inf)
    # worst[i]: cost of the costliest of the last stages, which hold the layers from i on. cut[i]: where the first ends.
    worst, cuts = between[:, count], []
    for _ in range(num_stages - 1):
        values = np.maximum(between, worst)
        cuts.append((count - values[:, ::-1].argmin(axis=1)).tolist())
        worst = values.min(axis=1)
    counts, start = [], 0
    for cut in reversed(cuts):
        counts.append(cut[start] - start)
        start = cut[start]
    return (*counts, count - start)


def _backbone_slices(
    num_layers: int, num_slices: int, counts: tuple[int, ...] | None, encoder: EncoderSplit | None, first_layers: int
) -> tuple[range, ...]:
    if counts is not None:
        if len(counts) != num_slices or sum(counts) != num_layers or min(counts) < 1:
            raise ConfigError.of(
                _PARTITION,
                FaultCode.DEGREES,
                f"{_PARTITION} {list(counts)} has {sum(counts)} layers in {len(counts)} stages; the backbone has "
                f"{num_layers} layers and {num_slices} stages; give {num_slices} numbers of at least 1 whose sum is "
                f"{num_layers}, or leave out the key",
            )
        return _ranges(counts)
    if encoder is None or encoder.place == "own" or num_slices == 1:
        even = split_layers(num_layers, num_slices)
        if len(even[0]) >= first_layers:
            return even
        rest = split_layers(num_layers - first_layers, num_slices - 1)
        return _ranges([first_layers, *map(len, rest)])
    # The encoder's layers are one more, indivisible, layer before the first.
    cost = encoder.num_layers * encoder.layer_cost
    return _ranges(_balanced(0, 1.0, num_layers, num_slices, first_layers, cost))


def _balanced(
    num_encoder_layers: int,
    layer_cost: float,
    num_layers: int,
    num_slices: int,
    first_layers: int,
    extra_cost: float = 0.0,
) -> tuple[int, ...]:
    """Layers of each slice, by cost; the first decoder layers stay together, at an extra cost."""
    costs = [layer_cost] * num_encoder_layers
    costs += [extra_cost + first_layers, *([1.0] * (num_layers - first_layers))]
    counts = list(balanced_counts(costs, num_slices))
    holder = next(index for index, end in enumerate(accumulate(counts)) if end > num_encoder_layers)
    counts[holder] += first_layers - 1
    return tuple(counts)


def _mixed(
    num_layers: int,
    pp_size: int,
    num_slices: int,
    counts: tuple[int, ...] | None,
    encoder: EncoderSplit,
    first_layers: int,
) -> Partition:
    """One sequence of encoder and decoder layers; a stage with some of both is two stages, on one rank and segment."""
    whole = encoder.num_layers + num_layers
    if counts is None:
        counts = _balanced(encoder.num_layers, encoder.layer_cost, num_layers, num_slices, first_layers)
    if len(counts) != num_slices or sum(counts) != whole or min(counts) < 1:
        raise ConfigError.of(
            _PARTITION,
            FaultCode.DEGREES,
            f"{_PARTITION} {list(counts)} has {sum(counts)} layers in {len(counts)} stages; with "
            f"pipeline.encoder_layers 'mixed' the encoder's {encoder.num_layers} and the backbone's {num_layers} "
            f"layers lie in {num_slices} stages; give {num_slices} numbers of at least 1 whose sum is {whole}",
        )
    stages: list[Stage] = []
    numbers = {StageModule.ENCODER: 0, StageModule.BACKBONE: 0}
    for index, run in enumerate(_ranges(counts)):
        segment, rank = divmod(index, pp_size)
        vision = range(min(run.start, encoder.num_layers), min(run.stop, encoder.num_layers))
        decoder = range(max(run.start, encoder.num_layers), max(run.stop, encoder.num_layers))
        language = range(decoder.start - encoder.num_layers, decoder.stop - encoder.num_layers)
        # The embedding of images is before the first layer, that of tokens before the first decoder layer.
        for module, layers in ((StageModule.ENCODER, vision), (StageModule.BACKBONE, language)):
            if layers or (module is StageModule.ENCODER and index == 0):
                trained = encoder.is_trained or module is StageModule.BACKBONE
                stages.append(Stage(module, numbers[module], rank, segment, layers, trained))
                numbers[module] += 1
    return Partition(tuple(stages))


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    bounds = [0, *accumulate(counts)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
