"""Kill and stop the processes of small runs at random, and audit from outside that nothing was lost.

python scripts/fault_campaign.py DIRECTORY [--faults N] [--seed N] [--roles ROLE ...] [--json]

Each run trains the same tiny model on the same data, with bad samples, evaluations and checkpoints, while some of its
processes are killed (SIGKILL) or stopped (SIGSTOP): encoders, feeders, backbone ranks, the coordinator, the keeper of
snapshots, the raylet, the driver; at their start, in steps, evaluations, checkpoints and recoveries
(``fault_draws.py``). Every other run takes snapshots. A run that ends is resumed by one command until it is done. Then
its losses must equal those of the undisturbed run to the bit, the ledger must have every position once, and no process,
shared memory or temporary file may be left. Faults are drawn from the seed and the number of the run alone, so a
campaign that was stopped goes on where it was: DIRECTORY/faults.jsonl has what was done.

Prints how long it took, by role and kind of fault, until the run noticed and until it trained again. Exits with 1 if an
audit fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fault_draws import ROLES, Planned, planned_faults

from flowtrain.config.run import RunConfig
from flowtrain.observability.run_dir import RunDir, run_dir
from tests.e2e.disturbed import (
    EVERY_EVAL,
    NUM_STEPS,
    check_same_end,
    config_of,
    eval_world,
    json_lines,
    run_undisturbed,
    spoiled_world,
)
from tests.e2e.processes import ORPHAN_LIMIT_S, Driver, Process, driver

TITLES = {
    "encoder": ("ray::Encoder",),
    "feeder": ("ray::Feeder",),
    "backbone": ("ray::BackboneRank",),
    "coordinator": ("ray::Coordinator",),
    "keeper": ("ray::SnapshotKeeper",),
    "raylet": ("raylet/raylet",),
    "driver": (),
}
"""What the command lines of a role's processes contain. The driver is known by its number."""
KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RECOVERS = re.compile(r"(backbone|actors) starts? again|is started again|is killed, started again")
"""What a run says when it has noticed a fault."""
MAX_STARTS = 8
LIMITS = (
    "limits.collective_timeout_s=15",
    "limits.coordinator_timeout_s=15",
    "limits.lease_timeout_s=10",
    "limits.stall_timeout_s=60",
    "limits.start_timeout_s=45",
    "limits.stop_timeout_s=20",
)
"""So that a stopped process is noticed soon."""
NOTICE_S, RUN_S = 240.0, 420.0
HEADINGS = ("role", "fault", "number", "what the run did", "noticed s (most)", "trained again s (most)", "steps again")
EVERY_SNAPSHOT = 1


@dataclass
class Suffered:
    """A fault that a run has suffered. noticed_s, recovered_s: since it; None: it never mattered.

    how: what the run did. steps_again: steps that were done twice; None: that was not recorded.
    """

    run: int
    role: str
    kind: str
    phase: str
    step: int
    how: str
    noticed_s: float | None = None
    recovered_s: float | None = None
    steps_again: int | None = 0


class AuditFailed(Exception):
    """A run has lost or repeated something, or left processes or memory."""


def command_line(process: Process) -> str:
    """Of a process, or nothing if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def victims(of: Driver, role: str) -> list[int]:
    """Processes of a role, by number."""
    if role == "driver":
        return [of.pid]
    named = ((process.pid, command_line(process)) for process in of.session())
    return sorted(pid for pid, line in named if any(title in line for title in TITLES[role]))


def check_left(running: Driver, code: int) -> None:
    """No process of a run that ended, and no memory, is left. Ray's agents may outlive a killed driver for minutes."""
    if code >= 0:
        running.check_nothing_is_left()
        return
    deadline_s = time.monotonic() + ORPHAN_LIMIT_S
    titles = [title for role in ("encoder", "feeder", "backbone", "coordinator", "keeper") for title in TITLES[role]]

    def actors() -> list[str]:
        lines = (command_line(process) for process in running.session())
        return [line for line in lines if any(title in line for title in titles)]

    while (left := actors()) or running.memory_left():
        if time.monotonic() > deadline_s:
            raise AuditFailed(running.report(f"processes and memory that are left: {left}, {running.memory_left()}"))
        time.sleep(0.1)


