"""What it costs to watch a run: CPU seconds of the quickstart with everything on against everything off.

python benchmarks/observability.py [--pairs N] [--steps N] [--keep FILE] [--json]

A pair is two runs of `flowtrain train configs/quickstart.yaml` at the same time, each on a core of its own, and the
next pair swaps the cores: a machine whose speed changes by 3 % from one minute to the next changes both alike. On:
every step is traced, TensorBoard follows, Ray gets its metrics, there are lines of progress, and at the end the report
with its pictures. Off: none of that. CPU seconds are those of all processes of a run, Ray's too, from the command to
the end of the last of them.
With --keep, pairs are kept in a file and a further call goes on, as long as the code and the machine stay the same.
Ray's own dashboard runs in both, as it does by default. Needs tensorboardX (`pip install '.[tensorboard]'`).
Exits with 1 if a run fails, if what is on has left nothing, or if two runs have different losses.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, stdev

from _cpu_of_run import cpu_seconds
from _end_to_end_store import code_version
from _pinned import stay_on
from _report import Figure, at_most, emit, machine

from flowtrain.config.load import load_config
from flowtrain.observability.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TARGET = 0.01
ON = (
    "observability.trackers=[tensorboard]",
    "observability.report=true",
    "observability.report_thumbnails=true",
    "observability.ray_metrics=true",
    "observability.progress=plain",
)
OFF = (
    "observability.trackers=[]",
    "observability.trace.steps=0",
    "observability.report=false",
    "observability.ray_metrics=false",
    "observability.progress=off",
)


@dataclass(frozen=True)
class Watched:
    """A run: its CPU seconds by role, its median step time in seconds, and the losses of its steps."""

    cpu_s: dict[str, float]
    step_s: float
    losses: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class Pair:
    """What counts of two runs, in seconds; CPU seconds are by role."""

    on_cpu_s: dict[str, float]
    off_cpu_s: dict[str, float]
    on_step_s: float
    off_step_s: float

    @property
    def cost(self) -> float:
        """CPU seconds on over those off, minus 1."""
        return _cost(sum(self.on_cpu_s.values()), sum(self.off_cpu_s.values()))


class Kept:
    """Pairs of one version of the code, one machine and so many steps; in a file if there is one."""

    def __init__(self, file: Path | None, steps: int) -> None:
        found = machine()
        self._file = file
        self._version = code_version(str(found["cpu"]), f"{found['cores']} cores", f"{steps} steps", "at once")
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        records = map(json.loads, lines)
        self.pairs = [Pair(**record["pair"]) for record in records if record["version"] == self._version]

    def add(self, pair: Pair) -> None:
        """Keep a pair."""
        self.pairs.append(pair)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps({"version": self._version, "pair": asdict(pair)}) + "\n")


def run(name: str, overrides: tuple[str, ...], steps: int, directory: Path, core: int) -> Watched:
    """Train the quickstart on one core. Raises RuntimeError if that fails."""
    stay_on(core)
    values = [f"name={name}", f"runs_dir={directory}", f"training.max_steps={steps}", *overrides]
    command = [sys.executable, "-m", "flowtrain.cli.app", "train", str(QUICKSTART), *values]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    cpu_s = cpu_seconds(command, environment, ROOT, directory / f"{name}.log")
    lines = list(read_metrics(directory / name / "metrics.jsonl"))
    losses = tuple((line["loss"], line["eval_loss"]) for line in lines)
    return Watched(cpu_s, median(line["step_time_s"] for line in lines), losses)


def check_shown(root: Path) -> None:
    """Exit if a run with everything on has left nothing of a part."""
    files = [root / "report.html", *(root / "tensorboard").glob("events.*")]
    if len(files) < 2 or not all(file.is_file() and file.stat().st_size > 1000 for file in files):
        sys.exit(f"{root}: report.html or TensorBoard's files are missing, so not everything was on")
    if (root / "trace.json").stat().st_size < 10_000:
        sys.exit(f"{root}: trace.json has no steps, so not everything was on")


def measure_pair(number: int, steps: int, directory: Path) -> Pair:
    """Run with everything on beside everything off; in odd pairs the cores are swapped."""
    sides = {"on": (*ON, f"observability.trace.steps={steps}"), "off": OFF}
    # Processes of their own, each of which counts what it starts.
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as both:
        waiting = {
            name: both.submit(run, f"{name}-{number}", overrides, steps, directory, (index + number) % 2)
            for index, (name, overrides) in enumerate(sides.items())
        }
        try:
            found = {name: future.result() for name, future in waiting.items()}
        except RuntimeError as error:
            sys.exit(str(error))
    check_shown(directory / f"on-{number}")
    for name in sides:
        shutil.rmtree(directory / f"{name}-{number}")
    on, off = found["on"], found["off"]
    if on.losses != off.losses:
        sys.exit(f"pair {number}: the losses with everything on are other ones than with everything off")
    pair = Pair(on.cpu_s, off.cpu_s, on.step_s, off.step_s)
    sums = sum(on.cpu_s.values()), sum(off.cpu_s.values())
    print(f"pair {number}: {sums[0]:.1f} and {sums[1]:.1f} CPU seconds, {pair.cost:+.2%}", file=sys.stderr, flush=True)
    return pair


def by_role(pairs: list[Pair]) -> Iterator[Figure]:
    """Yield what watching costs each kind of process."""
    for role in sorted({role for pair in pairs for role in pair.on_cpu_s}):
        more = [pair.on_cpu_s.get(role, 0.0) - pair.off_cpu_s.get(role, 0.0) for pair in pairs]
        off = median(pair.off_cpu_s.get(role, 0.0) for pair in pairs)
        error = stdev(more) / sqrt(len(more)) if len(more) > 1 else 0.0
        note = f"on - off, mean; off {off:.1f}; standard error {error:.2f}"
        yield Figure(f"cpu_more.{role}", fmean(more), "CPU s", note=note)


def _cost(on: float, off: float) -> float:
    return on / off - 1.0


def _spread(values: list[float]) -> str:
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{min(values):+.4f} to {max(values):+.4f} in {len(values)} pairs, standard error {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, help="of each run, instead of the quickstart's own")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep pairs there, and go on after those that it has")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps = args.steps or load_config(QUICKSTART).training.max_steps
    assert steps is not None
    with tempfile.TemporaryDirectory(prefix="ft-watched-") as directory:
        kept = Kept(args.keep, steps)
        for number in range(len(kept.pairs), args.pairs):
            kept.add(measure_pair(number, steps, Path(directory)))
    pairs = kept.pairs
    costs = [pair.cost for pair in pairs]
    delays = [_cost(pair.on_step_s, pair.off_step_s) for pair in pairs]
    load = f"{steps} steps, load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    figures = [
        at_most("cpu_cost", median(costs), "1", TARGET, f"on / off - 1; {_spread(costs)}"),
        Figure("cpu_on", median(sum(pair.on_cpu_s.values()) for pair in pairs), "CPU s", note=f"all processes; {load}"),
        Figure("cpu_off", median(sum(pair.off_cpu_s.values()) for pair in pairs), "CPU s"),
        *by_role(pairs),
        Figure("step_time_cost", median(delays), "1", note=f"of the median step, on / off - 1; {_spread(delays)}"),
    ]
    emit("observability", figures, args.json)


if __name__ == "__main__":
    main()
