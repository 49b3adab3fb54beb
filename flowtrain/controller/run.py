"""A training run from start to end: prepare, start the actors, watch them, tell who follows it, end cleanly."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ray.actor import ActorHandle

from flowtrain.actors.coordinator import start_flow
from flowtrain.config.emulated import check_resumes
from flowtrain.config.run import RunConfig
from flowtrain.controller import worker_group
from flowtrain.controller.commit import Committer
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.emulated import actor_classes
from flowtrain.controller.following import following, run_started, telling_the_end
from flowtrain.controller.hang_watch import HangWatch
from flowtrain.controller.opening import OpenRun, note_start, open_run, place
from flowtrain.controller.prepare import RunSpec, first_flow_settings, memory_shortage, prepare
from flowtrain.controller.recorder import Recorder
from flowtrain.controller.resume import check_goes_on, consumed_at, find_resume_point, other_reduction
from flowtrain.controller.run_traces import RunTraces
from flowtrain.controller.signals import stop_on_signals
from flowtrain.controller.state import Restart, Role, RunState
from flowtrain.controller.summary import RunSummary, summary_if_done
from flowtrain.controller.trace_desk import TraceDesk
from flowtrain.controller.watch import BackboneLost, StopRequested, Watcher
from flowtrain.controller.weights import fetch_weights
from flowtrain.controller.worker_group import ActorClasses, WorkerGroup
from flowtrain.emulation.check import emulation_note, host_warning
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.units import first_unit
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.run_dir import run_dir
from flowtrain.observability.stream import EventStream
from flowtrain.training import checkpoint_store
from flowtrain.types.events import CheckpointFailed, CheckpointWritten, CostFitted, Event
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import GradientReduction, RankStart
from flowtrain.types.run_plan import Plan


def run_training(
    config: RunConfig,
    resume: bool = False,
    classes: ActorClasses | None = None,
    plan: Plan | None = None,
    callbacks: Sequence[object] = (),
) -> RunSummary:
    """Train as the configuration says and return how it ended.

    resume: continue after the last complete checkpoint of a run with this name, or start if it has none. classes: the
    actors' plain classes, for tests. plan: as for ``prepare``. callbacks: follow the run, see ``flowtrain.Callback``.
    The caller must call ``check_run_dir`` first (before it imports this module).
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
        run = open_run(config, place(run_spec, display, stack), resume, display, stack)
        traces = RunTraces(run.files, run.start.step, config.observability.trace.steps)
        stack.callback(traces.close)
        stream, recorder = stack.enter_context(following(run.run_spec, run.files, run.start, display, callbacks))
        stack.enter_context(telling_the_end(stream, recorder, run_spec.num_steps, started))
        costs = CostKeeper(run.run_spec, run.files, run.start.cost, stream.note)
        note_start(run, stream)
        controller = Controller(run, recorder, costs, traces, stream, display, stop)
        stopped = controller.run(classes or actor_classes(config))
    return _summary(run, recorder, costs, stopped, started)


def _summary(run: OpenRun, recorder: Recorder, costs: CostKeeper, stopped: bool, started: float) -> RunSummary:
    last, num_steps = recorder.last, run.run_spec.num_steps
    step = last.step if last else run.start.step
    return RunSummary(
        directory=run.files.root,
        step=step,
        num_steps=num_steps,
        loss=last.loss if last else None,
        eval_loss=recorder.last_eval_loss,
        num_rejected=recorder.num_rejected,
        checkpoint=checkpoint_store.latest_complete(run.files.checkpoints),
        stopped=stopped and step < num_steps,
        duration_s=time.monotonic() - started,
        cost_r2=costs.r2,
        num_skipped=recorder.num_skipped,
        emulated=emulation_note(run.run_spec.config),
        host_warning=host_warning(recorder.rates.host_share),
        tokens_per_s=recorder.rates.tokens_per_s,
    )


