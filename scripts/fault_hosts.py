"""Take the power from hosts of small runs at random, or freeze them, and audit that nothing was lost.

python scripts/fault_hosts.py DIRECTORY [--faults N] [--seed N] [--json]

The runs are those of ``fault_campaign.py``, on three hosts of this machine (network namespaces): the head with the
driver and the coordinator, and two with encoders and backbone ranks. One of these two is killed with all its processes,
or stopped: at a start, in steps, evaluations, checkpoints, and while the run recovers from the loss before. It comes
back some seconds later, a stopped one with new processes once it was noticed. Then the run goes on with all degrees, so
its losses must equal those of the undisturbed run on one node to the bit. Every other run takes snapshots. A run
that ends is resumed by one command. Faults depend on the seed and the number of the run alone; DIRECTORY/hosts.jsonl
has what was done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from fault_campaign import LIMITS, RECOVERS, AuditFailed, Suffered, audit, show
from fault_draws import Planned, planned_faults
from shared.node_pair import NodePair, node_pair

from flowtrain.config.load import dump_resolved
from flowtrain.config.run import RunConfig
from flowtrain.observability.run_dir import RunDir, run_dir
from tests.e2e.disturbed import (
    EVERY_EVAL,
    NUM_STEPS,
    config_of,
    eval_world,
    json_lines,
    run_undisturbed,
    spoiled_world,
)

ROLE = "host"
WORKERS = (1, 2)
"""Hosts that may be lost; the head has the driver, and Ray's own records."""
SIZES = ("encoders.vision.num_cpus=1", "backbone.num_cpus=1", "pool.network=auto")
"""Two encoders and two ranks fill both hosts, so that a run waits for the lost one."""
LONGER = (
    "limits.stop_timeout_s=30",
    "limits.coordinator_timeout_s=30",
    "limits.stall_timeout_s=300",
    "limits.start_timeout_s=300",
)
"""Than on one node: a lost host must come back first."""
DOWN_S = (2.0, 20.0)
NOTICE_S = 120.0
"""A stopped host comes back then, noticed or not."""
ATTEMPT_S, MAX_STARTS = 600.0, 5
OWN = ("ray::Encoder", "ray::Feeder", "ray::BackboneRank", "ray::Coordinator", "ray::SnapshotKeeper")
END_S = 60.0


