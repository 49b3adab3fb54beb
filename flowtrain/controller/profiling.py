"""``flowtrain profile``: measures a run's modules on available devices, through Ray, and builds the profile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import ray

from flowtrain.allocator.choices import backbone_choices
from flowtrain.allocator.degrees import degree_faults
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster
from flowtrain.controller.planning.planned_run import planned_samples, workload_of
from flowtrain.controller.prepare import RunSpec, prepare, splits_tensors
from flowtrain.controller.profiling_actors import ProfilerLost, Profilers
from flowtrain.controller.profiling_means import mean_backbone, mean_encoder, mean_steps, slowest_facts
from flowtrain.controller.profiling_together import OfTwo, measure_interference, measure_two
from flowtrain.controller.trials import run_trials
from flowtrain.costs.profile import (
    ImageCosts,
    ImageTable,
    LengthTable,
    Profile,
    StepCosts,
    library_versions,
    model_facts,
)
from flowtrain.costs.profile_checks import profile_warnings
from flowtrain.costs.profile_layers import AttentionCosts, LayerStrategy, LossCosts, Strategies, StrategyCosts
from flowtrain.costs.profile_shapes import Mix, image_sizes, packed_lengths, packed_mixes
from flowtrain.costs.profile_together import (
    BATCH_CALLS,
    MICROBATCH_CALLS,
    REPLICA_CALLS,
    HostCosts,
    Interference,
    replica_costs,
)
from flowtrain.costs.workload import Workload
from flowtrain.errors import ConfigError, FaultCode, FlowTrainError, ResourceError
from flowtrain.models.families.base import Family
from flowtrain.models.families.registry import family_from_config
from flowtrain.training.mesh import LOOPBACK
from flowtrain.types.plan import Degrees
from flowtrain.types.profile import BackboneTimes, DeviceReport, EncoderTimes, LayerTimes, ReplicaSteps
from flowtrain.types.samples import SampleRef, SizedSample

MOST_DEVICES = 8
"""Devices measured at once, unless more are asked for."""
NUM_DECODED = 32

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """A profile and how it was measured.

    num_devices: devices that measured side by side. seconds: time by measurement. warnings: doubts about the profile,
    and what was measured again.
    """

    profile: Profile
    num_devices: int
    seconds: Mapping[str, float]
    warnings: tuple[str, ...] = ()


class _Clock:
    """Records how long each measurement took, tells of each that begins, and makes again what lost a process."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self.num_parts: int | None = None
        """None until the devices are known."""
        self.lost: list[str] = []
        """What was measured again, and why."""
        self._progress = progress
        self._part = ""

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        self._part, parts = what, list(self.seconds)
        number = 1 + (parts.index(what) if what in parts else len(parts))
        self._tell(what if self.num_parts is None else f"{what} ({number} of {self.num_parts})")
        started_s = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - started_s

    def twice(self, measure: Callable[[], None]) -> None:
        """Measure, and once more if a process is lost.

        Raises ResourceError if one is lost again.
        """
        try:
            measure()
            return
        except ProfilerLost as error:
            reason = str(error)
        self.lost.append(
            f"a process was lost while {self._part} was measured ({reason}); what it measured was measured again"
        )
        self._tell(f"again, since a process was lost in {self._part}: {reason}")
        try:
            measure()
        except ProfilerLost as error:
            raise ResourceError(
                f"measuring lost a process twice, now in {self._part} (first: {reason}; then: {error}); what it wrote "
                "is above, and if that is nothing, memory may have run out: measure smaller microbatches, or on fewer "
                "--devices at once"
            ) from error

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what)


