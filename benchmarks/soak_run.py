"""A whole run for hours: whether memory, descriptors or threads of any of its processes grow.

python benchmarks/soak_run.py [--minutes N] [--kill-minutes N] [--trace-minutes N] [--seed N] [--mode MODE]
    [--keep DIRECTORY] [--json]
python benchmarks/soak_run.py --looks FILE [--json]

Trains the quickstart with two encoders and two ranks, with evaluations, answers, checkpoints, snapshots and
TensorBoard. Some steps are traced on demand every few minutes, and now and then the youngest encoder or feeder is
killed; the others must not grow by it. The last quarter of the time is compared with the second one: a process that
leaks shows it there, a cache that fills does not. Ray's own processes are shown without a target. Every process that
loads Ray has gRPC's pools of threads, which fill when the machine is busy: these may fill to their size, and no more.
The run is ended by SIGINT, and must end as a user's would. Exits with 1 if something grows, or the run fails.

--keep: the run's files and all looks stay there. --looks FILE: print the figures of such looks, and run nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from _growth import OURS, RAYS, Growth, Look, as_line, growths, look_at, of_line, worst_by_role
from _report import Figure, at_least, at_most, emit

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
MIB = 2**20
LOOK_S, START_S, END_S = 15.0, 600.0, 300.0
NO_END = 10_000_000
OVERRIDES = (
    "backbone.data_parallel_size=2",
    "backbone.num_cpus=0.5",
    "data.num_feeders=2",
    "data.eval.every_steps=200",
    "data.eval.num_generated=2",
    "data.eval.max_new_tokens=8",
    f"training.max_steps={NO_END}",
    "checkpoint.every_steps=200",
    "checkpoint.snapshot_every_steps=20",
    "limits.max_encoder_restarts=10000",
    "observability.progress=plain",
    "observability.trackers=[tensorboard]",
)
ALLOWED_NBYTES, ALLOWED_SHARE = 4 * MIB, 0.02
"""Of memory between the two quarters; the greater one. An allocator's pages come and go by this much."""
GRPC_POOL = max(4, 2 * (os.cpu_count() or 1)) + 1
"""Threads of the largest one of gRPC's pools: two a core, at least four, and one that watches them."""
EXIT_INTERRUPTED = 130


