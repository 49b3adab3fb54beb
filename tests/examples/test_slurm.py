"""The Slurm script: its directives, and what it does, with stand-ins for Slurm's, Ray's and FlowTrain's commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.processes import processes
from tests.e2e.worlds import ROOT

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "docs" / "examples" / "slurm.sh"
LIMIT_S = 60.0
JOB = 123457
BASE = 20000 + JOB % 1000 * 10

DIRECTIVES = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": "1",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"\d+",
    "exclusive": None,
    "time": r"\d+:\d\d:\d\d",
    "signal": r"B:USR1@\d+",
    "requeue": None,
    "open-mode": "append",
    "output": r"[\w%.-]+",
}
"""sbatch's options that the script uses, with the form of their values; None: it has none."""

STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; fi',
    "hostname": "echo 10.0.0.1 fe80::1",
    "python": 'cat >/dev/null; until [ "$(grep -c "^ray " "$LOG")" -ge "$2" ]; do sleep 0.01; done',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "ray": "exec sleep 1000",
    "flowtrain": 'trap "exit 130" TERM; touch "$LOG.ready"; [ -z "$CODE" ] || exit "$CODE"\n'
    "while :; do sleep 0.05; done",
}
"""Each first notes its name and arguments."""


@dataclass
class Job:
    """The script, running in a directory with stand-ins."""

    directory: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, code: str = "", num_nodes: int = 2) -> None:
        """code: how flowtrain ends; empty: only by a signal."""
        binaries = self.directory / "venv" / "bin"
        binaries.mkdir(parents=True)
        (binaries / "activate").write_text(f'PATH="{binaries}:$PATH"\n')
        for name, body in STUBS.items():
            (binaries / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$LOG"\n{body}\n')
            (binaries / name).chmod(0o755)
        environment = {
            "PATH": os.environ["PATH"],
            "LOG": str(self.log),
            "CODE": code,
            "FLOWTRAIN_VENV": str(self.directory / "venv"),
            "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": str(num_nodes),
            "SLURM_CPUS_PER_TASK": "16",
        }
        command = ["bash", str(SCRIPT), "my.yaml", "name=first"]
        self.process = subprocess.Popen(command, env=environment, cwd=self.directory, start_new_session=True)

    @property
    def log(self) -> Path:
        return self.directory / "commands.log"

    @property
    def token(self) -> Path:
        return self.directory / f".ray-token-{JOB}"

    def calls(self, name: str) -> list[str]:
        """The arguments of each call of a command, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(LIMIT_S)

    def is_alone(self) -> bool:
        """Whether no process of its session is left."""
        return all(process.session != self.process.pid for process in processes())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_directives_are_sbatchs_and_stand_before_the_first_command() -> None:
    lines = SCRIPT.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert [line for line in lines[:first] if line.startswith("#SBATCH")] == directives
    for line in directives:
        found = re.fullmatch(r"#SBATCH --([\w-]+)(?:=(\S+))?", line)
        assert found, line
        form = DIRECTIVES[found[1]]
        assert found[2] is None if form is None else re.fullmatch(form, found[2] or ""), line
    assert len(directives) == len(DIRECTIVES)


def test_the_shell_can_read_it() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_a_run_starts_ray_on_all_nodes_with_ports_of_its_own(job: Job) -> None:
    job.start(code="0")
    assert job.end() == 0
    head, worker = job.calls("ray")
    assert head.startswith(f"start --head --node-ip-address 10.0.0.1 --port {BASE} --dashboard-port {BASE + 1} ")
    assert worker.startswith(f"start --address 10.0.0.1:{BASE} --block ")
    for call in (head, worker):
        assert f"--dashboard-agent-listen-port {BASE + 2} " in f"{call} " and "--num-cpus 16" in call
    (srun,) = job.calls("srun")
    assert srun.startswith("--nodes=1 --ntasks=1 --exclude=node1 ray start ")
    assert job.calls("python") == ["- 1", "- 2"], "the head first, then all"
    assert job.calls("flowtrain") == ["train my.yaml name=first --resume"]
    assert not job.token.exists() and job.is_alone() and "requeue" not in str(job.calls("scontrol"))


def test_one_node_needs_no_srun(job: Job) -> None:
    job.start(code="0", num_nodes=1)
    assert job.end() == 0 and job.calls("srun") == [] and len(job.calls("ray")) == 1


def test_a_failed_run_fails_the_job(job: Job) -> None:
    job.start(code="1")
    assert job.end() == 1
    assert not job.token.exists() and job.is_alone()


@pytest.mark.parametrize(("number", "is_queued_again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_stops_the_run_and_only_the_time_limit_queues_it_again(
    job: Job, number: signal.Signals, is_queued_again: bool
) -> None:
    job.start()
    job.wait_for(job.log.with_name("commands.log.ready").exists)
    assert job.token.stat().st_mode & 0o777 == 0o600 and len(job.token.read_text()) == 64
    job.process.send_signal(number)
    assert job.end() == 130
    assert (f"requeue {JOB}" in job.calls("scontrol")) == is_queued_again
    assert not job.token.exists() and job.is_alone()
