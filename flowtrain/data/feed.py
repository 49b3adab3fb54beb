"""Draws and sizes the samples of units; the feeder actor wraps this."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import IntArray
from flowtrain.data.sampler import Sampler
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import BadSample
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError
from flowtrain.models.families.registry import family_from_config
from flowtrain.types.plan import Unit, UnitKind
from flowtrain.types.samples import Rejection, SampleRef, SamplerState


class Feed:
    """Draws and sizes the samples of one unit after another. Not thread-safe."""

    def __init__(self, sources: SourceSet, sampler: Sampler, sizer: Sizer) -> None:
        self._sources = sources
        self._sampler = sampler
        self._sizer = sizer

    @classmethod
    def from_config(cls, config: RunConfig) -> Feed:
        """Open the sources and the tokenizer; raises ConfigError or DataError if one of them cannot be used."""
        sources = SourceSet.from_config(config.data)
        family = family_from_config(config)
        tables = [np.array([0, size]) for size in sources.sizes]
        return cls(sources, sampler_from_config(config, tables), Sizer(family, family.tokenizer, config.data))

    def next_unit(self, unit: Unit, consumed: Collection[int] = ()) -> list[SizedResult | Rejection]:
        """Return the unit's samples, sized or rejected, in the order of their positions.

        Training units must come in the order of their positions; an evaluation reads the first rows of its source.
        consumed: positions to draw without sizing them. Raises SourceReadError if a source cannot be read.
        """
        return [self._size(ref) for ref in self._refs(unit) if ref.position not in consumed]

    def resize(self, ref: SampleRef) -> SizedResult:
        """Size a sample again after its text part was lost with its segment; the result equals the first one.

        Raises DataError if the sample is rejected now, SourceReadError if it cannot be read.
        """
        result = self._size(ref)
        if isinstance(result, Rejection):
            name = self._sources.source(ref.source).name
            raise DataError(
                f"position {ref.position} (row {ref.row} of {name}) was sized once and is rejected now "
                f"({result.reason.value}: {result.detail}); do not change the data during a run"
            )
        return result

    def state(self) -> SamplerState:
        """Return the sampler's state after the last drawn unit (the backbone trains it later)."""
        return self._sampler.state()

    def restore(self, state: SamplerState) -> None:
        """Continue from a state; raises CheckpointError if it comes from other data or another seed."""
        self._sampler.restore(state)

    def _refs(self, unit: Unit) -> list[SampleRef]:
        if unit.kind is UnitKind.EVAL:
            index = self._sources.eval_index
            return [SampleRef(position, index, row, 0) for row, position in enumerate(unit.positions)]
        refs = [draw.ref for draw in self._sampler.take(unit.num_positions)]
        assert refs[0].position == unit.first_position, (
            f"unit {unit.index} starts at position {unit.first_position}, but the sampler was at {refs[0].position}"
        )
        return refs

    def _size(self, ref: SampleRef) -> SizedResult | Rejection:
        try:
            raw = self._sources.read(ref)
        except BadSample as error:
            return Rejection(ref, error.reason, error.detail)
        return self._sizer.size(ref, raw)


def sampler_from_config(config: RunConfig, first_rows: Sequence[IntArray]) -> Sampler:
    """Build the run's sampler at its first position.

    first_rows: of each of ``data.sources`` ``[num_blocks + 1]``, the first row of each block and the number of rows.
    """
    weights = [source.weight for source in config.data.sources]
    return Sampler(first_rows, weights, config.seed, config.data.shuffle, config.data.shuffle_blocks)