class Soaked:
    """One run: started, looked at, disturbed and ended."""

    def __init__(self, directory: Path, mode: str, seed: int) -> None:
        self._root = directory / "runs" / "soak"
        self._log = directory / "soak.log"
        self._draw = random.Random(seed)
        self._looks = directory / "looks.jsonl"
        self.looks: list[Look] = []
        self.num_kills = self.num_traces = 0
        command = [sys.executable, "-m", "flowtrain.cli.app", "train", str(QUICKSTART), "name=soak", f"mode={mode}"]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, f"runs_dir={directory / 'runs'}", *OVERRIDES],
                env=environment | {"PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def num_steps(self) -> int:
        """Steps that the run's metrics have."""
        metrics = self._root / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def watch(self, minutes: float, kill_minutes: float, trace_minutes: float) -> None:
        """Look at the run for so long from its first step on. Raises RuntimeError if it ends or does not start."""
        self._await_start()
        started = time.monotonic()
        next_kill, next_trace = started + 60.0 * kill_minutes, started + 60.0 * trace_minutes
        while (now := time.monotonic()) < started + 60.0 * minutes:
            self._check_runs()
            self._look(now - started)
            if kill_minutes and now >= next_kill:
                next_kill += 60.0 * kill_minutes
                self._kill_youngest()
            if now >= next_trace:
                next_trace += 60.0 * trace_minutes
                self._trace()
            time.sleep(LOOK_S)
        self._check_runs()

    def end(self) -> None:
        """End the run as a terminal does. Raises RuntimeError unless it ends with all its processes."""
        self._process.send_signal(signal.SIGINT)
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the run did not end within {END_S:g} s of SIGINT\n{self._end_of_log()}") from None
        if code != EXIT_INTERRUPTED:
            raise RuntimeError(f"the run ended with {code} instead of {EXIT_INTERRUPTED}\n{self._end_of_log()}")
        deadline = time.monotonic() + END_S
        while left := look_at(self._process.pid, 0.0, 0).held:
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes that outlive the run: {sorted({held.role for held in left.values()})}")
            time.sleep(0.5)

    def kill(self) -> None:
        """End whatever still runs."""
        for pid, _ in look_at(self._process.pid, 0.0, 0).held:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_S
        while self.num_steps == 0:
            self._check_runs()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no step within {START_S:g} s\n{self._end_of_log()}")
            time.sleep(0.5)

    def _look(self, at_s: float) -> None:
        look = look_at(self._process.pid, at_s, self.num_steps)
        self.looks.append(look)
        with self._looks.open("a") as file:
            file.write(as_line(look) + "\n")

    def _kill_youngest(self) -> None:
        role = self._draw.choice(("Encoder", "Feeder"))
        found = [(start, pid) for (pid, start), held in self.looks[-1].held.items() if held.role == role]
        if found:
            os.kill(max(found)[1], signal.SIGKILL)
            self.num_kills += 1

    def _trace(self) -> None:
        command = [sys.executable, "-m", "flowtrain.cli.app", "trace", str(self._root), "--steps", "5"]
        traced = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=END_S)
        if traced.returncode:
            raise RuntimeError(f"flowtrain trace failed:\n{traced.stdout}{traced.stderr}")
        self.num_traces += 1

    def _check_runs(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"the run ended with {code}\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def figures(looks: Sequence[Look]) -> Iterator[Figure]:
    """What each role's worst process holds more."""
    found = list(growths(looks))
    first, last = looks[0], looks[-1]
    yield Figure("time", (last.at_s - first.at_s) / 60.0, "min", note=f"{len(looks)} looks")
    yield Figure("steps", last.step - first.step, "steps")
    ours = worst_by_role(found, OURS)
    missing = sorted({each.role for each in last.held.values() if each.owner == OURS} - set(ours))
    note = f"none of {', '.join(missing)} lived long enough" if missing else "by a process each"
    yield at_least("roles that are judged", len(ours), "roles", len(ours) + len(missing), note)
    for role, worst in ours.items():
        yield from of_role(role, worst)
    for role, worst in worst_by_role(found, RAYS).items():
        yield Figure(f"Ray's {role}/memory", worst[0].more_nbytes / MIB, "MiB", note=note_of(worst[0]))


def of_role(role: str, worst: Sequence[Growth]) -> Iterator[Figure]:
    """Memory, descriptors and threads of a role's worst process."""
    name, most = f"{role} ({len(worst)})", max(worst, key=lambda growth: growth.more_nbytes - allowed_nbytes(growth))
    allowed = allowed_nbytes(most)
    yield at_most(f"{name}/memory", most.more_nbytes / MIB, "MiB", round(allowed / MIB, 1), note_of(most))
    yield at_most(f"{name}/descriptors", max(each.more_descriptors for each in worst), "more", 0)
    threads = max(worst, key=lambda growth: growth.more_threads)
    note = f"new: {', '.join(threads.new_threads)}" if threads.more_threads > 0 else ""
    yield at_most(f"{name}/threads", threads.more_threads, "more", 0, note)
    if (more := max(growth.more_pooled for growth in worst)) > 0:
        fullest = max(growth.most_pooled for growth in worst)
        yield at_most(f"{name}/threads of a gRPC pool", fullest, "threads", GRPC_POOL, f"{more:+g}")


def allowed_nbytes(growth: Growth) -> float:
    """Bytes that a process may hold more."""
    return max(ALLOWED_NBYTES, ALLOWED_SHARE * growth.start_nbytes)


def note_of(growth: Growth) -> str:
    """The size of a process, and its growth by step."""
    return f"of {growth.start_nbytes / MIB:.0f} MiB; {growth.nbytes_a_step:.0f} bytes a step"


def show(looks: Sequence[Look], as_json: bool) -> int:
    """Print the figures; returns 1 if something grows."""
    found = list(figures(looks))
    emit("soak_run", found, as_json)
    return int(any(figure.met is False for figure in found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--kill-minutes", type=float, default=5.0, help="between two kills; 0: none")
    parser.add_argument("--trace-minutes", type=float, default=5.0, help="between two traces on demand")
    parser.add_argument("--mode", choices=("decoupled", "colocated", "monolithic"), default="decoupled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY")
    parser.add_argument("--looks", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.looks:
        return show(list(map(of_line, options.looks.read_text().splitlines())), options.json)
    with tempfile.TemporaryDirectory(prefix="ft-soak-") as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        soaked = Soaked(directory, options.mode, options.seed)
        try:
            soaked.watch(options.minutes, options.kill_minutes, options.trace_minutes)
            soaked.end()
        except RuntimeError as error:
            print(f"soak_run: {error}", file=sys.stderr)
            return 1
        finally:
            soaked.kill()
        print(f"{soaked.num_kills} kills, {soaked.num_traces} traces on demand", file=sys.stderr)
        return show(soaked.looks, options.json)


if __name__ == "__main__":
    sys.exit(main())
