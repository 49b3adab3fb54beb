"""One worker group from its start to its end: it is watched, and its backbone is started again when a rank is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ray.actor import ActorHandle

from flowtrain.actors.coordinator import start_flow
from flowtrain.controller import worker_group
from flowtrain.controller.elastic import Patience, RoomWatch, StartsAnew
from flowtrain.controller.following import run_started
from flowtrain.controller.hang_watch import HangWatch
from flowtrain.controller.history import History
from flowtrain.controller.lost_nodes import NODE, NodeWatch
from flowtrain.controller.opening import OpenRun
from flowtrain.controller.prepare import memory_shortage
from flowtrain.controller.producer_watch import ProducerWatch
from flowtrain.controller.resume import other_reduction
from flowtrain.controller.run_traces import RunTraces
from flowtrain.controller.signals import StopRequest
from flowtrain.controller.stalls import Hang, StallWatch, hang_limits
from flowtrain.controller.state import Loss, Restart, Role, RunState, how_lost
from flowtrain.controller.trace_desk import TraceDesk
from flowtrain.controller.watch import BackboneLost, GroupLost, StopRequested, Watcher
from flowtrain.controller.worker_group import ActorClasses
from flowtrain.errors import CoordinatorLostError, StallError, WorkerLostError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.units import first_unit
from flowtrain.observability.progress import ProgressDisplay
from flowtrain.observability.stream import EventStream
from flowtrain.types.events import CheckpointWritten, Event, UnitDone
from flowtrain.types.messages import FlowSettings
from flowtrain.types.plan import GradientReduction, RankStart

BACKBONE = "the backbone"
"""Its name, where an actor's would stand."""


