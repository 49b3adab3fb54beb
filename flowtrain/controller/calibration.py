"""``flowtrain calibrate``: fits predicted times to a finished run's trace, and puts the factors into its profile.

No Ray, no torch. A span's predicted time counts the data's mean mix of its tokens or images; factors are robust means.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.costs.action_times import ActionTimes, DeviceTimes, StageWork
from flowtrain.costs.calibration import FEWEST, Calibration, factor, robust_mean
from flowtrain.costs.cluster import DeviceType, data_sheet_device_type
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.devices import device_spec
from flowtrain.costs.microbatches import MicrobatchColumns
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import (
    DeviceFacts,
    Profile,
    configured_profile,
    library_versions,
    model_facts,
    read_profile,
)
from flowtrain.costs.profiled_times import CPU
from flowtrain.emulation.process import BACKBONE, EmulatedRun
from flowtrain.errors import ConfigError
from flowtrain.observability.metrics import read_metrics
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.trace import read_spans
from flowtrain.pipeline.actions import StageModule
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.partition import Partition
from flowtrain.simulator.step import stage_work
from flowtrain.types.messages import Span

_COMPUTING = ("forward", "backward")
_UPDATE = "optimizer"
_PP_RANK = re.compile(r"-pp(\d+)")


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The calibrated profile, and the number of steps that it comes from."""

    profile: Profile
    num_steps: int

    @property
    def calibration(self) -> Calibration:
        """The factors."""
        assert self.profile.calibration is not None
        return self.profile.calibration


def calibrate_run(root: Path, profile: Path | None = None) -> CalibrationReport:
    """Fit the times of a finished run's profile, or of data sheets, to its trace.

    profile: the file whose times are fitted; None: the one that the run was planned with, else the run's own. Raises
    ConfigError if the run has no trace, if its data are gone, or if nothing predicts times of its device.
    """
    files = RunDir(root)
    config = files.load_config()
    base, own = _base_of(config, files, profile)
    planned = planned_run(config)
    times = _times_of(config, planned, base)
    steps = _steps_of(files, config)
    fit = _Fit(config, planned, times)
    for step in steps:
        fit.add(step)
    found = base or Profile(times.device.name, model_facts(config, planned.model), library_versions())
    if found.facts is None:
        device = times.device
        facts = DeviceFacts(
            device.flops, device.memory_nbytes, device.bandwidth, device.links.node, device.devices_per_node
        )
        found = replace(found, device=device.name, facts=facts)
    microbatches = own.microbatches if own is not None else found.microbatches
    calibrated = replace(found, calibration=fit.calibration(config.name), microbatches=microbatches)
    return CalibrationReport(calibrated, len(steps))


def _base_of(config: RunConfig, files: RunDir, given: Path | None) -> tuple[Profile | None, Profile | None]:
    """The profile whose times are fitted, without its factors, and the run's own; None if there is none."""
    own = read_profile(files.profile) if files.profile.is_file() else None
    base = read_profile(given) if given is not None else configured_profile(config) or own
    return (None if base is None else replace(base, calibration=None)), own


