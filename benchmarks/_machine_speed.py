"""How fast this machine is while something runs on it: others on the same host may slow it down, and no load shows it.

A process of its own does a fixed piece of work on each core in turn, about one percent of the time, and takes its
processor seconds. They do not grow when our own work keeps the core busy, only when core or memory are slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Self

PAUSE_S = 0.25
SIZE, NUMBERS, PRODUCTS = 192, 1 << 19, 12


def work_again_and_again() -> None:
    """Print the processor seconds of each piece of work until the process is ended."""
    import numpy as np

    cores = sorted(os.sched_getaffinity(0))
    generator = np.random.default_rng(0)
    left, right = generator.random((2, SIZE, SIZE), dtype=np.float32)
    numbers = generator.random(NUMBERS, dtype=np.float32)
    turn, parent = 0, os.getppid()
    while os.getppid() == parent:
        os.sched_setaffinity(0, {cores[turn % len(cores)]})
        turn += 1
        started_s = time.thread_time()
        for _ in range(PRODUCTS):
            left @ right
        np.multiply(numbers, 1.0001, out=numbers)
        print(f"{time.thread_time() - started_s:.6f}", flush=True)
        time.sleep(PAUSE_S)


class SpeedProbe:
    """Watches while its context is open."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        output, _ = self._process.communicate(timeout=30)
        complete = output[: output.rfind("\n") + 1]
        self._seconds = [float(line) for line in complete.splitlines()]

    @property
    def seconds(self) -> float:
        """Median processor seconds of the work. Raises RuntimeError if the context was too short for any."""
        if not self._seconds:
            raise RuntimeError("the probe of the machine's speed measured nothing")
        return median(self._seconds)


if __name__ == "__main__":
    work_again_and_again()
