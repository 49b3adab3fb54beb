"""``skipped_samples.jsonl``: the samples of each step that made no update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flowtrain.observability.metrics import StepLines

SKIPPED_SCHEMA = 2
"""Of a line. In lines of schema 1 ``loss`` is a sum over target tokens."""


class SkippedWriter(StepLines):
    """Writes one line per sample of a step whose loss or gradients were not finite, or whose loss was a spike."""

    def write(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append the samples of a step; raises OSError if one cannot be written now. All are then written later."""
        problem: OSError | None = None
        for sample in samples:
            try:
                self._lines.append({"schema": SKIPPED_SCHEMA, **sample})
            except OSError as error:  # the line waits in memory
                problem = error
        if problem is not None:
            raise problem