class HostsRun:
    """One run of the campaign, through all its faults and starts."""

    def __init__(self, cluster: NodePair, number: int, config: RunConfig, faults: list[Planned]) -> None:
        self._cluster, self._number, self._config, self._faults = cluster, number, config, faults
        self._files: RunDir = run_dir(config)
        self._rng = random.Random(f"hosts/{number}")
        self._log = cluster.directory / f"{config.name}.log"
        self.suffered: list[Suffered] = []
        self._lost: int | None = None
        self._hit_s = self._back_s = 0.0
        self._steps_then = self._recoveries_then = self._steps_again_then = 0

    def complete(self) -> None:
        """Start and resume the run until it is done. Raises AuditFailed if that takes too many starts."""
        for start in range(MAX_STARTS):
            with ThreadPoolExecutor(1) as pool:
                training = pool.submit(self._train, ["--resume"] if start or self._files.root.exists() else [])
                try:
                    self._disturb(training)
                except BaseException:
                    self._cluster.hosts[0].end_processes()  # the driver, which the pool would wait for
                    raise
                code, said = training.result()
            self._bring_back()
            self._check_left()
            if code == 0:
                self._close("went on without it")
                return
            print(f"run {self._number}, start {start}: exit code {code}\n{said[-1500:]}", file=sys.stderr)
            self._close("ended, resumed")
        raise AuditFailed(f"run {self._number} was not done after {MAX_STARTS} starts: {said}")

    def _train(self, arguments: list[str]) -> tuple[int, str]:
        file = self._cluster.directory / f"{self._config.name}.yaml"
        file.write_text(dump_resolved(self._config))
        command = [sys.executable, "-m", "flowtrain.cli.app", "train", str(file), *arguments]
        return self._cluster.run(command, self._config.name, ATTEMPT_S)

    def _disturb(self, training: Future[tuple[int, str]]) -> None:
        """Do what is planned while the run goes on."""
        while not training.done():
            self._look_for_recovery()
            if self._lost is not None and time.monotonic() >= self._back_s:
                self._bring_back()
            if self._faults and self._is_time(self._faults[0]):
                self._hit(self._faults.pop(0))
            time.sleep(0.05)

    @property
    def _num_steps(self) -> int:
        return self._files.metrics.read_bytes().count(b"\n") if self._files.metrics.exists() else 0

    @property
    def _num_recoveries(self) -> int:
        return len(RECOVERS.findall(self._log.read_text(errors="replace"))) if self._log.exists() else 0

    @property
    def _steps_again(self) -> int:
        """Steps that the run says were done twice so far."""
        if not self._files.events.exists():
            return 0
        lines = json_lines(self._files.events)
        return sum(line.get("steps_again") or 0 for line in lines if line["event"] == "restart")

    @property
    def _open(self) -> Suffered | None:
        return self.suffered[-1] if self.suffered and self.suffered[-1].how == "?" else None

    def _is_time(self, fault: Planned) -> bool:
        if self._lost is not None:
            return False  # one host of two
        if fault.phase == "recovery" and self._open is not None:
            return self._num_recoveries > self._recoveries_then
        if self._open is not None or self._num_steps < fault.after_steps:
            return False
        if fault.phase == "start":
            return any(self._own_on(number) for number in WORKERS)
        return fault.phase != "checkpoint" or any(self._files.checkpoints.glob(".tmp-step-*"))

    def _hit(self, fault: Planned) -> None:
        time.sleep(fault.delay_s)
        number = self._rng.choice(WORKERS)
        if self._open is not None:
            self._close("lost more while it recovered")
        self._steps_then, self._recoveries_then = self._num_steps, self._num_recoveries
        self._steps_again_then = self._steps_again
        self._lost, self._hit_s = number, time.monotonic()
        down_s = self._rng.uniform(*DOWN_S)
        if fault.kind == "kill":
            self._cluster.lose(number)
        else:
            for pid in self._cluster.hosts[number].pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            down_s = NOTICE_S
        self._back_s = self._hit_s + down_s
        self.suffered.append(Suffered(self._number, ROLE, fault.kind, fault.phase, self._steps_then, "?"))

    def _look_for_recovery(self) -> None:
        """Note when the run says that it starts something again, and when it has trained again."""
        if (last := self._open) is None:
            return
        since_s = time.monotonic() - self._hit_s
        if last.noticed_s is None and self._num_recoveries > self._recoveries_then:
            last.noticed_s = since_s
            self._back_s = min(self._back_s, time.monotonic() + self._rng.uniform(*DOWN_S))
        # A step may have been under way.
        if self._lost is None and self._num_steps >= min(self._steps_then + 2, NUM_STEPS):
            last.how, last.recovered_s = "started again" if last.noticed_s is not None else "went on", since_s
            last.steps_again = self._steps_again - self._steps_again_then

    def _bring_back(self) -> None:
        """Start the lost host anew."""
        if self._lost is None:
            return
        number, self._lost = self._lost, None
        self._cluster.lose(number)  # of a stopped one nothing goes on: it would find itself declared dead
        self._cluster.join(number, len(self._cluster.hosts))

    def _close(self, how: str) -> None:
        if (last := self._open) is not None:
            last.how = how
            if how == "ended, resumed":
                last.noticed_s = time.monotonic() - self._hit_s

    def _own_on(self, number: int) -> list[int]:
        """Processes of the run on a host."""
        found = []
        for pid in self._cluster.hosts[number].pids():
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_text().startswith(OWN):
                    found.append(pid)
        return found

    def _check_left(self) -> None:
        """No process of a run that ended is left on any host."""
        deadline_s = time.monotonic() + END_S
        while left := [pid for number in range(len(self._cluster.hosts)) for pid in self._own_on(number)]:
            if time.monotonic() > deadline_s:
                raise AuditFailed(f"run {self._number} has ended and left processes: {left}")
            time.sleep(0.2)


def campaign(args: argparse.Namespace, console: Console) -> list[Suffered]:
    """Run until so many faults were suffered; returns all of them."""
    directory: Path = args.directory
    directory.mkdir(parents=True, exist_ok=True)
    record = directory / "hosts.jsonl"
    done = [Suffered(**line) for line in json_lines(record)] if record.exists() else []
    spoiled_world().write(directory / "train.parquet")
    eval_world().write(directory / "eval.parquet")
    reference = config_of(directory, "undisturbed", *LIMITS)
    if not run_dir(reference).metrics.exists():
        run_undisturbed(reference, directory / "undisturbed.log")
    number = max((each.run for each in done), default=-1) + 1
    while len(done) < args.faults:
        with node_pair(1 + len(WORKERS), head_cpus=0) as cluster:
            snapshots = f"checkpoint.snapshot_every_steps={1 if number % 2 else 'null'}"
            config = config_of(directory, f"run-{number}", *LIMITS, *LONGER, *SIZES, snapshots)
            run = HostsRun(cluster, number, config, planned_faults(args.seed, number, [ROLE], NUM_STEPS, EVERY_EVAL))
            try:
                run.complete()
                audit(config, run_dir(reference))
            except AuditFailed:
                (directory / f"run-{number}.log").write_text((cluster.directory / f"{config.name}.log").read_text())
                raise
        with record.open("a") as file:
            file.writelines(json.dumps(asdict(each)) + "\n" for each in run.suffered)
        done += run.suffered
        said = ", ".join(f"{each.role} {each.kind} ({each.phase}): {each.how}" for each in run.suffered) or "no fault"
        console.print(f"run {number}: {said}; audited, {len(done)} of {args.faults} faults", highlight=False)
        number += 1
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the runs and the record")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the faults as JSON")
    show(campaign, parser.parse_args())


if __name__ == "__main__":
    main()
