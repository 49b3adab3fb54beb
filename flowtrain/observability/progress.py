"""Shows the progress of a run: a live display on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.status import Status
from rich.table import Table

from flowtrain.observability.callback import Callback
from flowtrain.observability.diagnostics import Diagnostic
from flowtrain.types.memory import Tier
from flowtrain.types.metrics import StepMetrics
from flowtrain.types.run_events import Noted, RunStarted, StepFinished

logger = logging.getLogger(__name__)

_PLAIN_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class ProgressState:
    """The values that the display shows after a step."""

    metrics: StepMetrics
    pool_bound_nbytes: int
    """Bound DRAM of all segments together."""
    num_encoders: int = 1
    """Encoder replicas that ``blocked_s`` sums over; 0 in modes without encoder actors, where it is not shown."""

    @property
    def starved_share(self) -> float:
        """Share of the step that the backbone waited for data, 0 to 1."""
        return _share(self.metrics.starved_s, self.metrics.step_time_s)

    @property
    def blocked_share(self) -> float:
        """Share of the step that an encoder had nothing to encode, mean over encoders, 0 to 1."""
        return _share(self.metrics.blocked_s, self.metrics.step_time_s * self.num_encoders)

    @property
    def pool_share(self) -> float:
        """Share of the pool's DRAM that is in use, 0 to 1; near 1, producers wait for free memory."""
        return _share(self.metrics.pool_dram_nbytes, self.pool_bound_nbytes)


class ProgressDisplay(Callback):
    """Shows the phases of a run before its first step, then its progress; a context manager.

    If the stream breaks, the display is off and its notes go to the log.

    mode: ``auto`` (live on a terminal, otherwise plain), ``plain`` or ``off``.
    total_steps, first_step: as in ``expect``, which sets them once they are known.
    stream: standard error by default, so that output can be piped.
    """

    def __init__(
        self,
        mode: Literal["auto", "plain", "off"],
        total_steps: int = 0,
        first_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = _Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._total, self._first_step, self._clock = total_steps, first_step, clock
        self._first: tuple[int, float] | None = None
        self._last_line_s: float | None = None
        self._off = mode == "off"
        self._eval_loss: float | None = None
        self._pending: str | None = None
        self._is_live = mode == "auto" and self._console.is_terminal
        self._status: Status | None = None
        self._output = Diagnostic("the progress display")
        self._live: _LiveView | None = None
        self._num_encoders = 1

    def expect(self, total_steps: int, first_step: int = 0) -> None:
        """Set the run's number of steps, and the number that were done before a resume."""
        self._total, self._first_step = total_steps, first_step

    def phase(self, text: str) -> None:
        """Show a phase before the first step: next to a spinner on a terminal, otherwise as a line."""
        if not self._off:
            self._output.attempt(self._show_phase, text)

    def _show_phase(self, text: str) -> None:
        if not self._is_live:
            self._say(f"{text} ...")
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def on_run_start(self, event: RunStarted) -> None:
        """Note how many encoders there are."""
        self._num_encoders = event.roles.get("encoder", 0)

    def on_step(self, event: StepFinished) -> None:
        """Show a finished step."""
        bound = sum(use.bound_nbytes for use in event.metrics.pool if use.tier == Tier.DRAM.value)
        self.update(ProgressState(event.metrics, bound, self._num_encoders))

    def on_note(self, event: Noted) -> None:
        """Show a note."""
        self.note(event.text)

    def update(self, state: ProgressState) -> None:
        """Show a finished step."""
        if state.metrics.eval_loss is not None:
            self._eval_loss = state.metrics.eval_loss
        if not self._off:
            self._output.attempt(self._show_step, state)

    def _show_step(self, state: ProgressState) -> None:
        eta = self._eta(state.metrics.step)
        if self._is_live:
            self._end_status()
            self._live = self._live or _LiveView(self._console, self._total, self._first_step)
            self._live.show(state, eta, self._eval_loss)
            return
        now = self._clock()
        line = _plain_line(state, self._total, eta)
        due = self._last_line_s is None or now - self._last_line_s >= _PLAIN_INTERVAL_S
        if due or state.metrics.step >= self._total or state.metrics.eval_loss is not None:
            self._last_line_s = now
            self._pending = None
            self._say(line)
        else:
            self._pending = line

    def note(self, text: str) -> None:
        """Print a note (a resume, a restarted encoder, a warning) next to the display, in every mode."""
        if self._output.is_on:
            self._output.attempt(self._say, text)
        else:
            logger.warning("%s", text)

    def close(self) -> None:
        """End the display; a last step that was not shown yet is printed. Idempotent."""
        self._output.close(self._end)

    def _end(self) -> None:
        self._end_status()
        if self._live:
            self._live.stop()
        if self._pending:
            self._say(self._pending)
            self._pending = None

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _eta(self, step: int) -> str:
        """Time left at the pace since the first finished step, so that the start of the run does not count."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        first_step, first_s = self._first
        if step <= first_step:
            return "-"
        return _duration((now - first_s) / (step - first_step) * max(self._total - step, 0))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process where the reader of its output is gone."""
        raise BrokenPipeError("nobody reads it any more")


class _LiveView:
    """The terminal display: a bar above a row of figures."""

    def __init__(self, console: Console, total_steps: int, first_step: int) -> None:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("ETA {task.fields[eta]}"),
        )
        self._bar = Progress(*columns, console=console, expand=True)
        self._task = self._bar.add_task("steps", total=total_steps, completed=first_step, eta="-")
        self._live = Live(self._bar, console=console, refresh_per_second=4)
        self._live.start()

    def show(self, state: ProgressState, eta: str, eval_loss: float | None) -> None:
        """Redraw."""
        self._bar.update(self._task, completed=state.metrics.step, eta=eta)
        grid = Table.grid(expand=True)
        grid.add_row(self._bar)
        grid.add_row("  ".join(_figures(state, eval_loss)))
        self._live.update(grid)

    def stop(self) -> None:
        """Leave the last frame on the screen."""
        self._live.stop()


def _plain_line(state: ProgressState, total_steps: int, eta: str) -> str:
    head = f"step {state.metrics.step}/{total_steps}  ETA {eta}"
    return "  ".join([head, *_figures(state, state.metrics.eval_loss)])


def _figures(state: ProgressState, eval_loss: float | None) -> list[str]:
    metrics = state.metrics
    return [
        *([metrics.emulated] if metrics.emulated else []),
        f"loss {metrics.loss:.4f}",
        *([f"eval {eval_loss:.4f}"] if eval_loss is not None else []),
        f"{metrics.tokens_per_s:,.0f} tokens/s",
        f"pool {state.pool_share:.0%}",
        f"starved {state.starved_share:.0%}",
        *([f"blocked {state.blocked_share:.0%}"] if state.num_encoders else []),
        f"quarantined {metrics.rejected}",
        *([f"skipped {metrics.skipped_steps}"] if metrics.skipped_steps else []),
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
