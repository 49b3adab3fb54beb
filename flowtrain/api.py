"""FlowTrain from Python: each function does what the command of the same name does; the CLI only wraps these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flowtrain.config.home import expanded
from flowtrain.config.kept_choices import with_kept_choices
from flowtrain.config.run import RunConfig
from flowtrain.config.starting_file import starting_file
from flowtrain.controller.resolve import ConfigLike, PlanLike, resolve, start_of
from flowtrain.errors import ConfigError
from flowtrain.observability.callback import check_callbacks
from flowtrain.observability.run_dir import RunDir, check_run_dir, find_run
from flowtrain.observability.trace_request import TraceAnswer, TraceWindow, request_trace
from flowtrain.observability.trackers.registry import check_tracker_classes

if TYPE_CHECKING:
    from flowtrain.allocator.program.solvers import SolverName
    from flowtrain.controller.calibration import CalibrationReport
    from flowtrain.controller.dataset.report import DataReport
    from flowtrain.controller.dataset.show import ShownSample
    from flowtrain.controller.doctor.report import DoctorReport
    from flowtrain.controller.dry_run import DryRunReport
    from flowtrain.controller.export import Exported
    from flowtrain.controller.pack import PackReport, Progress
    from flowtrain.controller.planning.devices import AskedDevices
    from flowtrain.controller.planning.planned import Planned
    from flowtrain.controller.planning.report import PlanReport
    from flowtrain.controller.profiling import ProfileReport
    from flowtrain.controller.simulation import SimulationReport
    from flowtrain.controller.starting_config import StartingConfig
    from flowtrain.controller.summary import RunSummary
    from flowtrain.costs.profile import Profile
    from flowtrain.observability.report.status import RunStatus


def init(
    model: str | PathLike[str],
    *,
    data: str | None = None,
    encoder: str | None = None,
    output: str | PathLike[str] | None = None,
    force: bool = False,
) -> StartingConfig:
    """Write a configuration to start from, for a checkpoint: a directory or hub id.

    Of the model only configuration, tokenizer and processor are read. The family follows from its type; a language
    model becomes the backbone of a new llava model.

    data: a path or URL for ``data.sources``; without it the file has a place to fill in.
    encoder: the vision tower of a language model; by default a SigLIP of the hub.
    output: the file to write; by default the model's name in this directory.
    force: replace the file if it is there.

    Raises ConfigError, with the reason, for a model that FlowTrain does not train, and if the file exists.
    """
    file = starting_file(str(model), output, force)
    from flowtrain.controller.starting_config import starting_config

    started = starting_config(str(model), data, encoder, file)
    try:
        file.write_text(started.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {file}: the file cannot be written: {error.strerror}") from error
    return started


def train(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    resume: bool = False,
    *,
    plan: PlanLike | None = None,
    devices: int | None = None,
    callbacks: Sequence[object] = (),
    planned: Callable[[PlanReport], None] = lambda report: None,
    loading: Callable[[RunConfig], AbstractContextManager[object]] = lambda config: nullcontext(),
) -> RunSummary:
    """Train, and return how the run ended.

    config: a configuration, or the path of a YAML file. With ``mode: auto`` and no plan, one is made for the devices of
        the cluster, and the run starts it; a run that is resumed goes on with its own ``plan.yaml``.
    overrides: ``section.key=value``, applied in order.
    resume: go on from the last complete checkpoint.
    plan: the ``plan`` of a report of ``flowtrain.plan``, or a ``plan.yaml``. It sets mode, degrees and resources;
        overrides win.
    devices: with ``mode: auto``, at most so many of the cluster's devices.
    callbacks: follow the run, see ``flowtrain.Callback``; they are called in threads of this process.
    planned: called with the report of the plan that ``mode: auto`` starts.
    loading: context that is entered while libraries are imported.

    Raises ConfigError before anything starts, other FlowTrainErrors later.
    """
    given = check_callbacks(callbacks)
    start = start_of(config, overrides, resume, plan, devices)
    check_run_dir(start.config, resume)
    check_tracker_classes(start.config)
    # Ray and torch are imported only once the configuration is known to be good.
    with loading(start.config):
        from flowtrain.controller.auto_mode import planned_on_cluster
        from flowtrain.controller.first_weights import check_first_weights
        from flowtrain.controller.run import run_training
        from flowtrain.controller.run_report import report_at_end

    check_first_weights(start.config, resume)  # before a cluster is started, also for a plan
    with report_at_end(start.config) as ending:
        if not start.is_open:
            return run_training(start.config, resume, plan=start.plan, callbacks=given)
        with planned_on_cluster(start.config, devices) as report:
            decided = start.decided(report.plan)
            planned(report)
            ending.planning = report.as_record()
            summary = run_training(decided, resume, plan=report.plan, callbacks=given)
            return replace(summary, planned_tokens_per_s=report.tokens_per_s)


def dry_run(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    resume: bool = False,
    *,
    plan: PlanLike | None = None,
    devices: int | None = None,
) -> DryRunReport:
    """Return what ``train`` with the same arguments would do: actors, steps, data sizes, memory, resume point.

    Starts nothing, changes nothing and needs no cluster: with ``mode: auto`` the plan is for this machine's devices, or
    for ``devices`` of them. It imports the classes of ``observability.trackers``, as ``train`` does. Raises the
    ConfigError or DataError that ``train`` would.
    """
    start = start_of(config, overrides, resume, plan, devices)
    check_run_dir(start.config, resume)
    check_tracker_classes(start.config)
    from flowtrain.controller.dry_run import foresee_run
    from flowtrain.controller.first_weights import check_first_weights

    check_first_weights(start.config, resume)
    if not start.is_open:
        return foresee_run(start.config, resume, start.plan)
    from flowtrain.controller.auto_mode import planned_here

    report = planned_here(start.config, devices)
    return replace(foresee_run(start.decided(report.plan), resume, report.plan), planning=report)


def plan(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    device: str | Sequence[str] = (),
    devices: int | None = None,
    nodes: int | None = None,
    solver: SolverName = "auto",
    profile: str | PathLike[str] | None = None,
) -> PlanReport:
    """Choose mode, parallel degrees and settings (FlowTrain 3.3), from measured or data-sheet rates.

    config: a run, whose first steps are sized as by ``pack``, or a model file of ``configs/models``. With ``mode:
        auto`` all modes are compared, otherwise the configured one is planned.
    device: type of device; by default an H200, or the type that the profile was measured on. Several types need their
        counts: ``h200=64``, or ``h200=8x8`` for 8 nodes of 8.
    devices: number of devices; by default as many as the run's own degrees take.
    nodes: number of nodes; by default as many as it takes with 8 devices each.
    profile: a file that ``flowtrain profile`` wrote; by default that of ``allocator.profile``.

    Starts nothing. Pass the report's ``plan`` to ``train``. Raises ConfigError, DataError.
    """
    from flowtrain.controller.planning.report import make_report

    planned, asked, measured = _to_plan(config, overrides, device, devices, nodes, profile)
    return make_report(planned, asked, solver=solver, profile=measured)


def simulate(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    device: str | Sequence[str] = (),
    devices: int | None = None,
    nodes: int | None = None,
    profile: str | PathLike[str] | None = None,
    num_steps: int = 12,
    compare: bool = False,
    encoder_spread: float = 0.0,
    losses: Sequence[str] = (),
) -> SimulationReport:
    """Plan as ``plan`` does, then time the steps of the plan in virtual time (docs/simulator.md).

    Other arguments are those of ``plan``.

    num_steps: least number of steps; the second half counts.
    compare: simulate the best plan of every mode, as with ``mode: auto``.
    encoder_spread: standard deviation of the time of an encoder's forward over its mean.
    losses: processes that are lost, ``MODULE@SECONDS+DOWN`` each: a replica of an encoder, or a ``feeder``, is gone for
        DOWN seconds (30 if left out) from so many seconds after the start of the run.

    Starts nothing. Raises ConfigError, DataError.
    """
    if num_steps < 2:
        raise ConfigError(f"num_steps (--steps) is {num_steps}; it must be at least 2, since the second half counts")
    if not 0.0 <= encoder_spread < math.inf:
        raise ConfigError(f"encoder_spread (--encoder-spread) is {encoder_spread}; it must be 0 or more")
    from flowtrain.controller.simulation import loss_of, simulate_plan
    from flowtrain.simulator.flow_run import Disturbances

    if compare and any(each.startswith("mode=") for each in overrides):
        raise ConfigError("compare (--compare) simulates all modes, and a mode is given (--mode, mode=); leave one out")
    changes = (*overrides, "mode=auto") if compare else tuple(overrides)
    lost = tuple(map(loss_of, losses))
    planned, asked, measured = _to_plan(config, changes, device, devices, nodes, profile)
    disturbances = Disturbances(encoder_spread, lost, planned.config.seed)
    return simulate_plan(planned, asked, profile=measured, num_steps=num_steps, disturbances=disturbances)


def _to_plan(
    config: ConfigLike,
    overrides: Sequence[str],
    device: str | Sequence[str],
    devices: int | None,
    nodes: int | None,
    profile: str | PathLike[str] | None,
) -> tuple[Planned, AskedDevices, Profile | None]:
    """What is planned, for which devices, with which measured rates; arguments as of ``plan``."""
    from flowtrain.controller.planning.devices import AskedDevices
    from flowtrain.controller.planning.planned import is_model_file, planned_model
    from flowtrain.costs.profile import configured_profile, read_profile

    for name, count in (("devices", devices), ("nodes", nodes)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} (--{name}) is {count}; it must be at least 1")
    measured = read_profile(profile) if profile is not None else None
    if not isinstance(config, RunConfig) and is_model_file(config):
        planned = planned_model(config, overrides)
    else:
        resolved = with_kept_choices(resolve(config, overrides), overrides)
        measured = configured_profile(resolved) if measured is None else measured
        from flowtrain.controller.planning.planned_run import planned_run

        planned = planned_run(resolved)
    types = (device,) if isinstance(device, str) else tuple(device)
    return planned, AskedDevices(types, devices, nodes), measured


def profile(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    devices: int | None = None,
    trials: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ProfileReport:
    """Measure a run's modules on the available devices, for ``plan`` (FlowTrain 3.3); keeps nothing that it trains.

    devices: how many measure at the same time; by default those of the largest node, eight at most.
    trials: also run the plans that look fastest for a few steps, on ``devices`` or all of the cluster's, and correct
        predicted rates by them; with ``mode: auto`` plans of all modes.
    progress: called in words with the name of each measurement before it starts, and which one it is of how many; and
        with why some are made again.

    Raises ConfigError or DataError if the run could not work, ResourceError if devices are missing or a process is lost
    twice.
    """
    resolved = resolve(config, overrides)
    from flowtrain.controller.profiling import measure

    return measure(resolved, devices, progress, trials=trials)


def calibrate(*runs: str | PathLike[str], profile: str | PathLike[str] | None = None) -> CalibrationReport:
    """Fit predicted times to finished runs' traces; the report's profile is for ``plan`` and ``simulate``.

    runs: directories of runs of one model, or their names under ``runs``; several even out each other's noise.
    profile: a file with the times that are fitted; by default the one that the first run was planned with, else that
    run's own.

    Raises ConfigError if a run has no trace, if runs train different models, or if nothing predicts times of their
    device.
    """
    from flowtrain.controller.calibration import calibrate_runs

    if not runs:
        raise ConfigError("calibrate got no run; name at least one")
    roots = [find_run(run) for run in runs]
    return calibrate_runs(roots, Path(profile).expanduser() if profile is not None else None)


def pack(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    num_steps: int | None = None,
    compare: bool = False,
    lengths: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Return how the first steps of a run pack: fill, balance, cost. Reads only sizes and needs no cluster.

    num_steps: number of steps; by default 50, or all if there are fewer.
    compare: use every method and policy, not only the configured one. Steps are simulated if the times of the devices
        are known.
    lengths: a CSV with the columns ``num_image_tiles`` and ``num_tokens``, used instead of the data. ``config`` may be
        such a CSV too; ``overrides`` then change default settings.
    progress: called with what is being done, how much is done, and how much there is.

    Raises ConfigError or DataError.
    """
    if num_steps is not None and num_steps < 1:
        raise ConfigError(f"num_steps (--steps) is {num_steps}; it must be at least 1")
    alone = not isinstance(config, RunConfig) and Path(config).suffix.lower() == ".csv"
    if alone and lengths is not None:
        raise ConfigError(f"both {config} and {lengths} would replace the data; give one of them")
    # The configuration is checked before anything that is slow to import.
    resolved = None if alone else resolve(config, overrides, check_paths=lengths is None)
    from flowtrain.controller import pack_csv
    from flowtrain.controller.pack import report_workload

    if resolved is None:
        workload = pack_csv.workload_alone(str(config), overrides, num_steps)
    elif lengths is not None:
        workload = pack_csv.workload_of(str(lengths), resolved, num_steps)
    else:
        from flowtrain.controller.predict import run_workload

        workload = run_workload(resolved, num_steps, compare, progress)
    return report_workload(workload, compare, progress)