def _times_of(config: RunConfig, planned: Planned, base: Profile | None) -> DeviceTimes:
    device = _device_of(config, base)
    return DeviceTimes(
        device,
        planned.model,
        configured_setup(config, on_cpu=device.name == CPU),
        config.frozen_modules,
        base,
        {name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
        {name: encoder.decode_threads for name, encoder in config.encoders.items()},
        OperatorRules.of(config.costs),
    )


def _device_of(config: RunConfig, base: Profile | None) -> DeviceType:
    if config.emulation is not None:
        return EmulatedRun.of(config).device_type(BACKBONE)
    count = fixed_plan(config).backbone.num_actors
    if base is not None and base.facts is not None:
        return base.devices(count, base.facts.devices_per_node)
    spec = device_spec(base.device) if base is not None else None
    if spec is None:
        name = "its device" if base is None else base.device
        raise ConfigError(
            f"run {config.name}: no data sheet and no measured times tell what {name} should take; give a profile "
            "that flowtrain profile measured there (--profile FILE)"
        )
    return data_sheet_device_type(spec.key, count, dtype=config.model.dtype)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's spans; seconds are the devices'."""

    seconds: float
    starved_s: float
    spans: tuple[Span, ...]
    scale: float
    """Seconds of this machine in one of the devices'."""

    def seconds_of(self, span: Span) -> float:
        return (span.end_s - span.start_s) / self.scale


def _steps_of(files: RunDir, config: RunConfig) -> list[_Step]:
    """Steps whose spans are in the trace; the first one after a start, in which everything is made, is left out."""
    spans = read_spans(files.trace) if files.trace.is_file() else []
    work = sorted(
        (each for each in spans if each.name in (*_COMPUTING, _UPDATE, "encode")), key=lambda each: each.end_s
    )
    lines = list(read_metrics(files.metrics)) if files.metrics.is_file() else []
    scale = config.emulation.time_scale if config.emulation is not None else 1.0
    steps = []
    for before, line in pairwise(lines):
        first, last = before["timestamp"], line["timestamp"]
        inside = tuple(each for each in work if first < each.end_s <= last)
        if any(each.name == _UPDATE for each in inside):
            steps.append(_Step(line["step_time_s"], line["starved_s"], inside, scale))
    if not steps:
        raise ConfigError(
            f"{files.root}: its trace has no whole step after the first; train a run with observability.trace.steps=8 "
            "and training.max_steps=10 or more, then calibrate that"
        )
    return steps


class _Fit:
    """Collects measured and predicted seconds by what they are of."""

    def __init__(self, config: RunConfig, planned: Planned, times: DeviceTimes) -> None:
        degrees = fixed_plan(config).backbone.degrees
        self._config, self._planned, self._times, self._degrees = config, planned, times, degrees
        self._actions = ActionTimes(times, degrees, degrees.dp)
        self._encoder = next(iter(config.encoders))
        self._partition: Partition = configured_partition(config, planned.model, degrees.pp)
        self._measured: defaultdict[str, list[float]] = defaultdict(list)
        self._predicted: defaultdict[str, list[float]] = defaultdict(list)
        self._host_s: list[float] = []
        lengths = planned.workload.lengths.astype(np.float64)
        self._squares = float(np.square(lengths).sum() / lengths.sum())

    def add(self, step: _Step) -> None:
        """Add the spans of a step."""
        busy: defaultdict[str, float] = defaultdict(float)
        for span in step.spans:
            seconds = step.seconds_of(span)
            if span.name != "encode":
                busy[span.actor] += seconds
            for kind, predicted in self._predictions(span):
                self._measured[kind].append(seconds)
                self._predicted[kind].append(predicted)
        if self._degrees.pp == 1 and busy:  # otherwise ranks wait for each other between their actions
            self._host_s.append(max(0.0, step.seconds - step.starved_s - max(busy.values())))

    def calibration(self, run: str) -> Calibration:
        """Return the factors."""
        factors = {kind: factor(self._measured[kind], self._predicted[kind]) for kind in self._measured}
        counted = [len(each) for each in self._measured.values() if len(each) >= FEWEST]
        return Calibration(
            run=run,
            backbone=factors.get(BACKBONE, 1.0),
            encoders={self._encoder: factors.get(self._encoder, 1.0)},
            optimizer=factors.get(_UPDATE, 1.0),
            step_host_s=robust_mean(self._host_s) if self._host_s else 0.0,
            num_spans=sum(counted),
        )

    def _predictions(self, span: Span) -> Iterator[tuple[str, float]]:
        """What a span is of, and its predicted seconds; nothing where that is not known."""
        if span.name == "encode":
            tp = self._config.encoders[self._encoder].tensor_parallel_size
            yield self._encoder, self._images_s(int(span.args.get("images", 0)), tp, in_ranks=False)
        elif span.name == _UPDATE:
            rank = min(self._degrees.pp - 1, _pp_rank(span.actor))
            works = [stage_work(self._partition, each, self._encoder) for each in self._partition.of_rank(rank)]
            if (seconds := self._actions.optimizer_s(works)) > 0:
                yield _UPDATE, seconds
        else:
            yield from self._of_stage(span)

    def _of_stage(self, span: Span) -> Iterator[tuple[str, float]]:
        module = StageModule(str(span.args["module"]))
        stage = self._partition.of_module(module)[int(span.args["stage"])]
        work = stage_work(self._partition, stage, self._encoder)
        if module is StageModule.ENCODER:
            images = int(span.args.get("images", 0))
            share = work.num_layers / self._planned.model.encoders[self._encoder].num_layers
            if not work.has_backward and images:
                yield self._encoder, share * self._images_s(images, self._degrees.tp, in_ranks=True)
            return
        yield BACKBONE, self._stage_s(work, float(span.args["num_tokens"]), is_backward=span.name == "backward")

    def _stage_s(self, work: StageWork, num_tokens: float, *, is_backward: bool) -> float:
        data, tokens = self._planned.workload, np.array([num_tokens])
        none = np.zeros(0, dtype=np.int64)
        columns = MicrobatchColumns(
            tokens,
            self._squares * tokens,
            data.vision_share * tokens,
            data.target_share * tokens,
            none,
            np.zeros(1, dtype=np.int64),
        )
        computing = float(self._actions.passes_s(work, columns)[is_backward][0])
        if self._degrees.dp > 1 and self._actions.gathers and self._times.device.name != CPU:
            computing += float(self._actions.gather_s(work, computing, of_backward=is_backward))
        return computing

    def _images_s(self, count: int, tp: int, *, in_ranks: bool) -> float:
        num_images, num_patches = self._planned.workload.images[self._encoder]
        mean = max(1, round(float(num_patches.sum()) / max(1, int(num_images.sum()))))
        return self._times.images_s(self._encoder, [mean] * count, tp, in_ranks=in_ranks)


def _pp_rank(actor: str) -> int:
    """The pipeline rank of a backbone actor, by its name (``backbone-dp0-pp1-tp0``)."""
    found = _PP_RANK.search(actor)
    return int(found[1]) if found is not None else 0
