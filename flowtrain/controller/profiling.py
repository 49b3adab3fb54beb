"""``flowtrain profile``: measures a run's modules on available devices, through Ray, and builds the profile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowtrain.actors.link import RayLink
from flowtrain.actors.profiler import Echo, Profiler
from flowtrain.allocator.degrees import degree_faults
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.planning.planned_run import planned_samples, workload_of
from flowtrain.controller.prepare import RunSpec, prepare, splits_tensors
from flowtrain.costs.profile import (
    DeviceFacts,
    ImageCosts,
    ImageTable,
    LengthTable,
    Profile,
    StepCosts,
    library_versions,
    model_facts,
)
from flowtrain.costs.profile_checks import profile_warnings
from flowtrain.costs.profile_shapes import Mix, image_sizes, packed_lengths, packed_mixes
from flowtrain.costs.profiled_times import CPU
from flowtrain.errors import ConfigError, FaultCode, FlowTrainError, ResourceError
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.training.mesh import LOOPBACK
from flowtrain.types.plan import Degrees
from flowtrain.types.profile import BackboneTimes, DeviceReport, EncoderTimes
from flowtrain.types.samples import SampleRef, SizedSample

MOST_DEVICES = 8
"""Devices measured at once, unless more are asked for."""
NUM_DECODED = 32

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """A profile and how it was measured.

    num_devices: devices that measured side by side. seconds: time by measurement. warnings: doubts about the profile.
    """

    profile: Profile
    num_devices: int
    seconds: Mapping[str, float]
    warnings: tuple[str, ...] = ()


class _Clock:
    """Records how long each measurement took."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        if self._progress is not None:
            self._progress(what)
        started_s = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - started_s


def measure(config: RunConfig, num_devices: int | None = None, progress: Progress | None = None) -> ProfileReport:
    """Measure on ``num_devices`` devices of one node, by default on all of the largest node, eight at most.

    All devices measure the same work at the same time, since training also uses them at the same time. Raises
    ConfigError or DataError if the run could not work, ResourceError if devices are missing.
    """
    if config.emulation is not None:
        raise ConfigError.of(
            "model.device",
            FaultCode.CONFLICT,
            "model.device ('emulated') has nothing to measure: emulated devices wait for times that are given; set it "
            "to 'auto' or 'cpu'",
        )
    config = modules_apart(config)
    # This machine's load, before anything runs; a cluster's devices may be on other machines.
    load_average = None if os.environ.get("RAY_ADDRESS") else os.getloadavg()[0]
    clock = _Clock(progress)
    with clock("the data's sizes"):
        run_spec = prepare(config, check_pool=False)
        samples = planned_samples(run_spec)
        mixes = packed_mixes(workload_of(config, samples))
    with cluster.connected(config):
        kind, there = _devices(config)
        count = _count(num_devices, there, kind)
        found = _Measured(config, kind, there, mixes, clock)
        found.side_by_side(count, {name: _refs(samples, name) for name in config.encoders})
        for tp in _tensor_degrees(run_spec, family_from_config(config), count):
            found.group(tp)
    profile = found.profile(run_spec)
    return ProfileReport(profile, count, clock.seconds, profile_warnings(profile, load_average))


def modules_apart(config: RunConfig) -> RunConfig:
    """Return a configuration with the same modules in ``mode: decoupled``, as they are measured: one by one."""
    changes: dict[str, Any] = {"mode": "decoupled"}
    if not config.has_encoder_actors:  # its cut of the layers may count the encoder's, and no encoder is split
        changes["pipeline"] = config.pipeline.model_copy(update={"partition": None})
        changes["encoders"] = {
            name: encoder.model_copy(update={"tensor_parallel_size": 1}) for name, encoder in config.encoders.items()
        }
    return config.model_copy(update=changes)


