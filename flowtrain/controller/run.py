"""A training run from start to end: prepare, start the actors, watch them, write the files, end cleanly."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial

import ray
from ray.util.placement_group import PlacementGroup

from flowtrain.actors.coordinator import start_flow
from flowtrain.actors.pooling import hbm_offer
from flowtrain.config.emulated import check_resumes
from flowtrain.config.run import RunConfig
from flowtrain.controller import cluster, worker_group
from flowtrain.controller.actor_specs import ActorSpec, actor_specs_of, bundles_of
from flowtrain.controller.commit import Committer
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.emulated import actor_classes
from flowtrain.controller.mps import nodes_without_mps, without_mps_text
from flowtrain.controller.prepare import RunSpec, first_flow_settings, memory_shortage, prepare, with_start_limit
from flowtrain.controller.recorder import Recorder
from flowtrain.controller.resume import (
    ResumePoint,
    changed_since,
    check_goes_on,
    find_resume_point,
    other_reduction,
)
from flowtrain.controller.signals import stop_on_signals
from flowtrain.controller.state import Role, RunState
from flowtrain.controller.summary import RunSummary, summary_if_done
from flowtrain.controller.watch import StopRequested, Watcher
from flowtrain.controller.weights import fetch_weights
from flowtrain.controller.worker_group import ActorClasses, WorkerGroup
from flowtrain.emulation.check import emulation_note, host_warning
from flowtrain.flow.consumed import ConsumedPositions
from flowtrain.flow.units import first_unit
from flowtrain.mempool.tiers.hbm import NO_ACCELERATOR
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.ray_sink import RayMetricsSink
from flowtrain.observability.run_dir import RunDir, held_run_dir, open_run_dir, run_dir
from flowtrain.training import checkpoint_store
from flowtrain.types.events import CheckpointFailed, CheckpointWritten, CostFitted, Event
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import GradientReduction
from flowtrain.types.run_plan import Plan


def run_training(
    config: RunConfig, resume: bool = False, classes: ActorClasses | None = None, plan: Plan | None = None
) -> RunSummary:
    """Train as the configuration says and return how it ended.

    resume: continue after the last complete checkpoint of a run with this name, or start if it has none. classes: the
    actors' plain classes, for tests. plan: as for ``prepare``. The caller must call ``check_run_dir`` first (before it
    imports this module).
    Raises FlowTrainError; in any case no actor and no pool memory is left behind.
    """
    assert config.mode != "auto", "a plan decides the mode before a run starts"
    started = time.monotonic()
    stop = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(stop_on_signals(stop))
        display = stack.enter_context(ProgressDisplay(config.observability.progress))
        display.phase("looking at data and models")
        check_resumes(config, resume)
        run_spec = prepare(config, plan=plan)
        if resume and (done := summary_if_done(config, run_spec, started)) is not None:
            return done
        if resume:
            check_goes_on(run_dir(config), run_spec)
        display.phase("connecting to Ray, or starting it")
        stack.enter_context(cluster.connected(config))
        run_spec = _with_devices(run_spec)
        specs = actor_specs_of(run_spec.plan)
        bundles = bundles_of(specs)
        segments_nbytes = sum(spec.segment_nbytes for spec in specs)
        strategy = cluster.check_resources(bundles, segments_nbytes, config.pool.network)
        display.phase(f"placing {len(specs)} actors")
        placing = cluster.placed(bundles, config.limits.placement_timeout_s, strategy)
        group = stack.enter_context(placing) if bundles else None
        run_spec = replace(run_spec, config=cluster.with_network(config, group))
        # Only now, so that a run for which the cluster has no room leaves no directory.
        stack.enter_context(held_run_dir(config))
        changed = changed_since(run_dir(config), config)
        files = open_run_dir(config, resume)
        files.write_plan(asdict(run_spec.plan))
        start = find_resume_point(files, run_spec, changed) if resume else ResumePoint()
        run_spec = with_start_limit(run_spec, resumes=start.checkpoint is not None)
        display.expect(run_spec.num_steps, start.step)
        stack.callback(display.close)  # before Ray ends, which takes a while
        _note_devices(run_spec, specs, display)
        if (note := emulation_note(config)) is not None:
            display.note(note)
        costs = CostKeeper(run_spec, files, start.cost, display.note)
        sink = RayMetricsSink().update if config.observability.ray_metrics else None
        consumed = ConsumedPositions.at(start.sampler_state) if start.sampler_state else ConsumedPositions()
        recorder = Recorder(run_spec, files, start.step, consumed, display, sink)
        stack.callback(recorder.close)
        if start.step:
            display.note(f"resuming {files.root} after step {start.step} of {run_spec.num_steps}")
        controller = Controller(run_spec, files, recorder, costs, display, start, stop)
        stopped = controller.run(specs, group, classes or actor_classes(config))
    checkpoint = checkpoint_store.latest_complete(files.checkpoints)
    last = recorder.last
    step = last.step if last else start.step
    return RunSummary(
        directory=files.root,
        step=step,
        num_steps=run_spec.num_steps,
        loss=last.loss if last else None,
        eval_loss=recorder.last_eval_loss,
        num_rejected=recorder.num_rejected,
        checkpoint=checkpoint,
        stopped=stopped and step < run_spec.num_steps,
        duration_s=time.monotonic() - started,
        cost_r2=costs.r2,
        num_skipped=recorder.num_skipped,
        emulated=emulation_note(config),
        host_warning=host_warning(recorder.rates.host_share),
        tokens_per_s=recorder.rates.tokens_per_s,
    )


class Controller:
    """Starts one worker group, watches it, records its events and commits its checkpoints."""

    def __init__(
        self,
        run_spec: RunSpec,
        files: RunDir,
        recorder: Recorder,
        costs: CostKeeper,
        display: ProgressDisplay,
        start: ResumePoint,
        stop: threading.Event,
    ) -> None:
        self._run_spec = run_spec
        self._config = run_spec.config
        self._files = files
        self._recorder = recorder
        self._costs = costs
        self._display = display
        self._start = start
        self._stop = stop
        self._committer = Committer(run_spec, files, recorder, costs, display.note)
        self._run_id = secrets.token_hex(4)

    def run(self, specs: list[ActorSpec], group: PlacementGroup | None, classes: ActorClasses) -> bool:
        """Start the actors and watch them until they are done; returns whether the run was stopped early."""
        # Again, since Ray has replaced the handler of SIGTERM by its own.
        with stop_on_signals(self._stop), self._probe():
            if self._stop.is_set():
                return True
            resumes = self._start.checkpoint is not None
            try:
                if self._config.emulation is None:
                    fetch_weights(self._config, group, resumes, self._display.phase, self._stop)
            except StopRequested:
                return True
            self._display.phase("starting actors, which load their models")
            make_flow = partial(start_flow, self._config, self._run_spec.model_spec, self._flow_settings())
            coordinator = worker_group.start_coordinator(self._config, classes, make_flow)
            actors = worker_group.start_actors(
                self._config,
                specs,
                group,
                classes,
                coordinator,
                self._run_id,
                self._run_spec.num_steps,
                self._run_spec.indexes,
            )
            try:
                watcher = self._watcher(actors, {spec.name: spec.module for spec in specs})
                self._start_loops(actors, watcher)
                stopped = watcher.until_end()
                self._committer.finish()
                if not self._config.saves_at_end and self._recorder.last is not None:
                    self._recorder.flush(self._recorder.last.step)  # otherwise a checkpoint does
                return stopped
            except StopRequested:
                return True
            finally:
                actors.kill()

    def _watcher(self, actors: WorkerGroup, modules: dict[str, str]) -> Watcher:
        limits = self._config.limits

        def shortage(encoders: Sequence[str]) -> str | None:
            return memory_shortage(self._run_spec, [modules[name] for name in encoders])

        rejected = self._config.data.max_rejected_fraction
        state = RunState(actors.roles, limits.max_encoder_restarts, rejected, shortage, actors.leaders)
        return Watcher(actors, state, limits, self._take, self._display.note, self._stop)

    def _start_loops(self, actors: WorkerGroup, watcher: Watcher) -> None:
        actors.run_producers()
        deadline_s = time.monotonic() + self._config.limits.start_limit_s
        results = partial(watcher.results, deadline_s=deadline_s, what="starting the backbone")
        checkpoint = str(self._start.checkpoint) if self._start.checkpoint else None
        settings, evaluations = self._config.backbone, self._run_spec.evaluations
        started = worker_group.start_backbone(actors, settings, checkpoint, evaluations, results)
        peak = self._recorder.peak = started.peak
        self._display.note(f"mfu: over {peak.flops / 1e12:.4g} TFLOP/s of a device ({peak.device}; {peak.source})")
        self._note_reduction(started.reduction)
        self._display.note(f"sharding: {started.sharding.name} ({started.sharding.reason})")
        self._costs.start(peak.device)
        self._display.phase(f"waiting for step {self._start.step + 1}")
        unit = first_unit(self._flow_settings())
        for name in actors.of_role(Role.BACKBONE):
            actors.run(name, unit, self._start.step, str(self._files.checkpoints))

    def _note_reduction(self, reduction: GradientReduction) -> None:
        self._display.note(f"gradient_reduction: {reduction.name} ({reduction.reason})")
        self._committer.gradient_reduction = reduction.name
        is_auto = self._config.backbone.gradient_reduction == "auto"
        if is_auto and (line := other_reduction(self._start, reduction)) is not None:
            self._display.note(line)

    def _flow_settings(self) -> FlowSettings:
        settings = first_flow_settings(self._run_spec)
        return replace(
            settings,
            start_step=self._start.step,
            sampler_state=self._start.sampler_state or settings.sampler_state,
            cost=self._costs.in_use,
            num_rejected=self._recorder.num_rejected,
            num_seen=self._recorder.num_seen,
        )

    @contextmanager
    def _probe(self) -> Iterator[None]:
        """A directory by which the ranks check that they share the run's file system."""
        probe = checkpoint_store.probe_directory(self._files.checkpoints, self._run_id)
        probe.mkdir()
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                probe.rmdir()

    def _take(self, event: Event) -> None:
        self._recorder.take(event)
        if isinstance(event, CostFitted):
            self._costs.take(event)
        elif isinstance(event, CheckpointWritten):
            self._committer.commit(event)
        elif isinstance(event, CheckpointFailed):
            self._committer.failed(event)


def _note_devices(run_spec: RunSpec, specs: Sequence[ActorSpec], display: ProgressDisplay) -> None:
    """Tell the user what encoder actors do with accelerators."""
    if not run_spec.config.has_encoder_actors:
        return
    has_device = any(spec.plan.num_devices for spec in specs)
    display.note(hbm_offer(run_spec.config.pool, None if has_device else NO_ACCELERATOR)[1])
    if any(spec.waits for spec in specs) and (lacking := nodes_without_mps()):
        display.note(without_mps_text(lacking))


def _with_devices(run_spec: RunSpec) -> RunSpec:
    """Plan without accelerators if the cluster has none."""
    if ray.cluster_resources().get("GPU", 0) < 1:
        return replace(run_spec, plan=run_spec.plan.without_devices())
    return run_spec