def data_check(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    workers: int | None = None,
    decode: bool = False,
    sizes: str | PathLike[str] | None = None,
    rejected: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> DataReport:
    """Look at every row of a run's data: sizes, what the run would quarantine, duplicates. Needs no cluster.

    workers: processes that read, by default one for each core; 1: this process reads. Several start anew, so a script
        that calls this needs its ``if __name__ == "__main__"``.
    decode: also decode every image, as encoders do.
    sizes: a CSV to write, with the sizes of all samples, for ``pack``.
    rejected: a file to write, with a JSON object for each row that would be quarantined.
    progress: as for ``pack``.

    Raises ConfigError; DataError or SourceReadError if a source cannot be used; WorkerLostError if a process dies.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers (--workers) is {workers}; it must be at least 1")
    resolved = resolve(config, overrides)
    from flowtrain.controller.dataset.check import check_data

    sizes_file = None if sizes is None else Path(sizes)
    rejected_file = None if rejected is None else Path(rejected)
    return check_data(resolved, workers, decode, sizes_file, rejected_file, progress)


def data_show(
    config: ConfigLike,
    overrides: Sequence[str] = (),
    *,
    rows: Sequence[int],
    source: str | None = None,
    evaluation: bool = False,
    save_images: str | PathLike[str] | None = None,
) -> list[ShownSample]:
    """Return samples as the model gets them: turns, tokens that bear loss, images, or why they are quarantined.

    rows: of one source, from 0.
    source: its name or its number from 0; None: the only one. With ``evaluation`` it is a held-out set.
    save_images: a directory to write each image to, as decoded and as the tower gets it.

    Raises ConfigError for a row or a source that is not there; DataError or SourceReadError if it cannot be read.
    """
    resolved = resolve(config, overrides)
    if evaluation and resolved.data.eval is None:
        raise ConfigError("evaluation (--eval): data.eval is not configured; leave --eval out, or set data.eval")
    from flowtrain.controller.dataset.show import show_rows

    return show_rows(resolved, rows, source, evaluation, None if save_images is None else Path(save_images))


def doctor(config: ConfigLike, overrides: Sequence[str] = (), *, plan: PlanLike | None = None) -> DoctorReport:
    """Return what the cluster has for a run, its measured transports, and whether the run can start; trains nothing.

    plan: sets mode, degrees and resources, as in ``train``. With ``mode: auto`` and no plan, one is made as there.

    Raises ConfigError or DataError if the run could not work anywhere, ResourceError if no cluster answers.
    """
    start = start_of(config, overrides, resume=False, plan=plan)
    from flowtrain.controller.doctor.examine import examine

    if not start.is_open:
        return examine(start.config)
    from flowtrain.controller.auto_mode import planned_on_cluster

    with planned_on_cluster(start.config) as report:
        return examine(start.decided(report.plan), report)


def trace(
    run: str | PathLike[str],
    steps: int = 10,
    *,
    profiler: bool = False,
    memory: bool = False,
    progress: Callable[[TraceAnswer], None] = lambda answer: None,
) -> TraceWindow:
    """Trace the next steps of a run that trains now in another process, and wait until they are done.

    The request goes through a file of the run's directory, ``run``, which only its owner can open.

    profiler, memory: the run also writes what torch's profiler, or the history of device memory, has of these steps.
    progress: called once when recording begins.

    Raises ConfigError if nothing trains there or no step is left, FlowTrainError if the run ends before a
    step is traced.
    """
    return request_trace(RunDir(expanded(run).absolute()), steps, profiler, memory, progress)


def export(
    run: str | PathLike[str],
    to: str | PathLike[str] | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    best: bool = False,
) -> Exported:
    """Write the last intact checkpoint of a run's directory as a Hugging Face directory, shard by shard.

    to: an empty or absent directory; by default ``export`` in the run's, which is replaced.
    dtype: of the weights; float32 is what was trained.
    best: write the best checkpoint by ``checkpoint.keep_best`` instead.

    Raises ConfigError, or CheckpointError if there is nothing to export.
    """
    from flowtrain.controller.export import export_run

    return export_run(Path(run), None if to is None else Path(to), dtype, best=best)


def report(
    *runs: str | PathLike[str],
    output: str | PathLike[str] | None = None,
    steps: tuple[int, int] | None = None,
    thumbnails: bool = True,
) -> Path:
    """Write a page about a run, or about several side by side, and return its path. Needs no cluster and no network.

    runs: directories, or names under ``./runs``; also of runs that go on, were killed, or are of earlier versions.
    output: by default ``report.html`` in the run's directory; of several runs ``comparison.html`` in this one.
    steps: the first and the last step of the timeline; by default three from the middle of the trace.
    thumbnails: show pictures of rejected and generated samples; a process of its own makes them.

    Raises ConfigError for what is no run, for steps that the trace has not, and if the file cannot be written.
    """
    from flowtrain.controller.run_report import write_report

    return write_report([find_run(run) for run in runs], None if output is None else Path(output), steps, thumbnails)


def status(run: str | PathLike[str]) -> RunStatus:
    """Return how a run stands, also while it runs elsewhere; it reads the run's files alone.

    run: a directory, or a name under ``./runs``. Raises ConfigError if it is no run.
    """
    from flowtrain.observability.report.status import status_of

    return status_of(find_run(run))