class Controller:
    """Starts one worker group, watches it, passes its events on and commits its checkpoints."""

    def __init__(
        self,
        run: OpenRun,
        recorder: Recorder,
        costs: CostKeeper,
        traces: RunTraces,
        stream: EventStream,
        display: ProgressDisplay,
        stop: threading.Event,
    ) -> None:
        self._run = run
        self._run_spec: RunSpec = run.run_spec
        self._config = run.run_spec.config
        self._files = run.files
        self._start = run.start
        self._recorder = recorder
        self._costs = costs
        self._traces = traces
        self._stream = stream
        self._display = display
        self._stop = stop
        self._committer = Committer(self._run_spec, run.files, recorder, costs, stream.warn, stream.emit)
        self._run_id = secrets.token_hex(4)
        self._hangs: HangWatch | None = None

    def run(self, classes: ActorClasses) -> bool:
        """Start the actors and watch them until they are done; returns whether the run was stopped early."""
        # Again, since Ray has replaced the handler of SIGTERM by its own.
        with stop_on_signals(self._stop), self._probe():
            if self._stop.is_set():
                return True
            resumes = self._start.checkpoint is not None
            try:
                if self._config.emulation is None:
                    fetch_weights(self._config, self._run.group, resumes, self._display.phase, self._stop)
            except StopRequested:
                return True
            self._display.phase("starting actors, which load their models")
            coordinator = self._start_coordinator(classes)
            actors = worker_group.start_actors(
                self._config,
                self._run.specs,
                self._run.group,
                classes,
                coordinator,
                self._run_id,
                self._run_spec.num_steps,
                self._run_spec.indexes,
            )
            try:
                state = self._run_state(actors)
                watcher = self._watcher(actors, state)
                self._start_loops(actors, watcher)
                state.on_backbone_started()
                stopped = self._watch(actors, watcher, state)
                self._committer.finish()
                if not self._config.saves_at_end and self._recorder.last is not None:
                    self._recorder.flush(self._recorder.last.step)  # otherwise a checkpoint does
                return stopped
            except StopRequested:
                return True
            finally:
                actors.kill()

    def _start_coordinator(self, classes: ActorClasses) -> ActorHandle:
        remake_flow = partial(start_flow, self._config, self._run_spec.model_spec)
        make_flow = partial(remake_flow, self._flow_settings())
        return worker_group.start_coordinator(self._config, classes, make_flow, remake_flow)

    def _watch(self, actors: WorkerGroup, watcher: Watcher, state: RunState) -> bool:
        desk = TraceDesk(self._files, self._traces, actors, self._stream.note)
        limit_s = self._config.limits.collective_timeout_s
        hangs = self._hangs = HangWatch(
            actors, limit_s, self._files.stacks, lambda hang: watcher.note_hang(hang.name, hang.what)
        )
        is_emulated = self._config.emulation is not None

        def on_turn() -> None:
            desk.poll()
            if not is_emulated:
                hangs.poll()

        watcher.on_turn = on_turn
        lost: BackboneLost | None = None
        try:
            while True:
                try:
                    if lost is not None:
                        self._recover(actors, watcher, state, lost)
                        hangs.begin()
                    return watcher.until_end()
                except BackboneLost as error:
                    lost = error
        finally:
            desk.close()

    def _recover(self, actors: WorkerGroup, watcher: Watcher, state: RunState, lost: BackboneLost) -> None:
        """Start the backbone again from the last checkpoint, and have the steps after it done again."""
        noticed_s = time.monotonic()
        self._stream.warn(f"{lost.name} {lost.verb} ({lost.reason}); the backbone starts again from its last checkpoint")
        actors.end_backbone(self._config.limits.stop_timeout_s)
        watcher.take_pending_events()
        self._committer.forget_incomplete()
        num_again = self._go_back()
        ranks = tuple(actors.of_role(Role.BACKBONE))
        actors.link.ask(CoordinatorApi.rewind, self._flow_settings(), ranks)
        actors.spawn_backbone()
        state.on_backbone_started()
        self._start_backbone(actors, watcher)
        self._run_backbone(actors)
        down_s = time.monotonic() - noticed_s
        self._stream.note(f"the backbone runs again after {down_s:.1f} s, from step {self._start.step + 1} on")
        self._recorder.restarted(lost.name, Role.BACKBONE, lost.reason, down_s, num_again)

    def _go_back(self) -> int:
        """Go back to the last checkpoint; returns the number of steps that are done again."""
        self._start = find_resume_point(self._files, self._run_spec, ())
        self._probed_directory.mkdir(exist_ok=True)  # that has removed it with other temporaries
        self._costs.rewind(self._start.cost)
        return self._recorder.rewind(self._start.step, consumed_at(self._start))

    def _run_state(self, actors: WorkerGroup) -> RunState:
        limits, modules = self._config.limits, {spec.name: spec.module for spec in self._run.specs}

        def shortage(encoders: Sequence[str]) -> str | None:
            return memory_shortage(self._run_spec, [modules[name] for name in encoders])

        return RunState(
            actors.roles,
            limits.max_encoder_restarts,
            self._config.data.max_rejected_fraction,
            shortage,
            actors.leaders,
            # Emulated devices have no state to go back to.
            limits.max_backbone_restarts if self._config.emulation is None else 0,
        )

    def _watcher(self, actors: WorkerGroup, state: RunState) -> Watcher:
        def restarted(restart: Restart) -> None:
            self._recorder.restarted(restart.name, actors.roles[restart.name], restart.reason)

        return Watcher(actors, state, self._config.limits, self._take, self._stream.note, self._stop, restarted)

    def _start_loops(self, actors: WorkerGroup, watcher: Watcher) -> None:
        actors.run_producers()
        started = self._start_backbone(actors, watcher)
        peak = self._recorder.peak = started.peak
        self._stream.note(f"mfu: over {peak.flops / 1e12:.4g} TFLOP/s of a device ({peak.device}; {peak.source})")
        self._note_reduction(started.reduction)
        self._stream.note(f"sharding: {started.sharding.name} ({started.sharding.reason})")
        self._costs.start(peak.device)
        self._stream.emit(run_started(self._run_spec, self._files, self._start, peak.device, actors.roles.values()))
        self._display.phase(f"waiting for step {self._start.step + 1}")
        self._run_backbone(actors)

    def _start_backbone(self, actors: WorkerGroup, watcher: Watcher) -> RankStart:
        deadline_s = time.monotonic() + self._config.limits.start_limit_s
        results = partial(watcher.results, deadline_s=deadline_s, what="starting the backbone")
        checkpoint = str(self._start.checkpoint) if self._start.checkpoint else None
        settings, evaluations = self._config.backbone, self._run_spec.evaluations
        return worker_group.start_backbone(actors, settings, checkpoint, evaluations, results)

    def _run_backbone(self, actors: WorkerGroup) -> None:
        unit = first_unit(self._flow_settings())
        for name in actors.of_role(Role.BACKBONE):
            actors.run(name, unit, self._start.step, str(self._files.checkpoints))

    def _note_reduction(self, reduction: GradientReduction) -> None:
        self._stream.note(f"gradient_reduction: {reduction.name} ({reduction.reason})")
        self._committer.gradient_reduction = reduction.name
        is_auto = self._config.backbone.gradient_reduction == "auto"
        if is_auto and (line := other_reduction(self._start, reduction)) is not None:
            self._stream.warn(line)

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
        self._probed_directory.mkdir()
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                self._probed_directory.rmdir()

    @property
    def _probed_directory(self) -> Path:
        return checkpoint_store.probe_directory(self._files.checkpoints, self._run_id)

    def _take(self, event: Event) -> None:
        self._recorder.take(event)
        if self._hangs is not None:
            self._hangs.take(event)
        self._traces.take(event)
        if isinstance(event, CostFitted):
            self._costs.take(event)
        elif isinstance(event, CheckpointWritten):
            self._committer.commit(event)
        elif isinstance(event, CheckpointFailed):
            self._committer.failed(event)
