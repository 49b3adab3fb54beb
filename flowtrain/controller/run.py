"""A training run from start to end: prepare, start the actors, watch them, tell who follows it, end cleanly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from flowtrain.config.emulated import check_resumes
from flowtrain.config.run import RunConfig
from flowtrain.controller import worker_group
from flowtrain.controller.commit import Committer
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.elastic import Parts, RoomWatch, StartsAnew, degrees_text
from flowtrain.controller.emulated import actor_classes
from flowtrain.controller.following import following, telling_the_end
from flowtrain.controller.group_run import GroupRun
from flowtrain.controller.history import History
from flowtrain.controller.keepers import Keepers
from flowtrain.controller.lost_nodes import NODE
from flowtrain.controller.opening import OpenRun, note_start, open_run, place
from flowtrain.controller.prepare import prepare
from flowtrain.controller.resume import check_goes_on
from flowtrain.controller.run_traces import RunTraces
from flowtrain.controller.signals import StopRequest, stop_on_signals
from flowtrain.controller.state import Role
from flowtrain.controller.summary import RunSummary, summary_if_done
from flowtrain.controller.watch import GraceOver, GroupLost, StopRequested
from flowtrain.controller.weights import fetch_weights
from flowtrain.controller.worker_group import COORDINATOR, ActorClasses
from flowtrain.emulation.check import emulation_note, host_warning
from flowtrain.errors import FlowTrainError, StallError
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.run_dir import run_dir
from flowtrain.observability.stream import EventStream
from flowtrain.training import checkpoint_store
from flowtrain.types.run_plan import Plan

logger = logging.getLogger(__name__)


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
    With ``limits.elastic_after_s``, callbacks and trackers see each part of the run, on fewer or more devices, as a run
    that is resumed.
    The caller must call ``check_run_dir`` first (before it imports this module).
    Raises FlowTrainError; in any case no actor and no pool memory is left behind.
    """
    assert config.mode != "auto", "a plan decides the mode before a run starts"
    started, stop, parts, has_moved = time.monotonic(), StopRequest(), Parts(config), False
    while True:
        stop.to_grow = False
        try:
            room = parts.room_watch()
            summary = _run_part(parts.now, config, resume, classes, plan, callbacks, started, stop, room)
            if not (stop.ends_to_grow and summary.stopped):
                return replace(summary, start_step=0) if has_moved else summary  # its time is that of all parts
            parts.grow()
        except StartsAnew as why:
            parts.go_on_after(why)
        except FlowTrainError as error:
            if stop.is_set():
                raise
            parts.go_on_after(error)
        logger.warning("the run goes on from its last checkpoint; data_parallel_size: %s", degrees_text(parts.now))
        resume = has_moved = True


def _run_part(
    config: RunConfig,
    asked: RunConfig,
    resume: bool,
    classes: ActorClasses | None,
    plan: Plan | None,
    callbacks: Sequence[object],
    started: float,
    stop: StopRequest,
    room: RoomWatch | None,
) -> RunSummary:
    """Train until the run ends, or until it starts anew on other nodes; raises StartsAnew then, or ends for ``room``.

    asked: the run with all its replicas, which its directory keeps. room: of a run on fewer nodes.
    """
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
        run = open_run(asked, place(run_spec, display, stack), resume, display, stack)
        traces = RunTraces(run.files, run.start.step, config.observability.trace.steps)
        stack.callback(traces.close)
        stream, recorder = stack.enter_context(following(run.run_spec, run.files, run.start, display, callbacks))
        stack.enter_context(telling_the_end(stream, recorder, stop, run_spec.num_steps, started))
        costs = CostKeeper(run.run_spec, run.files, run.start.cost, stream.note)
        note_start(run, stream)
        committer = Committer(run.run_spec, run.files, recorder, costs, stream.warn, stream.emit)
        classes = classes or actor_classes(config)
        keepers = Keepers(config, classes)
        stack.callback(keepers.close)
        history = History(run, recorder, costs, committer, keepers)
        controller = Controller(run, history, traces, stream, display, stop, room)
        stopped = controller.run(classes)
    return _summary(run, history, stopped, started, stream.off)


