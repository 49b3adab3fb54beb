"""One run on emulated devices: coordinator, feeder, scheduler and pool are real; devices wait instead of computing."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from flowtrain.actors.coordinator import Coordinator
from flowtrain.config.emulated import EmulatedConfig
from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import RunSpec, first_flow_settings, prepare
from flowtrain.emulation.hosts import SWITCH_INTERVAL_S
from flowtrain.emulation.process import EmulatedRun
from flowtrain.flow.build import build_flow
from flowtrain.training.checkpoint_store import probe_directory
from flowtrain.types.events import UnitDone
from flowtrain.types.messages import FlowSettings
from shared.emulated_hosts import LIMIT_S, Host, Job, machine_cpu_s
from shared.emulated_splits import Split
from shared.emulated_world import BATCH, VISION, World

WARM_UP_STEPS = 4
"""Encoders are ahead by more steps at the start than later."""
LONGEST_STEP_S = 0.4
"""Seconds of a step. A slower split's waits are shortened, so that measuring it does not take longer."""
STALL_S = 1.0


@dataclass(frozen=True)
class Measured:
    """Result of a run.

    rate: samples/s of the emulated devices at their own speed.
    step_s, longest_s: mean and longest of the measured steps as they were run.
    busy, machine_busy: shares of all cores' time that the emulation, and everything on the machine, took meanwhile.
    time_scale: of all waits.
    """

    rate: float
    step_s: float
    longest_s: float
    busy: float
    machine_busy: float
    time_scale: float = 1.0

    @property
    def has_stalled(self) -> bool:
        """Whether one step took far longer than the others; no wait of an emulated device explains that."""
        return self.longest_s > STALL_S * self.time_scale + self.step_s


class Emulation:
    """The processes and the event loop that all runs share; a context manager. time_scale: of all waits."""

    def __init__(self, time_scale: float = 1.0) -> None:
        self._time_scale = time_scale

    def __enter__(self) -> Emulation:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="coordinator", daemon=True).start()
        self._hosts = {role: Host(role, self._loop) for role in ("feeder", "encoders", "backbone")}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts.values():
            host.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def run(self, world: World, split: Split, num_steps: int, directory: Path) -> Measured:
        """Run a split for ``num_steps`` steps after the first ones."""
        time_scale = self._time_scale * min(1.0, LONGEST_STEP_S * split.rate / BATCH)
        config = config_of(world, split, WARM_UP_STEPS + num_steps)
        run_spec = prepare(config)
        settings = settings_of(run_spec, split)
        coordinator = Coordinator(partial(build_flow, config, run_spec.model_spec, settings))
        run_id = f"emulated-{uuid.uuid4().hex[:8]}"
        with _probe(directory, run_id):
            job = partial(
                Job,
                run=EmulatedRun(config, EmulatedConfig(time_scale=time_scale), world.profile),
                run_id=run_id,
                num_steps=settings.num_steps,
                checkpoint_dir=str(directory),
            )
            for role, host in self._hosts.items():
                host.start(job(role), coordinator)
            ends, busy, machine_busy = self._until_done(coordinator, settings.num_steps)
            self._wait()
        steps_s = [end - start for start, end in pairwise(ends[WARM_UP_STEPS - 1 :])]
        step_s = sum(steps_s) / num_steps
        return Measured(BATCH / step_s * time_scale, step_s, max(steps_s), busy, machine_busy, self._time_scale)

    def _until_done(self, coordinator: Coordinator, num_steps: int) -> tuple[list[float], float, float]:
        """End of each step, in seconds since the epoch, and the two shares of the cores' time of ``Measured``."""
        ends: list[float] = []
        since = 0.0, 0.0, 0.0
        while len(ends) < num_steps:
            answer = asyncio.run_coroutine_threadsafe(coordinator.events(), self._loop)
            for event in answer.result(LIMIT_S):
                if isinstance(event, UnitDone):
                    ends.append(max(report.finished_s for report in event.reports))
                    if len(ends) == WARM_UP_STEPS:
                        since = time.monotonic(), self._cpu_s(), machine_cpu_s()
            for host in self._hosts.values():
                if host.failed is not None:
                    raise RuntimeError(f"an emulated actor failed on host {host.name}:\n{host.failed}")
        cores_s = (time.monotonic() - since[0]) * (os.cpu_count() or 1)
        return ends, (self._cpu_s() - since[1]) / cores_s, (machine_cpu_s() - since[2]) / cores_s

    def _wait(self) -> None:
        for host in self._hosts.values():
            error = host.wait(LIMIT_S)
            if error is not None:
                raise RuntimeError(f"an emulated actor failed on host {host.name}:\n{error}")

    def _cpu_s(self) -> float:
        return time.process_time() + sum(host.cpu_s for host in self._hosts.values())


def config_of(world: World, split: Split, num_steps: int) -> RunConfig:
    """The world's configuration with a split's degrees."""
    config = world.config
    degrees = {"data_parallel_size": split.encoder.dp, "tensor_parallel_size": split.encoder.tp}
    encoder = config.encoders[VISION].model_copy(update=degrees)
    backbone = config.backbone.model_copy(
        update={
            "data_parallel_size": split.backbone.dp,
            "pipeline_parallel_size": split.backbone.pp,
            "tensor_parallel_size": split.backbone.tp,
        }
    )
    training = config.training.model_copy(update={"max_steps": num_steps})
    return config.model_copy(update={"encoders": {VISION: encoder}, "backbone": backbone, "training": training})


def settings_of(run_spec: RunSpec, split: Split) -> FlowSettings:
    """Settings of the run's flow."""
    return replace(first_flow_settings(run_spec), dp_size=split.backbone.dp)


@contextmanager
def _probe(directory: Path, run_id: str) -> Iterator[None]:
    """Create the directory by which ranks see that they share the run's directory, and remove it at the end."""
    probe = probe_directory(directory, run_id)
    probe.mkdir(parents=True)
    yield
    probe.rmdir()