def measure(
    config: RunConfig, num_devices: int | None = None, progress: Progress | None = None, *, trials: bool = False
) -> ProfileReport:
    """Measure on ``num_devices`` devices of one node, by default on all of the largest node, eight at most.

    All devices measure the same work at the same time, since training also uses them at the same time. trials: run the
    best plans for a few steps too, on ``num_devices`` devices, by default on all of the cluster. Raises
    ConfigError or DataError if the run could not work, ResourceError if devices are missing or a process is lost twice.
    """
    if config.emulation is not None:
        raise ConfigError.of(
            "model.device",
            FaultCode.CONFLICT,
            "model.device ('emulated') has nothing to measure: emulated devices wait for times that are given; set it "
            "to 'auto' or 'cpu'",
        )
    asked, config = config, modules_apart(config)
    # This machine's load, before anything runs; a cluster's devices may be on other machines.
    load_average = None if os.environ.get("RAY_ADDRESS") else os.getloadavg()[0]
    clock = _Clock(progress)
    with clock("the data's sizes"):
        run_spec = prepare(config, check_pool=False)
        samples = planned_samples(run_spec)
        workload = workload_of(config, samples)
    with cluster.connected(config):
        kind, there = _devices(config)
        count = _count(num_devices, there, kind)
        lengths = packed_lengths(workload.microbatch_tokens, _most_tokens(asked, run_spec, workload, kind))
        found = _Measured(config, kind, there, lengths, packed_mixes(workload, lengths), clock)
        refs = {name: _refs(samples, name) for name in config.encoders}
        degrees = _tensor_degrees(run_spec, family_from_config(config), count)
        # The data's sizes, devices, backbone and interference; then what only several devices or trials have.
        clock.num_parts = 4 + len(refs) + (count > 1) + len(degrees) + trials
        clock.twice(partial(found.side_by_side, count, refs))
        clock.twice(partial(found.together, count, refs))
        for tp in degrees:
            clock.twice(partial(found.group, tp))
        profile = found.profile(run_spec)
        warnings = (*clock.lost, *profile_warnings(profile, load_average))
        if trials:
            with clock("trials"):
                try:
                    profile = run_trials(asked, profile, num_devices, progress or (lambda what: None))
                except FlowTrainError as error:  # what was measured before stays
                    warnings = (*warnings, f"the profile has no trials: {error}")
    return ProfileReport(profile, count, clock.seconds, warnings)


