"""``trace.json`` of a run, which training does not need."""

from __future__ import annotations

from pathlib import Path

from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.trace import TraceWriter
from flowtrain.types.events import SpansRecorded


class TraceFile:
    """Writes the spans of actors; an error switches it off."""

    def __init__(self, path: Path) -> None:
        self._output = Diagnostic(path.name)
        self._writer: TraceWriter | None = None
        self._output.attempt(self._open, path)

    def take(self, event: SpansRecorded) -> None:
        """Write spans."""
        if self._writer is not None:
            self._output.attempt(self._writer.write, event.spans)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._writer is not None:
            self._output.close(self._writer.close)

    def _open(self, path: Path) -> None:
        self._writer = TraceWriter(path)
