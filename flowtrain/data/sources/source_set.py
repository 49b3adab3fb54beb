"""All sources of a run under one index: the training mixture first, the evaluation source last."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.config.data import DataConfig, EvalConfig, SourceConfig
from flowtrain.data.sources.base import RawSample, Source
from flowtrain.data.sources.registry import open_sources
from flowtrain.types.samples import SampleRef


class SourceSet:
    """The training sources by index, then the evaluation source, if there is one."""

    def __init__(self, train: Sequence[Source], evaluation: Source | None = None) -> None:
        self.train = tuple(train)
        self.evaluation = evaluation

    @classmethod
    def from_config(cls, config: DataConfig) -> SourceSet:
        """Open the sources of the configuration; raises DataError if a source cannot be used."""
        configs: list[SourceConfig | EvalConfig] = [*config.sources]
        if config.eval is None:
            return cls(open_sources(configs))
        *train, evaluation = open_sources([*configs, config.eval])
        return cls(train, evaluation)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each training source."""
        return tuple(len(source) for source in self.train)

    @property
    def eval_index(self) -> int:
        """The value of ``SampleRef.source`` for rows of the evaluation source."""
        return len(self.train)

    def source(self, index: int) -> Source:
        """Return the source for a value of ``SampleRef.source``."""
        if index < len(self.train):
            return self.train[index]
        assert index == self.eval_index and self.evaluation is not None, f"there is no source {index}"
        return self.evaluation

    def read(self, ref: SampleRef) -> RawSample:
        """Return a sample; raises BadSample if it must be rejected, SourceReadError if it cannot be read."""
        return self.source(ref.source).read(ref.row)