def _most_tokens(config: RunConfig, run_spec: RunSpec, workload: Workload, kind: str) -> int:
    """Tokens of the largest microbatch that a plan with ``mode: auto`` may choose; 0 on accelerators.

    Of any configured mode: the same profile is for all. On accelerators activations of so many tokens might not fit the
    memory, with the recomputation that is configured.
    """
    if kind != "CPU":
        return 0
    of_auto = config.model_copy(update={"mode": "auto"})
    choices = backbone_choices(of_auto, run_spec.model_spec.backbone, workload, on_cpu=True)
    return max((each.microbatch_tokens for each in choices), default=0)


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
        self,
        config: RunConfig,
        kind: str,
        devices_per_node: int,
        lengths: tuple[int, ...],
        mixes: tuple[tuple[Mix, ...], ...],
        clock: _Clock,
    ) -> None:
        self._config, self._per_node, self._profilers = config, devices_per_node, Profilers(config, kind)
        self._lengths, self._mixes, self._clock = lengths, mixes, clock
        self._on_cpu = kind == "CPU"
        self._devices: list[DeviceReport] = []
        self._backbones: dict[int, BackboneTimes] = {}
        self._encoders: dict[str, EncoderTimes] = {}
        self._interference: dict[str, Interference] = {}
        self._alone: ReplicaSteps | None = None
        self._of_two = OfTwo(0.0, {}, 0.0, 0.0)
        self._feeding_s = 0.0

    def side_by_side(self, count: int, refs: Mapping[str, Sequence[SampleRef]]) -> None:
        """Measure everything of a device alone, on ``count`` devices at once."""
        profilers = self._profilers
        with profilers.started([(0, Degrees())] * count) as actors:
            with self._clock("devices"):
                self._devices = profilers.answers([actor.start.remote(LOOPBACK, 0) for actor in actors])
                self._calls = profilers.calls(actors[0])
                if self._on_cpu:
                    (self._feeding_s,) = profilers.measured([actors[0].feeding_s.remote()])
            for name in refs:
                with self._clock(f"encoders.{name}"):
                    times = profilers.measured([actor.encoder.remote(name, refs[name]) for actor in actors])
                self._encoders[name] = mean_encoder(times)
            with self._clock("backbone"):
                times = profilers.measured([actor.backbone.remote(self._mixes) for actor in actors])
                self._backbones[1] = mean_backbone(times)
                if self._on_cpu and count > 1:
                    steps = [actor.replica_steps.remote(self._shortest, "full") for actor in actors]
                    self._alone = mean_steps(profilers.measured(steps))

    def together(self, count: int, refs: Mapping[str, Sequence[SampleRef]]) -> None:
        """Measure what processes on one device and replicas cost each other."""
        with self._clock("interference"):
            self._interference = measure_interference(self._profilers, self._longest[0], refs)
        if count > 1:
            with self._clock("replicas"):
                self._of_two = measure_two(self._profilers, self._shortest)
                self._devices = [replace(each, link=self._of_two.link) for each in self._devices]

    def group(self, tp: int) -> None:
        """Measure the backbone split over ``tp`` devices, and the links between them."""
        degrees, profilers = Degrees(tp=tp), self._profilers
        with profilers.started([(rank, degrees) for rank in range(tp)]) as actors, self._clock(f"backbone, tp={tp}"):
            host = LOOPBACK  # a tensor parallel group stays on its node
            (port,) = profilers.answers([actors[0].open_rendezvous.remote(host)])
            reports = profilers.answers([actor.start.remote(host, port) for actor in actors])
            link = min(report.link or 0.0 for report in reports)
            self._devices = [replace(each, link=link) for each in self._devices]
            times = profilers.measured([actor.backbone.remote(self._mixes) for actor in actors])
            self._backbones[tp] = mean_backbone(times)

    def profile(self, run_spec: RunSpec) -> Profile:
        """Put everything together."""
        tokens = self._lengths
        alone = self._backbones[1]
        return Profile(
            device=self._devices[0].name,
            facts=slowest_facts(self._devices, self._per_node),
            model=model_facts(self._config, run_spec.model_spec),
            versions=library_versions(),
            layers={tp: LengthTable(tokens, times.layers_s) for tp, times in self._backbones.items()},
            heads={tp: LengthTable(tokens, times.heads_s) for tp, times in self._backbones.items()},
            connectors={tp: LengthTable(tokens, times.connectors_s) for tp, times in self._backbones.items()},
            connector_rows={tp: times.vision_tokens for tp, times in self._backbones.items()},
            embeddings={tp: LengthTable(tokens, times.embeddings_s) for tp, times in self._backbones.items()},
            attention={
                tp: AttentionCosts(times.square_s, times.squares, times.ragged_s, times.ragged)
                for tp, times in self._backbones.items()
            },
            losses={
                tp: LossCosts(
                    times.losses.counts,
                    times.losses.seconds,
                    times.targets,
                    times.losses.forward_share if times.losses.seconds[-1] > 0.0 else None,
                )
                for tp, times in self._backbones.items()
            },
            strategies=_strategies(alone.strategies),
            encoder_strategies={name: _strategies(times.strategies) for name, times in self._encoders.items()},
            encoders={
                name: {1: ImageTable(times.num_patches, times.batch, times.seconds)}
                for name, times in self._encoders.items()
            },
            images={
                name: ImageCosts(times.decode_s, BATCH_CALLS * self._call_s) for name, times in self._encoders.items()
            },
            forward_share=alone.forward_share,
            head_forward_share=alone.head_forward_share,
            steps=self._step_costs(alone),
            interference=self._interference,
            replicas={
                sharding: replica_costs(self._alone, steps, alone.step_s, alone.parameter_s)
                for sharding, steps in self._of_two.steps.items()
                if self._alone is not None
            },
            host=HostCosts(self._feeding_s, self._calls.asking_s, self._calls.answering_s) if self._on_cpu else None,
        )

    @property
    def _longest(self) -> tuple[Mix, ...]:
        return tuple(by_length[-1] for by_length in self._mixes)

    @property
    def _shortest(self) -> tuple[Mix, ...]:
        return tuple(by_length[0] for by_length in self._mixes)

    @property
    def _call_s(self) -> float:
        """Seconds that a call takes from a device."""
        return self._calls.asking_s if self._on_cpu else self._calls.wall_s

    def _step_costs(self, alone: BackboneTimes) -> StepCosts:
        # A CPU next to an accelerator assembles and locates microbatches meanwhile; a core that is the device cannot.
        microbatch_s = alone.assembling_s + MICROBATCH_CALLS * self._call_s if self._on_cpu else 0.0
        step_s = alone.step_s + REPLICA_CALLS * self._call_s
        two = self._of_two
        return StepCosts(
            step_s,
            microbatch_s,
            alone.parameter_s,
            two.messages_s,
            ends_s=alone.ends_s,
            ends_parameter_s=alone.ends_parameter_s,
            ends_forward_share=alone.ends_forward_share,
            first_backward_parameter_s=alone.first_backward_parameter_s,
            launch_s=two.launch_s,
            pass_s=alone.pass_s,
            pass_forward_share=alone.pass_forward_share,
        )


def _strategies(found: Mapping[str, LayerTimes]) -> Strategies:
    return {
        word: StrategyCosts(found[word].num_tokens, found[word].seconds, found[word].kept_nbytes)
        for word in get_args(LayerStrategy)
        if word in found
    }


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
