"""Watches the worker group: passes its events to the state machine, and performs the decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from flowtrain.config.flow import LimitsConfig
from flowtrain.controller.outcomes import SEVERED, Died, Failed, Outcome, outcome_of, reason_of, root_cause_first
from flowtrain.controller.signals import StopRequest
from flowtrain.controller.stalls import Hang
from flowtrain.controller.state import (
    CANNOT_START,
    Abandon,
    Decision,
    Fail,
    Loss,
    Phase,
    RequestStop,
    Restart,
    RestartAll,
    RestartBackbone,
    RunState,
    how_lost,
)
from flowtrain.controller.worker_group import WorkerGroup
from flowtrain.errors import CoordinatorSilentError, FlowTrainError, SnapshotLostError, StallError
from flowtrain.flow.api import CoordinatorApi
from flowtrain.types.events import Event, Rejected

logger = logging.getLogger(__name__)

TICK_S = 1.0
SETTLE_S = 3.0
"""How long to look for the cause of a failure: a rank whose peer died fails as well, often first."""


class StopRequested(Exception):
    """The user asked for the end before any step was trained."""


class GraceOver(Exception):
    """The time after SIGTERM has passed, and the run has not ended."""


class BackboneLost(Exception):
    """A rank is lost, so all ranks must be started again. name, reason, hung_s: as of ``RestartBackbone``."""

    def __init__(self, name: str, reason: str, hung_s: float | None = None) -> None:
        super().__init__(name, reason, hung_s)
        self.name, self.reason, self.hung_s = name, reason, hung_s


class GroupLost(Exception):
    """All actors must be started again. name, reason, hung_s: as of ``RestartAll``."""

    def __init__(self, name: str, reason: str, hung_s: float | None = None) -> None:
        super().__init__(name, reason, hung_s)
        self.name, self.reason, self.hung_s = name, reason, hung_s


class Watcher:
    """Waits for the next event of any actor, in one thread; it never waits for one actor alone.

    take: receives every event of the coordinator, in order. note, warn: show a line to the user. stop: set when the
    user asks for the end. lost: receives each loss of a producer, and one that ends the run, before it is acted on.
    """

    def __init__(
        self,
        actors: WorkerGroup,
        state: RunState,
        limits: LimitsConfig,
        take: Callable[[Event], None],
        note: Callable[[str], None],
        warn: Callable[[str], None],
        stop: StopRequest,
        lost: Callable[[Loss], None] = lambda loss: None,
    ) -> None:
        self._actors = actors
        self._state = state
        self._limits = limits
        self._take = take
        self._note = note
        self._warn = warn
        self._stop = stop
        self._tell_lost = lost
        self._events = actors.link.start(CoordinatorApi.events)
        self._error: FlowTrainError | None = None
        self._lost: RestartBackbone | RestartAll | None = None
        self._asked_s = time.monotonic()
        self._was_answered = False
        self.on_turn: Callable[[], None] = lambda: None
        """Called after every wait, a second apart at most; what it raises ends the watching."""

    def results(
        self,
        calls: Mapping[str, ray.ObjectRef[Any]],
        deadline_s: float,
        what: str,
        hint: Callable[[], str] = lambda: "",
    ) -> list[Any]:
        """Wait for one call to each of some actors, while watching all others; returns the answers.

        deadline_s: on the monotonic clock. hint: returns what else to say when it has passed.
        Raises StallError after it, StopRequested, BackboneLost, GroupLost, or the error that ends the run.
        """
        pending = {ref: name for name, ref in calls.items()}
        while pending:
            done = self._turn(list(pending))
            for ref, outcome in _outcomes(done, pending).items():
                name = pending.pop(ref)
                if isinstance(outcome, Died | Failed):
                    self._conclude(name, outcome)
            self._raise_error()
            self._raise_lost()
            if self._stop.is_set():
                raise StopRequested
            if pending and time.monotonic() > deadline_s:
                raise StallError(
                    f"{what}: {', '.join(sorted(pending.values()))} did not answer within limits.start_timeout_s "
                    f"({self._limits.start_limit_s:.0f} s){hint()}; their logs show how far they got; raise it where "
                    "storage is slow"
                )
        return ray.get(list(calls.values()))

    def until_end(self) -> bool:
        """Watch until every actor has returned; returns whether a stop was asked for.

        Raises the error that ends it, GroupLost, GraceOver, or BackboneLost; after that it can be called again.
        """
        draining_since: float | None = None
        while self._state.phase not in (Phase.FINISHED, Phase.FAILED):
            self._turn(())
            if self._error is None:
                self._raise_lost()
            if self._must_stop and (decisions := self._state.on_stop()):
                if self._stop.is_set():
                    self._note(f"stopping after this step; a checkpoint follows{self._grace_text} (again: end at once)")
                self._perform(decisions)
            if self._state.phase is Phase.DRAINING:
                draining_since = draining_since or time.monotonic()
                self._check_draining(draining_since)
        if self._error is None:
            self._take_last_events()
            self._raise_error()
            self._raise_lost()
            return self._state.was_stopped
        try:
            self._take_last_events()  # they may complete a checkpoint that all ranks wrote
        except (ray.exceptions.RayError, FlowTrainError, OSError) as lost:
            logger.warning("the last events of the failed run could not be recorded: %s", lost)
        raise self._error

    @property
    def _must_stop(self) -> bool:
        return self._stop.is_set() or self._stop.to_grow

    @property
    def _grace_left_s(self) -> float | None:
        """Seconds until the run must have ended; None: there is no such time."""
        grace_s, since_s = self._limits.preemption_grace_s, self._stop.terminated_s
        return since_s + grace_s - time.monotonic() if grace_s is not None and since_s is not None else None

    @property
    def _grace_text(self) -> str:
        left_s = self._grace_left_s
        return "" if left_s is None else f" if it is complete within {left_s:.0f} s (limits.preemption_grace_s)"

    def note_hang(self, hang: Hang) -> None:
        """Take an actor for hung: a producer is started again at once, the backbone at the end of this turn."""
        self._perform(self._state.on_hung(hang.name, hang.what, hang.for_s))

    def take_pending_events(self) -> None:
        """Take all events until now, while no rank runs; the next ones come when the run has gone back.

        Raises GroupLost, or the error that ends the run.
        """
        for hold in (False, True):  # the first answer may be from before
            self._actors.link.ask(CoordinatorApi.flush_events, hold)
            self._take_events(self._limits.stop_timeout_s)
        self._raise_error()
        self._raise_lost()

    # --- one round ----------------------------------------------------------------------------------------------

    def _turn(self, awaited: Sequence[ray.ObjectRef[Any]]) -> list[ray.ObjectRef[Any]]:
        """Wait for an event, at most a tick, and act on it; returns which of the awaited calls are done."""
        runs = self._actors.runs
        waiting = [self._events, *awaited, *runs]
        done, _ = ray.wait(waiting, num_returns=1, timeout=TICK_S)
        if done:  # all at once: hundreds of ranks answer at the same time, and each wait looks at all calls
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        if self._events in done:
            self._take_events()
        elif self._was_answered and time.monotonic() - self._asked_s > self._limits.coordinator_timeout_s:
            limit_s = self._limits.coordinator_timeout_s
            silent = f"it has not answered within limits.coordinator_timeout_s ({limit_s:g} s)"
            self._perform(self._state.on_coordinator_lost(silent, limit_s))
        self.on_turn()
        if (left_s := self._grace_left_s) is not None and left_s <= 0:
            raise GraceOver
        for ref, outcome in _outcomes(done, runs).items():
            # ``replace`` has removed the calls of a dead encoder's ranks: their end says nothing about the new ones.
            name = self._actors.runs.pop(ref, None)
            if name is not None:
                self._conclude(name, outcome)
        return [ref for ref in done if ref in awaited]

    def _conclude(self, name: str, outcome: Outcome) -> None:
        if isinstance(outcome, Died):
            self._perform(self._state.on_died(name, outcome.reason))
        elif isinstance(outcome, Failed) and outcome.lost_peer:
            self._perform(self._state.on_died(name, f"it lost the other ranks: {outcome.error}"))
        elif isinstance(outcome, Failed) and isinstance(outcome.error, SnapshotLostError):
            self._perform(self._state.on_died(name, f"{CANNOT_START}: {outcome.error}"))
        elif isinstance(outcome, Failed):
            if self._state.phase is Phase.DRAINING:
                logger.warning("%s failed after it was no longer needed: %s", name, outcome.error)
            self._perform(self._state.on_failed(name, outcome.error))
        else:
            self._perform(self._state.on_returned(name))

    def _take_events(self, timeout_s: float | None = None) -> None:
        try:
            events = ray.get(self._events, timeout=timeout_s)
        except SEVERED as error:
            self._perform(self._state.on_coordinator_lost(reason_of(error)))
            return
        except ray.exceptions.GetTimeoutError as error:
            raise CoordinatorSilentError(
                f"the coordinator did not send its events within limits.stop_timeout_s ({timeout_s:g} s)"
            ) from error
        self._events = self._actors.link.start(CoordinatorApi.events)
        self._asked_s, self._was_answered = time.monotonic(), True
        for event in events:
            self._take(event)
            if isinstance(event, Rejected):
                self._perform(self._state.on_rejected(event.num_rejected, event.num_seen))

    def _take_last_events(self) -> None:
        """Take the events from before the actors returned: those of the open call, then those after it."""
        timeout_s = self._limits.stop_timeout_s
        self._actors.link.start(CoordinatorApi.end_events)
        for _ in range(2):
            self._take_events(timeout_s)

    def _perform(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Restart):
                self._warn(_restart_text(decision))
                self._tell_lost(decision)
                # Before the new process can join: the name must still mean the dead one.
                self._actors.link.ask(CoordinatorApi.process_lost, decision.name)
                self._actors.replace(decision.name)
            elif isinstance(decision, RestartBackbone | RestartAll):
                self._lost = decision
            elif isinstance(decision, Abandon):
                self._warn(
                    f"{decision.name} {how_lost(decision.hung_s)} ({decision.reason}), once more than "
                    "limits.max_encoder_restarts allows; it is given up, and the other encoders do its work"
                )
                self._tell_lost(decision)
                self._actors.link.ask(CoordinatorApi.process_lost, decision.name, for_good=True)
                self._actors.give_up(decision.name)
            elif isinstance(decision, RequestStop):
                self._actors.link.ask(CoordinatorApi.request_stop)
            elif isinstance(decision, Fail):
                self._error = self._error or decision.error
                if decision.loss is not None:
                    self._tell_lost(decision.loss)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _raise_lost(self) -> None:
        lost, self._lost = self._lost, None
        if isinstance(lost, RestartBackbone):
            raise BackboneLost(lost.name, lost.reason, lost.hung_s)
        if lost is not None:
            raise GroupLost(lost.name, lost.reason, lost.hung_s)

    def _check_draining(self, since_s: float) -> None:
        limit_s = self._limits.stop_timeout_s
        if time.monotonic() - since_s > limit_s:
            self._note(
                f"{', '.join(sorted(self._actors.runs.values()))} did not end within limits.stop_timeout_s "
                f"({limit_s:g} s) after the last step; the run is complete without them, and they are ended"
            )
            self._perform(self._state.on_overdue())


def _restart_text(restart: Restart) -> str:
    lost = restart.name if restart.rank is None else f"{restart.rank} of {restart.name}"
    killed = "" if restart.hung_s is None else "killed, "
    return (
        f"{lost} {how_lost(restart.hung_s)} ({restart.reason}); it is {killed}started again, and its parts are "
        "produced again"
    )


def _outcomes(
    done: Sequence[ray.ObjectRef[Any]], names: Mapping[ray.ObjectRef[Any], str]
) -> dict[ray.ObjectRef[Any], Outcome]:
    """How the done ones of the named calls ended, root causes first."""
    outcomes = {ref: outcome_of(ref, names[ref]) for ref in done if ref in names}
    puzzling = [o for o in outcomes.values() if isinstance(o, Failed) and not isinstance(o.error, FlowTrainError)]
    others = [ref for ref in names if ref not in outcomes]
    if puzzling and others:
        more, _ = ray.wait(others, num_returns=len(others), timeout=SETTLE_S)
        outcomes |= {ref: outcome_of(ref, names[ref]) for ref in more}
    return {ref: outcomes[ref] for ref in root_cause_first(outcomes)}