class _Measured:
    """What actors report, and the profile built from it."""

    def __init__(
        self, config: RunConfig, kind: str, devices_per_node: int, mixes: tuple[tuple[Mix, ...], ...], clock: _Clock
    ) -> None:
        self._config, self._kind, self._per_node = config, kind, devices_per_node
        self._mixes, self._clock = mixes, clock
        self._devices: list[DeviceReport] = []
        self._backbones: dict[int, BackboneTimes] = {}
        self._encoders: dict[str, EncoderTimes] = {}
        self._call_s = 0.0

    def side_by_side(self, count: int, refs: Mapping[str, Sequence[SampleRef]]) -> None:
        """Measure everything without tensor parallelism, on ``count`` devices at once."""
        with self._actors([(0, Degrees())] * count) as actors:
            limit_s = self._config.limits.stall_timeout_s
            with self._clock("devices"):
                self._devices = self._answers([actor.start.remote(LOOPBACK, 0) for actor in actors])
                self._call_s = self._time_calls(actors[0])
            for name in refs:
                with self._clock(f"encoders.{name}"):
                    times = self._answers([actor.encoder.remote(name, refs[name]) for actor in actors], limit_s)
                self._encoders[name] = _mean_encoder(times)
            with self._clock("backbone"):
                self._backbones[1] = _mean_backbone(
                    self._answers([actor.backbone.remote(self._mixes) for actor in actors], limit_s)
                )

    def group(self, tp: int) -> None:
        """Measure the backbone split over ``tp`` devices, and the links between them."""
        degrees = Degrees(tp=tp)
        with self._actors([(rank, degrees) for rank in range(tp)]) as actors, self._clock(f"backbone, tp={tp}"):
            host = LOOPBACK  # a tensor parallel group stays on its node
            (port,) = self._answers([actors[0].open_rendezvous.remote(host)])
            reports = self._answers([actor.start.remote(host, port) for actor in actors])
            link = min(report.link or 0.0 for report in reports)
            self._devices = [replace(each, link=link) for each in self._devices]
            times = self._answers(
                [actor.backbone.remote(self._mixes) for actor in actors], self._config.limits.stall_timeout_s
            )
            self._backbones[tp] = _mean_backbone(times)

    def profile(self, run_spec: RunSpec) -> Profile:
        """Put everything together."""
        tokens = packed_lengths(self._config.scheduler.microbatch_tokens)
        alone = self._backbones[1]
        # A CPU next to an accelerator assembles microbatches meanwhile; a core that is the device cannot.
        assembling_s = alone.assembling_s if self._devices[0].name == CPU else 0.0
        return Profile(
            device=self._devices[0].name,
            facts=_facts(self._devices, self._per_node),
            model=model_facts(self._config, run_spec.model_spec),
            versions=library_versions(),
            layers={tp: LengthTable(tokens, times.layers_s) for tp, times in self._backbones.items()},
            heads={tp: LengthTable(tokens, times.heads_s) for tp, times in self._backbones.items()},
            connectors={tp: LengthTable(tokens, times.connectors_s) for tp, times in self._backbones.items()},
            encoders={
                name: {1: ImageTable(times.num_patches, times.batch, times.seconds)}
                for name, times in self._encoders.items()
            },
            images={
                name: ImageCosts(decode_s=times.decode_s, batch_s=self._call_s)
                for name, times in self._encoders.items()
            },
            # A step begins and ends with a call to the coordinator.
            steps=StepCosts(alone.step_s + self._call_s, assembling_s, alone.parameter_s),
        )

    @contextmanager
    def _actors(self, ranks: Sequence[tuple[int, Degrees]]) -> Iterator[list[ActorHandle]]:
        """One profiler for each device, all on one node."""
        bundles: list[cluster.Bundle] = [{self._kind: 1.0}] * len(ranks)
        cluster.check_resources(bundles, 0)
        remote: Any = ray.remote(Profiler)
        actors: list[ActorHandle] = []
        with cluster.placed(bundles, self._config.limits.placement_timeout_s) as group:
            try:
                for index, (rank, degrees) in enumerate(ranks):
                    options = {
                        "num_cpus": float(self._kind == "CPU"),
                        "num_gpus": float(self._kind == "GPU"),
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(
                            group, placement_group_bundle_index=index
                        ),
                    }
                    actors.append(remote.options(**options).remote(self._config, rank, degrees))
                yield actors
            finally:
                for actor in actors:
                    ray.kill(actor, no_restart=True)

    def _time_calls(self, actor: ActorHandle) -> float:
        remote: Any = ray.remote(Echo)
        echo = remote.options(num_cpus=0).remote()
        try:
            (seconds,) = self._answers([actor.call_s.remote(RayLink(echo))])
        finally:
            ray.kill(echo, no_restart=True)
        return float(seconds)

    def _answers(self, calls: Sequence[ray.ObjectRef[Any]], limit_s: float | None = None) -> list[Any]:
        """Wait for actors. Raises ResourceError if one does not answer, otherwise the error that it raised."""
        limits = self._config.limits
        key = "start_timeout_s" if limit_s is None else "stall_timeout_s"
        limit_s = limits.start_limit_s if limit_s is None else limit_s
        try:
            return ray.get(list(calls), timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            raise ResourceError(
                f"measuring took longer than limits.{key} ({limit_s:g} s); raise it, or measure smaller microbatches"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FlowTrainError):
                raise error.cause from error
            raise
        except ray.exceptions.RayError as error:  # it died, or Ray killed it for lack of memory
            raise ResourceError(f"a process that measures was lost: {error}") from error


def _devices(config: RunConfig) -> tuple[str, int]:
    """Ray's name of a device, and how many the largest node has; without accelerators a CPU core is a device."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = 0 if config.model.device == "cpu" else max(int(node.get("GPU", 0)) for node in nodes)
    return ("GPU", gpus) if gpus else ("CPU", max(int(node.get("CPU", 0)) for node in nodes))


def _count(asked: int | None, there: int, kind: str) -> int:
    if asked is not None and asked > there:
        what = "accelerators" if kind == "GPU" else "CPU cores"
        raise ConfigError(f"--devices ({asked}) is more than the {there} {what} of the largest node; take at most that")
    return asked if asked is not None else min(there, MOST_DEVICES)


def _tensor_degrees(run_spec: RunSpec, family: Family, count: int) -> list[int]:
    """Powers of two that can split the backbone, up to ``count`` devices."""
    degrees = [2**power for power in range(1, count.bit_length()) if 2**power <= count]
    even = [tp for tp in degrees if not degree_faults(Degrees(tp=tp), run_spec.model_spec.backbone)]
    return [tp for tp in even if splits_tensors(family, tp)]


def _refs(samples: Sequence[SizedSample], encoder: str) -> list[SampleRef]:
    """Samples with images for an encoder: one for each size to measure, and more to decode."""
    patches = {
        sample.ref: part.num_patches // part.num_items
        for sample in samples
        for part in sample.parts
        if part.name == encoder and part.num_items
    }
    sizes = image_sizes(list(patches.values()))
    of_sizes = [next(ref for ref, size in patches.items() if size == wanted) for wanted in sizes]
    others = [ref for ref in patches if ref not in of_sizes]
    return of_sizes + others[: max(0, NUM_DECODED - len(of_sizes))]


# --- what several devices measured at once ---------------------------------------------------------------------------


def _facts(devices: Sequence[DeviceReport], devices_per_node: int) -> DeviceFacts:
    """The facts of the slowest device."""
    slowest = min(devices, key=lambda device: device.flops)
    return DeviceFacts(
        flops=slowest.flops,
        memory_nbytes=slowest.memory_nbytes,
        bandwidth=slowest.bandwidth,
        link=slowest.link,
        devices_per_node=devices_per_node,
    )


def _mean_backbone(times: Sequence[BackboneTimes]) -> BackboneTimes:
    def each(name: str) -> tuple[float, ...]:
        return tuple(np.mean([getattr(one, name) for one in times], axis=0).tolist())

    def mean(name: str) -> float:
        return statistics.mean(getattr(one, name) for one in times)

    return BackboneTimes(
        layers_s=each("layers_s"),
        heads_s=each("heads_s"),
        connectors_s=each("connectors_s"),
        assembling_s=mean("assembling_s"),
        step_s=mean("step_s"),
        parameter_s=mean("parameter_s"),
    )


def _mean_encoder(times: Sequence[EncoderTimes]) -> EncoderTimes:
    seconds = np.mean([one.seconds for one in times], axis=0).tolist()
    return replace(
        times[0],
        seconds=tuple(tuple(row) for row in seconds),
        decode_s=statistics.mean(one.decode_s for one in times),
    )
