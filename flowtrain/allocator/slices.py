"""How each pipeline degree cuts the backbone's layers, for the planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flowtrain.config.run import RunConfig
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.partition import Partition, build_partition


@dataclass(frozen=True, slots=True)
class Slices:
    """The keys of the configuration that decide it."""

    chunks: int = 1
    """``pipeline.chunks``."""
    counts: tuple[int, ...] | None = None
    """The numbers of ``pipeline.partition``; for the pipeline degree that it has stages for, all others are balanced.
    Words of that key count as balanced: a run finds their numbers at its start."""
    counts_encoder: bool = False
    """``counts`` include the encoder's layers (``pipeline.encoder_layers: mixed`` in mode ``monolithic``)."""
    first_layers: int = 1
    """The first decoder layers that must lie in one stage; decided by the model."""

    @classmethod
    def of(cls, config: RunConfig, first_layers: int = 1) -> Slices:
        """Return those of a configuration. first_layers: ``TransformerSpec.first_layers`` of its backbone."""
        pipeline = config.pipeline
        mixed = config.mode == "monolithic" and pipeline.encoder_layers == "mixed"
        return cls(pipeline.chunks, pipeline.counts, mixed and pipeline.counts is not None, first_layers)

    def counts_for(self, pp: int) -> tuple[int, ...] | None:
        """Return the given numbers of layers if they are for this pipeline degree."""
        return self.counts if self.counts is not None and len(self.counts) == pp * self.chunks else None

    def partition(self, num_layers: int, pp: int) -> Partition:
        """Return the partition over so many pipeline ranks; ConfigError if the given one has other layers.

        Without an encoder; balanced if ``counts`` includes one.
        """
        counts = None if self.counts_encoder else self.counts_for(pp)
        return build_partition(num_layers, pp, self.chunks, counts=counts, first_layers=self.first_layers)

    def most_ranks(self, num_layers: int) -> int:
        """Return the largest pipeline degree."""
        return (num_layers - self.first_layers + 1) // self.chunks


ONE_EACH = Slices()
"""One balanced slice for each rank."""


@lru_cache(maxsize=4096)
def chunks_of_ranks(slices: Slices, num_layers: int, pp: int) -> tuple[tuple[range, ...], ...]:
    """Return the decoder layers of each chunk of each pipeline rank."""
    ranks: list[list[range]] = [[] for _ in range(pp)]
    for stage in slices.partition(num_layers, pp).of_module(StageModule.BACKBONE):
        ranks[stage.rank].append(stage.layers)
    return tuple(map(tuple, ranks))


@lru_cache(maxsize=4096)
def layers_of_ranks(slices: Slices, num_layers: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the decoder layers of each pipeline rank."""
    ranks = chunks_of_ranks(slices, num_layers, pp)
    return tuple(tuple(layer for chunk in chunks for layer in chunk) for chunks in ranks)