class CampaignRun:
    """One run of the campaign, through all its faults and starts."""

    def __init__(self, number: int, config: RunConfig, directory: Path, faults: list[Planned]) -> None:
        self._number, self._config, self._directory = number, config, directory
        self._faults = faults
        self._files: RunDir = run_dir(config)
        self.suffered: list[Suffered] = []
        self._rng = random.Random(f"victims/{number}")

    def complete(self) -> None:
        """Start and resume the run until it is done. Raises AuditFailed if that takes too many starts."""
        for start in range(MAX_STARTS):
            arguments = ["--resume"] if start else []
            with driver(self._config, self._directory / f"run-{self._number}-{start}.log", *arguments) as running:
                code = self._disturb(running)
                check_left(running, code)
            if code == 0:
                for each in self._open:
                    each.how = "went on without it"
                return
            self._note_end(time.monotonic())
        raise AuditFailed(f"run {self._number} was not done after {MAX_STARTS} starts")

    def _disturb(self, running: Driver) -> int:
        """Do what is planned while the run goes on; returns its exit code."""
        begun_s = time.monotonic()
        seen = len(self._restarts())
        while (code := running.poll()) is None:
            if time.monotonic() - begun_s > RUN_S:
                raise AuditFailed(running.report(f"run {self._number} did not end within {RUN_S:g} s"))
            self._look_for_recovery(running, seen)
            if self._faults and self._is_time(running, self._faults[0]):
                self._hit(running, self._faults.pop(0))
                seen = len(self._restarts())
            time.sleep(0.02)
        return code

    def _is_time(self, running: Driver, fault: Planned) -> bool:
        """Whether a fault comes now: after the one before, or as soon as the run recovers from it."""
        if fault.phase == "recovery" and self._open:
            return self._num_recoveries(running) > self._recoveries_seen
        if self._open or running.num_steps < fault.after_steps:
            return False
        if fault.phase == "start":
            return bool(victims(running, fault.role))
        return fault.phase != "checkpoint" or bool(running.unfinished_checkpoints())

    def _num_recoveries(self, running: Driver) -> int:
        return len(RECOVERS.findall(running.log.read_text(errors="replace")))

    @property
    def _open(self) -> list[Suffered]:
        return [each for each in self.suffered if each.recovered_s is None and each.how == "?"]

    def _hit(self, running: Driver, fault: Planned) -> None:
        time.sleep(fault.delay_s)
        found = victims(running, fault.role)
        if not found:
            return  # it is on its way down or up
        try:
            os.kill(self._rng.choice(found), KINDS[fault.kind])
        except ProcessLookupError:
            return
        for each in self._open:
            each.how = "lost more while it recovered"
        self._recoveries_seen = self._num_recoveries(running)
        how = "went on without it" if fault.role == "keeper" else "?"  # nothing starts again, so the next may come
        self.suffered.append(Suffered(self._number, fault.role, fault.kind, fault.phase, running.num_steps, how))
        self._hit_s = time.monotonic()

    def _look_for_recovery(self, running: Driver, seen: int) -> None:
        """Close a fault when the run says that it has started something again, or when it was none."""
        if not self._open:
            return
        last, since_s = self._open[-1], time.monotonic() - self._hit_s
        roles = {last.role} if last.role in ("encoder", "feeder") else {"backbone", "coordinator"}
        restarts = [each for each in self._restarts()[seen:] if each["role"] in roles]
        if restarts:
            told = restarts[-1]
            down_s = told.get("down_s")
            last.how = "started again"
            last.noticed_s = since_s - down_s if down_s is not None else since_s
            last.recovered_s, last.steps_again = since_s, told.get("steps_again", 0)
        elif since_s > NOTICE_S:
            last.how = "went on without it"

    def _restarts(self) -> list[dict[str, Any]]:
        if not self._files.events.exists():
            return []
        return [line for line in json_lines(self._files.events) if line["event"] == "restart"]

    def _note_end(self, now_s: float) -> None:
        """The run has ended, and is resumed."""
        for each in self._open:
            each.how, each.noticed_s = "ended, resumed", now_s - self._hit_s


