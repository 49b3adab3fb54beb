"""The simulator's accuracy: configurations on two cores, their predictions, and their runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _machine_speed import SpeedProbe
from _modes_runs import Workload
from _pinned import stay_on
from shared.memory_trace import LivePeak

from flowtrain.actors.backbone import BackboneRank
from flowtrain.actors.encoder import Encoder
from flowtrain.actors.prefetch import Prefetcher
from flowtrain.allocator import monolithic
from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.drawn import drawn_rate
from flowtrain.allocator.drawn_batches import SIMULATED_BATCHES, DrawnBatches
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.modes import host_s
from flowtrain.allocator.request import Request
from flowtrain.allocator.simulated import DeviceTimesOf, simulated_run, simulated_work
from flowtrain.allocator.surrogate import BACKBONE, Surrogate
from flowtrain.allocator.whole import slowdown_of
from flowtrain.config.load import load_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.devices import AskedDevices, cluster_of
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.controller.planning.request import device_times, request_of, surrogates
from flowtrain.controller.run import run_training
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import Profile
from flowtrain.observability.metrics import read_metrics
from flowtrain.simulator.run import SimulatedRun
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import Mode

MEMORY_ENV = "FLOWTRAIN_BENCHMARK_MEMORY"
"""Names a directory for what ranks count; to be set before Ray starts, whose processes inherit it."""
COUNTED_STEPS = 10
"""Of the run that counts memory, which takes more time; enough for a microbatch that is nearly full."""
WARM_UP, ENDING = 4, 3
"""Steps that are not measured: the encoder works ahead at the start and is idle at the end."""


@dataclass(frozen=True)
class Case:
    """A mode with degrees, on two cores. name: also of its runs."""

    name: str
    mode: Mode
    degrees: Degrees
    overrides: tuple[str, ...] = ()

    @property
    def num_encoders(self) -> int:
        """Replicas of the encoder with actors of their own."""
        return {"decoupled": 1, "disaggregated": 1, "colocated": self.degrees.world_size}.get(self.mode, 0)

    @property
    def changes(self) -> tuple[str, ...]:
        """Its overrides of a configuration."""
        degrees = self.degrees
        return (
            f"mode={self.mode}",
            f"backbone.data_parallel_size={degrees.dp}",
            f"backbone.pipeline_parallel_size={degrees.pp}",
            f"backbone.tensor_parallel_size={degrees.tp}",
            f"encoders.vision.data_parallel_size={max(1, self.num_encoders)}",
            *self.overrides,
        )


INTERLEAVED = ("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2")
CASES = (
    Case("decoupled", "decoupled", Degrees()),
    Case("disaggregated", "disaggregated", Degrees()),
    Case("colocated_dp2", "colocated", Degrees(dp=2)),
    Case("monolithic_dp2", "monolithic", Degrees(dp=2)),
    Case("monolithic_tp2", "monolithic", Degrees(tp=2)),
    Case("monolithic_pp2", "monolithic", Degrees(pp=2)),
    Case("monolithic_pp2_interleaved", "monolithic", Degrees(pp=2), INTERLEAVED),
    Case("llm_only_dp2", "llm_only", Degrees(dp=2)),
    Case("llm_only_pp2", "llm_only", Degrees(pp=2)),
    Case("llm_only_pp2_interleaved", "llm_only", Degrees(pp=2), INTERLEAVED),
)
QUICK = ("decoupled", "colocated_dp2", "monolithic_dp2", "monolithic_pp2", "llm_only_dp2")


@dataclass(frozen=True)
class Ran:
    """One run. num_samples, seconds: of each step in the middle. machine_s: see ``SpeedProbe``."""

    num_samples: tuple[int, ...]
    seconds: tuple[float, ...]
    directory: Path
    machine_s: float

    @property
    def rate(self) -> float:
        """Samples/s."""
        return sum(self.num_samples) / sum(self.seconds)


def config_of(workload: Workload, case: Case, name: str, steps: int) -> RunConfig:
    """The configuration of a case on a workload; every step is traced."""
    changes: tuple[str, ...] = (
        f"name={name}",
        f"training.max_steps={steps}",
        "checkpoint.every_steps=100000",
        "checkpoint.at_end=false",
        "observability.progress=off",
        "observability.dashboard=false",
        f"observability.trace.steps={steps}",
        "backbone.attention=sdpa",  # as CPUs take by themselves; without a profile, a plan would be for other devices
    )
    if case.degrees.dp > 1:  # ``auto`` becomes this one, but plans count it as ``full``
        changes = (*changes, "backbone.sharding=gradients")
    return load_config(workload.config_file(), [*changes, *case.changes])


def predicted_rate(config: RunConfig, case: Case, profile: Profile) -> float:
    """Return the samples/s that the simulator gives the configured degrees over the steps that are measured.

    As a plan's rate, it counts what the run's own processes take from the cores.
    """
    asked = _asked(config, case, profile)
    seconds, num_samples = 0.0, 0
    for batches, run in _simulated(asked, config, slice(WARM_UP, -ENDING)):
        idle_s = drawn_rate(asked.request, asked.surrogate, asked.candidate, batches, asked.slowdown).idle_s
        host = host_s(asked.request, asked.surrogate, asked.candidate, idle_s)
        seconds += len(batches.batches) * (run.step_s + host)
        num_samples += batches.batches.size
    return num_samples / seconds


def predicted_peak(config: RunConfig, case: Case) -> int:
    """Return the bytes that the simulator gives the fullest backbone rank in the steps that are counted.

    The rates are those of data sheets: no time changes what a rank holds.
    """
    runs = _simulated(_asked(config, case, None), config, slice(1, None))
    return max(sum(rank.values()) for _, run in runs for rank in run.rank_peaks())


def planned_peak(config: RunConfig, case: Case) -> int:
    """Return the bytes that a plan reserves for the fullest backbone rank: those of full microbatches."""
    asked = _asked(config, case, None)
    at, backbone = asked.request, asked.candidate.backbone
    if asked.candidate.mode == "monolithic":
        return monolithic.memory(at, backbone, asked.candidate.encoder_layers or "first").peak
    return at.backbone_memory(backbone).peak


@dataclass(frozen=True)
class _Asked:
    """The configured degrees as the planner asks the simulator for them."""

    request: Request
    surrogate: Surrogate
    times_of: DeviceTimesOf
    candidate: ModeCandidate
    slowdown: float


def _simulated(asked: _Asked, config: RunConfig, steps: slice) -> Iterator[tuple[DrawnBatches, SimulatedRun]]:
    """Yield simulated runs over the batches of these steps; samples are not shuffled."""
    order = np.arange(len(asked.request.workload.lengths)).reshape(-1, asked.request.workload.global_batch_size)[steps]
    for first in range(0, len(order), SIMULATED_BATCHES):
        batches = DrawnBatches(order[first : first + SIMULATED_BATCHES], config.step_scheduler)
        work = simulated_work(asked.request, asked.surrogate, asked.times_of, asked.candidate, batches, asked.slowdown)
        yield batches, simulated_run(asked.request, asked.candidate, batches, work)


def _asked(config: RunConfig, case: Case, profile: Profile | None) -> _Asked:
    planned = planned_run(config)
    cluster = cluster_of(AskedDevices(devices=2), planned, profile)
    (device,) = cluster.device_types
    backbone = Candidate(BACKBONE, device.name, case.degrees, gradient_reduction="step")
    encoders = {"vision": Candidate("vision", device.name, Degrees(dp=case.num_encoders))} if case.num_encoders else {}
    place = config.pipeline.encoder_layers if case.mode == "monolithic" else None
    candidate = ModeCandidate(case.mode, backbone, encoders, encoder_layers=place, devices=2)
    request = request_of(planned, cluster, profile).of(backbone)
    times_of = device_times(config, OperatorRules.of(config.costs), profile)
    surrogate = surrogates(times_of)(request)
    slowdown, _ = slowdown_of(request, surrogate, device.name)
    return _Asked(request, surrogate, times_of, candidate, slowdown)


def run(config: RunConfig, case: Case) -> Ran:
    """Train, unless the run is there already, and return the times of the steps in the middle."""
    directory = Path(config.runs_dir, config.name)
    metrics, probed, num_steps = directory / "metrics.jsonl", directory / "machine_s", config.training.max_steps
    if not probed.exists() or len(list(read_metrics(metrics))) != num_steps:
        shutil.rmtree(directory, ignore_errors=True)
        apart = case.mode in ("decoupled", "disaggregated")
        classes = ActorClasses(encoder=PinnedEncoder, backbone=BackboneOnSecond if apart else PinnedBackbone)
        with SpeedProbe() as probe:
            run_training(config, classes=classes)
        probed.write_text(str(probe.seconds))
    lines = list(read_metrics(metrics))[WARM_UP:-ENDING]
    num_samples, seconds = (tuple(line[key] for line in lines) for key in ("num_samples", "step_time_s"))
    return Ran(num_samples, seconds, directory, float(probed.read_text()))


def counted_peak(config: RunConfig) -> int:
    """Train, and return the most bytes of living tensors that a backbone rank had, without those of its reads."""
    memory = _memory_of(config)
    memory.mkdir()
    shutil.rmtree(Path(config.runs_dir, config.name), ignore_errors=True)
    run_training(config, classes=ActorClasses(backbone=CountingBackbone))
    return max(int(file.read_text()) for file in memory.iterdir())


def _memory_of(config: RunConfig) -> Path:
    """Where the ranks of a run write what they took."""
    return Path(os.environ[MEMORY_ENV], config.name)


class PinnedEncoder(Encoder):
    """An encoder on the core of its number."""

    def __init__(self, config: RunConfig, encoder: str, name: str, run_id: str) -> None:
        stay_on(int(name.rpartition("-")[2]))
        super().__init__(config, encoder, name, run_id)


class CountingBackbone(BackboneRank):
    """Counts the bytes of its living tensors, from the second step on; the first creates the optimizer's state."""

    def __init__(self, config: RunConfig, *args: Any) -> None:
        self._memory = _memory_of(config)
        self._live = LivePeak()
        self._live.counts = False
        super().__init__(config, *args)

    def start(self, *args: Any) -> Any:
        with self._live:
            return super().start(*args)

    def _run_unit(self, prefetcher: Prefetcher) -> tuple[int, bool]:
        with self._live:
            step, goes_on = super()._run_unit(prefetcher)
        self._live.counts = True
        (self._memory / str(os.getpid())).write_text(str(self._live.peak_nbytes))
        return step, goes_on


class PinnedBackbone(BackboneRank):
    """A backbone rank on the core of its number."""

    def __init__(self, config: RunConfig, rank: int, *args: Any) -> None:
        stay_on(rank)
        super().__init__(config, rank, *args)


class BackboneOnSecond(BackboneRank):
    """A backbone rank on the second core."""

    def __init__(self, *args: Any) -> None:
        stay_on(1)
        super().__init__(*args)
