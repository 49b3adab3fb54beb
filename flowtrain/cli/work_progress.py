"""Progress of a command on standard error: bars on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

PLAIN_INTERVAL_S = 5.0


@contextmanager
def work_progress(plain_lines: bool = False, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Show one bar for each kind of work; without a terminal nothing, or with ``plain_lines`` a line now and then."""
    if not sys.stderr.isatty():
        yield _plain_lines(clock) if plain_lines else lambda what, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield update


def _plain_lines(clock: Callable[[], float]) -> OnProgress:
    last_s = clock()

    def update(what: str, done: int, total: int) -> None:
        nonlocal last_s
        if clock() - last_s >= PLAIN_INTERVAL_S:
            last_s = clock()
            print(f"{what}: {done:,} of {total:,}" if total > 1 else what, file=sys.stderr)

    return update