def audit(config: RunConfig, undisturbed: RunDir) -> None:
    """Compare a finished run with the undisturbed one. Raises AuditFailed with the difference."""
    try:
        check_same_end(run_dir(config), undisturbed)
    except AssertionError as error:
        raise AuditFailed(f"{run_dir(config).root} differs from the undisturbed run: {error}") from error


def campaign(args: argparse.Namespace, console: Console) -> list[Suffered]:
    """Run until so many faults were suffered; returns all of them."""
    directory: Path = args.directory
    directory.mkdir(parents=True, exist_ok=True)
    record = directory / "faults.jsonl"
    done: list[Suffered] = [Suffered(**line) for line in json_lines(record)] if record.exists() else []
    spoiled_world().write(directory / "train.parquet")
    eval_world().write(directory / "eval.parquet")
    reference = config_of(directory, "undisturbed", *LIMITS)
    if not run_dir(reference).export.exists() and not run_dir(reference).metrics.exists():
        run_undisturbed(reference, directory / "undisturbed.log")
    number = max((each.run for each in done), default=-1) + 1
    while len(done) < args.faults:
        snapshots = f"checkpoint.snapshot_every_steps={EVERY_SNAPSHOT if number % 2 else 'null'}"
        config = config_of(directory, f"run-{number}", *LIMITS, snapshots)
        faults = planned_faults(args.seed, number, args.roles, NUM_STEPS, EVERY_EVAL)
        faults = [each for each in faults if each.role != "keeper" or number % 2]  # else there is none
        run = CampaignRun(number, config, directory, faults)
        run.complete()
        audit(config, run_dir(reference))
        with record.open("a") as file:
            file.writelines(json.dumps(asdict(each)) + "\n" for each in run.suffered)
        done += run.suffered
        said = ", ".join(f"{each.role} {each.kind} ({each.phase}): {each.how}" for each in run.suffered) or "no fault"
        console.print(f"run {number}: {said}; audited, {len(done)} of {args.faults} faults", highlight=False)
        number += 1
    return done


def rows_of(suffered: list[Suffered]) -> Iterator[tuple[str, ...]]:
    """A row for each role and kind of fault."""
    groups: defaultdict[tuple[str, str], list[Suffered]] = defaultdict(list)
    for each in suffered:
        groups[each.role, each.kind].append(each)
    for (role, kind), each in sorted(groups.items()):
        ways: defaultdict[str, int] = defaultdict(int)
        for fault in each:
            ways[fault.how] += 1
        outcome = ", ".join(f"{count} {how}" for how, count in sorted(ways.items()))
        known = [fault.steps_again for fault in each if fault.steps_again is not None]
        again = str(sum(known)) + (f" (of {len(known)})" if len(known) < len(each) else "")
        yield role, kind, str(len(each)), outcome, _middle(each, "noticed_s"), _middle(each, "recovered_s"), again


def _middle(faults: list[Suffered], key: str) -> str:
    values = [value for fault in faults if (value := getattr(fault, key)) is not None]
    return f"{median(values):.1f} ({max(values):.1f})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the runs and the record")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--json", action="store_true", help="print the faults as JSON")
    show(campaign, parser.parse_args())


def show(campaign: Callable[[argparse.Namespace, Console], list[Suffered]], args: argparse.Namespace) -> None:
    """Run a campaign, and print its faults; exits with 1 if an audit fails."""
    console = Console(stderr=args.json)
    try:
        suffered = campaign(args, console)
    except AuditFailed as error:
        sys.exit(f"the audit failed: {error}")
    if args.json:
        print(json.dumps([asdict(each) for each in suffered]))
        return
    table = Table(*HEADINGS)
    for row in rows_of(suffered):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
