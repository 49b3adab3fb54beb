"""Outside peers of ``end_to_end.py``: their packages, the settings that are tried, and their runs.

Packages lie in a directory of their own that only a peer's process looks into. They come without their dependencies,
so that a peer runs with the same torch, transformers and Ray as FlowTrain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _end_to_end_store import Record, Setting
from _hf_samples import Samples
from _modes_data import ROOT
from _modes_runs import ENDING_STEPS, LEARNING_RATE, Workload
from _peer_job import PeerJob

BENCHMARKS = Path(__file__).resolve().parent
PACKAGES = ("trl==1.16.0", "datasets==5.2.0", "accelerate==1.15.0", "pandas==3.0.0")
THEIR_NEEDS = ("dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0", "psutil==7.2.2")
ONE_PROCESS, TWO_PROCESSES, ONE_THREAD = (1, 2), (2, 1), (1, 1)
TIME_LIMIT_S = 900
TRIAL_STEPS = 8
"""Steps of a trial after its warm-up."""


@dataclass(frozen=True)
class Peer:
    """A peer's script.

    layouts: numbers of training processes and of torch's threads in each. balances: whether it can sort samples of a
    step into microbatches of like cost. launches: whether it starts its processes itself.
    """

    file: str
    title: str
    layouts: tuple[tuple[int, int], ...]
    balances: bool
    launches: bool


TRAINER_LAYOUTS, RAY_LAYOUTS = (ONE_PROCESS, TWO_PROCESSES), (ONE_PROCESS, TWO_PROCESSES, ONE_THREAD)
PEERS = {
    "hf_trainer": Peer("_peer_hf_trainer.py", "HF Trainer, padded", TRAINER_LAYOUTS, balances=True, launches=False),
    "trl_sft": Peer("_peer_trl.py", "TRL SFTTrainer", TRAINER_LAYOUTS, balances=True, launches=False),
    "ray_data": Peer("_peer_ray_data.py", "Ray Data + HF loop", RAY_LAYOUTS, balances=False, launches=True),
}
"""By name in the figures. Ray Data has an encoder actor beside each training process, with as many threads."""


class PeerFailed(Exception):
    """A peer's process ended with an error."""


def install(directory: Path) -> None:
    """Install the pinned packages of all peers, unless that was done before."""
    wanted = "\n".join((*PACKAGES, *THEIR_NEEDS))
    stamp = directory / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--upgrade", "--target", str(directory)]
    subprocess.run([*command, *wanted.split()], check=True, stdout=sys.stderr)
    stamp.write_text(wanted)


class PeerRuns:
    """Runs of peers on one workload."""

    def __init__(self, setting: Setting, workload: Workload, packages: Path) -> None:
        self._setting, self._workload, self._packages = setting, workload, packages
        self._lengths = Samples(workload.samples, workload.model).lengths()

    def step_tokens(self) -> list[int]:
        """Real tokens of each step."""
        batch = self._workload.batch
        return [sum(self._lengths[at : at + batch]) for at in range(0, len(self._lengths), batch)]

    def jobs(self, peer: Peer) -> list[PeerJob]:
        """What is tried: each layout, with microbatches of one sample and with the largest that fit.

        Microbatches of one sample have no padding. The others fill FlowTrain's microbatch, by the mean length. Where
        samples can be sorted by cost, that is tried too, unless one process takes them one by one.
        """
        workload, found = self._workload, []
        mean = sum(self._lengths) / len(self._lengths)
        for processes, threads in peer.layouts:
            share = workload.batch // processes
            sizes = [each for each in range(1, share + 1) if share % each == 0]
            largest = max(each for each in sizes if each == 1 or each * mean <= workload.setting.microbatch_tokens)
            for size in sorted({1, largest}):
                job = PeerJob(
                    workload.model,
                    workload.samples,
                    workload.batch,
                    size,
                    workload.setting.steps,
                    LEARNING_RATE,
                    processes,
                    threads,
                )
                found.append(job)
                if peer.balances and processes * size > 1:
                    found.append(replace(job, balanced=1))
        return found

    def trial(self, name: str, job: PeerJob) -> Record:
        """A short run."""
        steps = min(job.steps, self._workload.setting.warm_up + TRIAL_STEPS + ENDING_STEPS)
        return self.run(name, replace(job, steps=steps), None)

    def run(self, name: str, job: PeerJob, number: int | None) -> Record:
        """Train in processes of its own; number: of the round."""
        done = subprocess.run(
            self._command(PEERS[name], job),
            capture_output=True,
            text=True,
            env=self._environment(job),
            timeout=TIME_LIMIT_S,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"ended_s"')]
        if done.returncode or not lines:
            raise PeerFailed(f"{name} ({how_of(job)}) ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found = json.loads(lines[-1])
        rate = self._rate(found["ended_s"], found["began_s"])
        how = how_of(job)
        if number is not None:
            how += f"; {PEERS[name].title} {found['version']}"
        return Record(self._setting.model, self._setting.mix, name, number, rate, found["losses"][0], how)

    def _rate(self, ended_s: list[float], began_s: float | None) -> float:
        """Real tokens a second of the window, as of FlowTrain's runs, or of the whole run since it began."""
        first, last = self._workload.setting.warm_up, len(ended_s) - ENDING_STEPS
        if began_s is not None:
            return sum(self.step_tokens()[: len(ended_s)]) / (ended_s[-1] - began_s)
        return sum(self.step_tokens()[first:last]) / (ended_s[last - 1] - ended_s[first - 1])

    def _command(self, peer: Peer, job: PeerJob) -> list[str]:
        command: Sequence[str] = [sys.executable]
        if job.processes > 1 and not peer.launches:
            command = [*command, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.processes}"]
        return [*command, str(BENCHMARKS / peer.file), *job.arguments()]

    def _environment(self, job: PeerJob) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self._packages}",
            "OMP_NUM_THREADS": str(job.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }


def how_of(job: PeerJob) -> str:
    """A job's settings in words."""
    samples = "1 sample" if job.size == 1 else f"{job.size} samples"
    order = ", sorted by cost within a step" if job.balanced else ""
    return f"{job.processes} x {job.threads} threads, {samples} a microbatch{order}"
