"""What an actor does now, so that one that hangs can be named."""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path

from flowtrain.observability.files import PRIVATE_DIRECTORY, open_private
from flowtrain.types.whereabouts import START, Whereabouts


class Diary:
    """Notes each thing that a working thread begins. Any thread may read it.

    A note costs less than a microsecond: text is made when it is read.
    """

    def __init__(self) -> None:
        self._unit, self._step, self._place = -1, 0, 0
        self._now: tuple[object, bool, float] = (START, False, time.monotonic())

    def begin_unit(self, unit: int, step: int) -> None:
        """Note a unit; what follows is counted from its start."""
        self._unit, self._step, self._place = unit, step, 0

    def begin(self, what: object, may_last: bool = False) -> None:
        """Note what begins; ``str(what)`` says it."""
        self._place += 1
        self._now = what, may_last, time.monotonic()

    def read(self) -> Whereabouts:
        """Return the last note."""
        what, may_last, since_s = self._now
        for_s = time.monotonic() - since_s
        return Whereabouts(self._unit, self._step, self._place, str(what), for_s, may_last, os.getpid())


def longest(first: Whereabouts, second: Whereabouts) -> Whereabouts:
    """Return what of two threads to look at: work before waits that may last, then what has taken longer."""
    return max(first, second, key=lambda each: (not each.may_last, each.for_s))


def dump_stacks(path: Path) -> None:
    """Write what all threads of this process are in; the file is readable by its owner alone."""
    path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
