"""The traces that a run writes: ``trace.json`` of its first steps, and the windows that somebody asked for."""

from __future__ import annotations

from pathlib import Path

from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.observability.files import PRIVATE_DIRECTORY
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.trace import TraceWriter
from flowtrain.observability.trace_request import take_request
from flowtrain.types.events import Event, SpansRecorded, UnitDone
from flowtrain.types.plan import UnitKind
from flowtrain.types.tracing import TraceSteps


class _TraceFile:
    """One trace. Its first error is logged, and from then on it is off."""

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        self.last_step = last_step
        self.has_spans = False
        """Whether a span was to be written."""
        self._diagnostic = Diagnostic(path.name)
        self._writer: TraceWriter | None = None
        self._diagnostic.attempt(self._open, path)

    def _open(self, path: Path) -> None:
        self._writer = TraceWriter(path)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing so far."""
        return self._writer is not None and self._diagnostic.is_on

    def take(self, event: SpansRecorded) -> None:
        """Write an event."""
        self.has_spans = self.has_spans or bool(event.spans)
        if self._writer is not None:
            self._diagnostic.attempt(self._writer.write, event.spans, event.counters)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._writer is not None:
            self._diagnostic.close(self._writer.close)


class RunTraces:
    """Writes the spans and counters of a run into the traces that cover them.

    num_done: steps done before this start. num_steps: that ``trace.json`` covers.
    """

    def __init__(self, files: RunDir, num_done: int, num_steps: int) -> None:
        self._files = files
        self._first: _TraceFile | None = _TraceFile(files.trace, num_done + num_steps)
        self._window: _TraceFile | None = None
        self.lacks_something = False
        """Whether the window that was closed last could not be written to its end."""
        self._step_done(num_done)
        take_request(files)  # one that an earlier run did not see

    @property
    def has_window(self) -> bool:
        """Whether a window is open."""
        return self._window is not None

    @property
    def num_done(self) -> int:
        """The last step that was finished."""
        return self._num_done

    @property
    def last_step(self) -> int:
        """The last step that an open trace covers; 0: none is open."""
        return max((trace.last_step for trace in (self._first, self._window) if trace is not None), default=0)

    def take(self, event: Event) -> None:
        """Write spans and counters, and close the traces whose last step is done; its spans come before that."""
        if isinstance(event, SpansRecorded):
            for trace in (self._first, self._window):
                if trace is not None:
                    trace.take(event)
        elif isinstance(event, UnitDone) and event.unit.kind is UnitKind.TRAIN:
            self._step_done(event.unit.step)

    def _step_done(self, step: int) -> None:
        self._num_done = step
        if self._first is not None and step >= self._first.last_step:
            self._first.close()
            self._first = None
        if self._window is not None and step >= self._window.last_step:
            self.close_window()

    def open_window(self, steps: TraceSteps) -> Path:
        """Open a window with a directory of its own; returns that. Raises OSError if it cannot be created."""
        assert self._window is None
        directory = self._new_directory(f"steps-{steps.first}-{steps.last}")
        self._window = _TraceFile(directory / "trace.json", steps.last)
        return directory

    def close_window(self) -> None:
        """Close the window, if one is open."""
        if self._window is not None:
            self.lacks_something = not self._window.is_whole
            self._window.close()
            self._window = None

    def drop_window(self) -> bool:
        """Close the window, and remove its directory if nothing was recorded; returns whether that was removed."""
        window = self._window
        self.close_window()
        if window is None or window.has_spans:
            return False
        directory = window.path.parent
        try:
            if any(path != window.path for path in directory.iterdir()):  # actors have written files of their own
                return False
            window.path.unlink(missing_ok=True)
            directory.rmdir()
        except OSError:  # an empty directory does no harm
            return False
        return True

    def close(self) -> None:
        """Close all files; idempotent."""
        if self._first is not None:
            self._first.close()
        self.close_window()

    def _new_directory(self, name: str) -> Path:
        """Make a directory of this name; a resumed run may have one of the same steps already."""
        parent = self._files.windows
        parent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        number = 1
        while True:
            directory = parent / (name if number == 1 else f"{name}-{number}")
            try:
                directory.mkdir(mode=PRIVATE_DIRECTORY)
                return directory
            except FileExistsError:
                number += 1