class GroupRun:
    """Starts one worker group, watches it, and passes its events on."""

    def __init__(
        self,
        run: OpenRun,
        history: History,
        traces: RunTraces,
        stream: EventStream,
        display: ProgressDisplay,
        stop: StopRequest,
        room: RoomWatch | None = None,
    ) -> None:
        self._run = run
        self._run_spec = run.run_spec
        self._config = run.run_spec.config
        self._history = history
        self._traces = traces
        self._stream = stream
        self._display = display
        self._stop = stop
        self._room = room
        self._nodes = NodeWatch(run.group, stream.warn, stream.note)
        self._patience = Patience(self._config.limits.elastic_after_s, self._nodes)
        self._is_up = False

    def run(
        self,
        classes: ActorClasses,
        may_be_lost: bool,
        again: Callable[[], None] | None = None,
        may_start_again: bool = False,
    ) -> bool:
        """Start the actors and watch them until they are done; returns whether the run was stopped early.

        In any case all actors end.

        may_be_lost: raise GroupLost when all actors must start again, as without a coordinator; else that is an error.
        again: called when all actors run; None: no group was started before.
        may_start_again: raise it also if the run's first start loses a rank or the coordinator.
        """
        self._display.phase("starting actors, which load their models")
        coordinator = self._start_coordinator(classes)
        self._actors = worker_group.start_actors(
            self._config,
            self._run.specs,
            self._run.group,
            classes,
            coordinator,
            self._history.run_id,
            self._run_spec.num_steps,
            self._run_spec.indexes,
        )
        try:
            self._state = self._run_state(may_be_lost, may_start_again)
            self._hangs, self._producer_hangs, self._stalls = self._hang_watches()
            self._watcher = self._new_watcher()
            self._start_loops()
            self._is_up = True
            self._state.on_backbone_started()
            if again is not None:
                again()
            return self._watch()
        except WorkerLostError as error:
            is_missed = isinstance(error, CoordinatorLostError) and self._state.may_lose_coordinator
            if is_missed:  # it was asked before it was missed
                raise GroupLost(Role.COORDINATOR, str(error)) from error
            if may_be_lost and not self._is_up and self._nodes.has_lost_one():
                # Unlike any other start that fails, the next one need not.
                raise GroupLost(NODE, f"while the run started: {error}") from error
            raise
        except BackboneLost as lost:  # while all started again
            raise GroupLost(lost.name, lost.reason, lost.hung_s) from lost
        finally:
            self._actors.kill()

    # --- starting -----------------------------------------------------------------------------------------------

    def _start_coordinator(self, classes: ActorClasses) -> ActorHandle:
        remake_flow = partial(start_flow, self._config, self._run_spec.model_spec)
        make_flow = partial(remake_flow, self._flow_settings())
        return worker_group.start_coordinator(self._config, classes, make_flow, remake_flow)

    def _flow_settings(self) -> FlowSettings:
        return replace(self._history.flow_settings(), last_traced_step=self._traces.last_step)

    def _run_state(self, may_be_lost: bool, may_start_again: bool) -> RunState:
        limits, modules = self._config.limits, {spec.name: spec.module for spec in self._run.specs}

        def shortage(encoders: Sequence[str]) -> str | None:
            return memory_shortage(self._run_spec, [modules[name] for name in encoders])

        return RunState(
            self._actors.roles,
            limits.max_encoder_restarts,
            self._config.data.max_rejected_fraction,
            shortage,
            self._actors.leaders,
            limits.max_backbone_restarts if self._config.emulation is None else 0,
            may_be_lost,
            self._history.has_run,
            may_start_again,
            self._history.counts,
        )

    def _hang_watches(self) -> tuple[HangWatch, ProducerWatch, StallWatch]:
        def found(hang: Hang) -> None:
            self._watcher.note_hang(hang)

        limits = self._config.limits
        ranks = HangWatch(self._actors, hang_limits(limits), self._run.files.stacks, found)
        producers = ProducerWatch(self._actors, hang_limits(limits), limits.start_limit_s, found)
        stalls = StallWatch(limits, lambda: [*producers.standing(), *ranks.standing()], self._stream.warn)
        return ranks, producers, stalls

    def _new_watcher(self) -> Watcher:
        def lost(loss: Loss) -> None:
            recorder, role = self._history.recorder, self._actors.roles.get(loss.name, Role.COORDINATOR)
            recorder.lost(loss.name, role, loss.reason, loss.hung_s, given_up=not isinstance(loss, Restart))
            if isinstance(loss, Restart):
                recorder.restarted(loss.name, role, loss.reason, loss.hung_s)

        limits, stream = self._config.limits, self._stream
        watcher = Watcher(self._actors, self._state, limits, self._take, stream.note, stream.warn, self._stop, lost)
        watcher.on_turn = self._poll_nodes
        return watcher

    def _start_loops(self) -> None:
        self._actors.run_producers()
        started = self._start_backbone()
        if not self._history.has_run:
            self._announce(started)
        self._display.phase(f"waiting for step {self._history.start.step + 1}")
        self._run_backbone()

    def _announce(self, started: RankStart) -> None:
        peak, roles = started.peak, self._actors.roles.values()
        self._history.recorder.peak = peak
        self._stream.note(f"mfu: over {peak.flops / 1e12:.4g} TFLOP/s of a device ({peak.device}; {peak.source})")
        self._note_reduction(started.reduction)
        self._stream.note(f"sharding: {started.sharding.name} ({started.sharding.reason})")
        if started.recomputed:
            self._stream.note(f"activation_checkpointing: adaptive: recomputed are on {started.recomputed}")
        self._history.costs.start(peak.device)
        self._stream.emit(run_started(self._run_spec, self._run.files, self._history.start, peak.device, roles))

    def _note_reduction(self, reduction: GradientReduction) -> None:
        self._stream.note(f"gradient_reduction: {reduction.name} ({reduction.reason})")
        self._history.committer.gradient_reduction = reduction.name
        is_auto = self._config.backbone.gradient_reduction == "auto"
        if is_auto and (line := other_reduction(self._history.start, reduction)) is not None:
            self._stream.warn(line)

    def _start_backbone(self) -> RankStart:
        deadline_s = time.monotonic() + self._config.limits.start_limit_s
        what, hint = "starting the backbone", lambda: self._nodes.reason
        results = partial(self._watcher.results, deadline_s=deadline_s, what=what, hint=hint)
        settings, evaluations = self._config.backbone, self._run_spec.evaluations
        history, keepers = self._history, self._history.keepers
        kept_by = keepers.for_ranks if keepers.is_on else None
        try:
            return worker_group.start_backbone(self._actors, settings, history.origin, evaluations, results, kept_by)
        except (BackboneLost, GroupLost) as lost:
            if history.blames_snapshot(lost.name, lost.reason):
                self._stream.warn(
                    f"the snapshot of step {history.start.step} is given up, since the backbone did not start from it"
                )
                keepers.close()
            raise
        except StallError as error:
            if self._config.limits.elastic_after_s is not None and self._nodes.lost_since_s is not None:
                raise StartsAnew(str(error)) from error
            if self._state.may_start_again and not isinstance(error, CoordinatorLostError):
                raise GroupLost(BACKBONE, str(error)) from error
            raise

    def _run_backbone(self) -> None:
        unit, step = first_unit(self._flow_settings()), self._history.start.step
        checkpoints, saved_step = str(self._run.files.checkpoints), self._history.saved_step
        for name in self._actors.of_role(Role.BACKBONE):
            self._actors.run(name, unit, step, checkpoints, self._history.nonce, self._traces.last_step, saved_step)
        self._hangs.begin()
        self._stalls.begin()

    # --- watching -----------------------------------------------------------------------------------------------

    def _watch(self) -> bool:
        num_steps = self._run.run_spec.num_steps
        desk = TraceDesk(self._run.files, self._traces, self._actors, num_steps, self._stream.note)
        lost: BackboneLost | None = None
        try:
            while True:
                try:
                    if lost is not None:
                        self._recover(lost)
                    self._watcher.on_turn = partial(self._on_turn, desk)
                    return self._watcher.until_end()
                except BackboneLost as error:
                    lost = error
        finally:
            desk.close()

    def _on_turn(self, desk: TraceDesk) -> None:
        desk.poll()
        self._poll_nodes()
        if self._room is not None and not self._stop.to_grow and self._room.has_room():
            self._stream.note(
                "the cluster has room for all of the run again: after this step and a checkpoint it goes on there"
            )
            self._stop.to_grow = True
        self._history.keepers.poll()
        if self._config.emulation is None:  # an emulated device waits as long as its cost says
            self._hangs.poll()
            self._producer_hangs.poll()
            self._stalls.poll()

    def _poll_nodes(self) -> None:
        had_lost = self._nodes.lost_since_s is not None
        self._nodes.poll()
        is_whole_again = had_lost and self._nodes.lost_since_s is None
        if is_whole_again and self._config.pool.network == "none" and self._nodes.num_used > 1:
            if self._stop.is_set():
                raise StopRequested
            raise StartsAnew("the run was on one node and now is on several, which its pool does not join")
        try:
            self._patience.check()
        except StartsAnew:
            if self._stop.is_set():
                raise StopRequested from None
            raise

    def _recover(self, lost: BackboneLost) -> None:
        """Start the backbone again from where its state is, and have the steps after it done again."""
        self._stream.warn(f"{lost.name} {how_lost(lost.hung_s)} ({lost.reason}); the backbone starts again")
        self._history.lost(lost.name, Role.BACKBONE, lost.reason, lost.hung_s)
        self._watcher.on_turn = self._poll_nodes  # there is no rank to ask
        limit_s, ranks = self._config.limits.stop_timeout_s, tuple(self._actors.of_role(Role.BACKBONE))
        self._actors.end_backbone(limit_s)
        worker_group.wait_until_ended(self._config, ranks, limit_s)
        self._watcher.take_pending_events()
        self._history.go_back()
        self._actors.link.ask(CoordinatorApi.rewind, self._flow_settings(), ranks)
        self._actors.spawn_backbone()
        self._state.on_backbone_started()
        self._start_backbone()
        self._run_backbone()
        down_s = self._history.went_back()
        self._stream.note(
            f"the backbone runs again after {down_s:.1f} s, from {self._history.start.text}: step "
            f"{self._history.start.step + 1} is next"
        )

    def _take(self, event: Event) -> None:
        self._history.take(event)
        if isinstance(event, UnitDone | CheckpointWritten):
            self._patience.progressed()
        self._hangs.take(event)
        self._stalls.take(event)
        self._traces.take(event)
