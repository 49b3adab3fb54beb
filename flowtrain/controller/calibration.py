"""``flowtrain calibrate``: fits predicted times to finished runs' traces, and puts the factors into a profile.

No Ray, no torch. A span's predicted time counts the data's mean mix of its tokens or images; factors are robust means.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.run import RunConfig
from flowtrain.controller.calibration_fit import Fit, TracedStep, traced_steps
from flowtrain.controller.calibration_pairs import Pairs
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.costs.action_times import DeviceTimes
from flowtrain.costs.calibration import Calibration, robust_mean
from flowtrain.costs.cluster import DeviceType, data_sheet_device_type
from flowtrain.costs.configured_setup import configured_setup
from flowtrain.costs.devices import device_spec
from flowtrain.costs.operators import OperatorRules
from flowtrain.costs.profile import (
    DeviceFacts,
    Profile,
    configured_profile,
    library_versions,
    model_facts,
    module_facts,
    read_profile,
)
from flowtrain.costs.profiled_times import CPU
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.emulation.process import BACKBONE, EmulatedRun
from flowtrain.errors import ConfigError
from flowtrain.observability.files import read_json_lines
from flowtrain.observability.metrics import read_metrics
from flowtrain.observability.run_dir import RunDir
from flowtrain.observability.trace import read_spans
from flowtrain.search.partition import with_chosen_partition

_NO_STEP = (
    "its trace has no whole step after the first that no evaluation comes before; train a run with "
    "observability.trace.steps=8 and training.max_steps=10 or more, then calibrate that"
)
_DECIDED = re.compile(r"(sharding|gradient_reduction): (\w+) \(")
"""Notes of a run with what ``auto`` became."""


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


def calibrate_runs(roots: Sequence[Path], profile: Path | None = None) -> CalibrationReport:
    """Fit the times of a profile, or of data sheets, to the traces of finished runs of one model, one or more.

    profile: the file whose times are fitted; None: the one that the first run was planned with, else that run's own.
    Raises ConfigError if a run has no trace, if its data are gone, if runs train different models or on different
    devices, if the profile is of another model or device, or if nothing predicts times of their device.
    """
    runs = [_Run.of(root) for root in roots]
    first, pairs, num_steps, traced = runs[0], Pairs(), 0, list[list[TracedStep]]()
    base, own = _base_of(first.config, first.files, profile)
    facts = model_facts(first.config, first.planned.model)
    every = [_times_of(run, base) for run in runs]
    _check_alike(runs, every, base)
    for run, times in zip(runs, every, strict=True):
        fit = Fit(run.config, run.planned, times)
        steps = _traced(run.files, run.config)
        added = [fit.add(step, pairs) for step in steps]
        if not any(added):
            raise ConfigError(f"{run.files.root}: {_NO_STEP}")
        fit.end(pairs)
        num_steps += sum(added)
        traced.append(steps)
    times = every[0]
    found = base or Profile(times.device.name, facts, library_versions())
    if found.facts is None:
        device = times.device
        of_device = DeviceFacts(
            device.flops, device.memory_nbytes, device.bandwidth, device.links.node, device.devices_per_node
        )
        found = replace(found, device=device.name, facts=of_device)
    microbatches = own.microbatches if own is not None else found.microbatches
    calibration = pairs.calibration(", ".join(run.config.name for run in runs), list(first.config.encoders))
    fitted = replace(found, calibration=calibration, microbatches=microbatches)
    remainders: list[float] = []
    for run, times, steps in zip(runs, every, traced, strict=True):
        fit = Fit(run.config, run.planned, replace(times, profile=fitted))
        remainders += (each for each in map(fit.remainder_s, steps) if each is not None)
    if remainders:
        calibration = replace(calibration, step_host_s=max(0.0, robust_mean(remainders)))
    return CalibrationReport(replace(fitted, calibration=calibration), num_steps)


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished run."""

    files: RunDir
    config: RunConfig
    planned: Planned

    @classmethod
    def of(cls, root: Path) -> _Run:
        files = RunDir(root)
        config = files.load_config()
        planned = planned_run(config)
        return cls(files, with_chosen_partition(config, planned.model), planned)


def _check_alike(runs: Sequence[_Run], times: Sequence[DeviceTimes], base: Profile | None) -> None:
    """Raise ConfigError unless all runs, and the profile that is fitted, are of one model and device."""
    first = runs[0]
    facts = module_facts(first.config, first.planned.model)
    for run, each in zip(runs, times, strict=True):
        other = module_facts(run.config, run.planned.model)
        names = f"runs {first.config.name} and {run.config.name}"
        if other != facts:
            different = ", ".join(key for key in facts if other[key] != facts[key])
            raise ConfigError(f"{names} train different models ({different} differ); calibrate each by itself")
        if each.device.name != times[0].device.name:
            devices = f"{times[0].device.name} and {each.device.name}"
            raise ConfigError(f"{names} ran on different devices ({devices}); calibrate each by itself")
    if base is not None and base.is_measured:
        base.check_modules(times[0].device.name, facts)


def _base_of(config: RunConfig, files: RunDir, given: Path | None) -> tuple[Profile | None, Profile | None]:
    """The profile whose times are fitted, without its factors, and the run's own; None if there is none."""
    own = None
    if files.profile.is_file():
        try:
            own = read_profile(files.profile)
        except ConfigError as error:
            if given is None:
                raise ConfigError(f"{error}; then calibrate with --profile FILE, the one that it writes") from error
    base = read_profile(given) if given is not None else configured_profile(config) or own
    return (None if base is None else replace(base, calibration=None)), own


def _times_of(run: _Run, base: Profile | None) -> DeviceTimes:
    config = run.config
    device = _device_of(config, base)
    return DeviceTimes(
        device,
        run.planned.model,
        _setup_of(run.files, configured_setup(config, on_cpu=device.name == CPU)),
        config.frozen_modules,
        base,
        {name: encoder.max_batch_patches for name, encoder in config.encoders.items()},
        {name: encoder.decode_threads for name, encoder in config.encoders.items()},
        OperatorRules.of(config.costs),
    )


def _setup_of(files: RunDir, setup: TrainingSetup) -> TrainingSetup:
    """The setup with what the run itself decided, and told, when it started."""
    told = [str(line.get("text", "")) for line in read_json_lines(files.events)] if files.events.is_file() else []
    decided: dict[str, Any] = {found[1]: found[2] for found in map(_DECIDED.match, told) if found is not None}
    return replace(setup, **decided)


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
            f"run {config.name}: no data sheet and no measured times tell what {name} should take; measure there with "
            "flowtrain profile CONFIG --save FILE, and give --profile FILE"
        )
    return data_sheet_device_type(spec.key, count, dtype=config.model.dtype)


def _traced(files: RunDir, config: RunConfig) -> list[TracedStep]:
    """Steps whose spans are in the run's trace."""
    spans = read_spans(files.trace) if files.trace.is_file() else []
    lines = list(read_metrics(files.metrics)) if files.metrics.is_file() else []
    scale = config.emulation.time_scale if config.emulation is not None else 1.0
    return list(traced_steps(spans, lines, scale))