def _summary(run: OpenRun, history: History, stopped: bool, started: float, trackers_off: Sequence[str]) -> RunSummary:
    recorder, last, num_steps = history.recorder, history.recorder.last, run.run_spec.num_steps
    step = last.step if last else history.start.step
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
        cost_r2=history.costs.r2,
        num_skipped=recorder.num_skipped,
        emulated=emulation_note(run.run_spec.config),
        host_warning=host_warning(recorder.rates.host_share),
        tokens_per_s=recorder.rates.tokens_per_s,
        trackers_off=tuple(trackers_off),
        start_step=run.start.step,
    )


class Controller:
    """Starts the worker group, and starts it again from where its state is when the coordinator is lost."""

    def __init__(
        self,
        run: OpenRun,
        history: History,
        traces: RunTraces,
        stream: EventStream,
        display: ProgressDisplay,
        stop: StopRequest,
        room: RoomWatch | None,
    ) -> None:
        self._run = run
        self._config = run.run_spec.config
        self._history = history
        self._traces = traces
        self._stream = stream
        self._display = display
        self._stop = stop
        self._room = room

    def run(self, classes: ActorClasses) -> bool:
        """Start the actors and watch them until they are done; returns whether the run was stopped early."""
        # Again, since Ray has replaced the handler of SIGTERM by its own.
        with stop_on_signals(self._stop), self._history.probed():
            if self._stop.is_set():
                return True
            try:
                self._fetch_weights()
                stopped = self._run_groups(classes)
            except StopRequested:
                return True
            except GraceOver:
                raise self._preempted() from None
            self._history.end()
            return stopped

    def _preempted(self) -> StallError:
        last = checkpoint_store.latest_complete(self._run.files.checkpoints)
        start = (
            f"its last complete checkpoint, {last.name}" if last is not None else "the beginning: it has no checkpoint"
        )
        return StallError(
            f"the run had not ended within limits.preemption_grace_s ({self._config.limits.preemption_grace_s:g} s) of "
            f"SIGTERM, so it ends now; --resume goes on from {start}"
        )

    def _fetch_weights(self) -> None:
        if self._config.emulation is None:
            resumes = self._history.start.checkpoint is not None
            fetch_weights(self._config, self._run.group, resumes, self._display.phase, self._stop)

    def _run_groups(self, classes: ActorClasses) -> bool:
        # Emulated devices have no state to go back to.
        most = self._config.limits.max_coordinator_restarts if self._config.emulation is None else 0
        again: Callable[[], None] | None = None
        may_start_again = True  # once; a start that loses a node does not count
        for left in range(most, -1, -1):
            group = GroupRun(
                self._run, self._history, self._traces, self._stream, self._display, self._stop, self._room
            )
            try:
                return group.run(classes, left > 0, again, may_start_again)
            except GroupLost as lost:
                again = self._go_back(lost)
                may_start_again &= lost.name == NODE
        raise AssertionError("the last group's coordinator may not be lost")

    def _go_back(self, lost: GroupLost) -> Callable[[], None]:
        """Go back to where the state is; returns what to call when all actors run again."""
        how = "is lost" if lost.hung_s is None else "hangs"
        self._stream.warn(f"{lost.name} {how} ({lost.reason}); all actors start again")
        self._history.recorder.all_start_again()
        self._history.lost(lost.name, _role_of(lost), lost.reason, lost.hung_s)
        names = [COORDINATOR, *(spec.name for spec in self._run.specs)]
        worker_group.wait_until_ended(self._config, names, self._config.limits.stop_timeout_s)
        self._history.go_back()
        return self._runs_again

    def _runs_again(self) -> None:
        down_s = self._history.went_back()
        self._stream.note(
            f"the run goes on after {down_s:.1f} s, from {self._history.start.text}: step "
            f"{self._history.start.step + 1} is next"
        )


def _role_of(lost: GroupLost) -> Role:
    return Role.COORDINATOR if lost.name == COORDINATOR else Role.BACKBONE
