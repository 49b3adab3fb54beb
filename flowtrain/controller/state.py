"""The run as a state machine: events in, decisions out. No I/O, no waiting, no Ray."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flowtrain.errors import CoordinatorLostError, DataError, FlowTrainError, ReplicaLostError, WorkerLostError

CANNOT_START = "it cannot start"
"""What the reason begins with if a rank is lost because it cannot load its snapshot."""


class Role(enum.StrEnum):
    """What an actor does; it decides what its death means."""

    COORDINATOR = "coordinator"
    FEEDER = "feeder"
    ENCODER = "encoder"
    ENCODER_RANK = "encoder_rank"
    """A rank of an encoder's tensor parallel group other than the first, which is the ``ENCODER``."""
    BACKBONE = "backbone"


class Phase(enum.StrEnum):
    """Where the run stands."""

    RUNNING = "running"
    STOPPING = "stopping"
    DRAINING = "draining"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class Restart:
    """Report to the coordinator that this actor's memory is gone, and start it and its other ranks again.

    rank: the encoder rank that died, if it was not the actor itself. reason: why it was lost. hung_s: for how long it
    had hung; None: it died.
    """

    name: str
    rank: str | None = None
    reason: str = field(default="", compare=False)
    hung_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Abandon:
    """Report to the coordinator that this actor's memory is gone for good, and go on with the other encoders.

    The encoder's other ranks end too. reason, hung_s: as of ``Restart``.
    """

    name: str
    reason: str = field(default="", compare=False)
    hung_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RestartBackbone:
    """End all backbone ranks, go back to the last snapshot or checkpoint, and start them again; the producers stay.

    name: the rank that was lost first. reason, hung_s: as of ``Restart``.
    """

    name: str
    reason: str = field(default="", compare=False)
    hung_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RestartAll:
    """End all actors, go back to the last snapshot or checkpoint, and start them again.

    name: the coordinator, or a rank that was lost in the run's first start or when producers had already ended.
    reason, hung_s: as of ``Restart``.
    """

    name: str
    reason: str = field(default="", compare=False)
    hung_s: float | None = field(default=None, compare=False)


@dataclass
class RestartCounts:
    """How often actors were started again in a run, over all its worker groups."""

    producers: dict[str, int] = field(default_factory=dict)
    backbone: int = 0


@dataclass(frozen=True)
class RequestStop:
    """Ask the coordinator to end the run after the unit that is running."""


@dataclass(frozen=True)
class Finish:
    """Every actor returned: drain the last events and close the files."""


@dataclass(frozen=True)
class LastLoss:
    """The loss of an actor after which the run cannot go on. reason, hung_s: as of ``Restart``."""

    name: str
    reason: str
    hung_s: float | None = None


@dataclass(frozen=True)
class Fail:
    """End the run with this error. loss: its cause, if that is the loss of an actor."""

    error: FlowTrainError
    loss: LastLoss | None = field(default=None, compare=False)


Loss = Restart | Abandon | LastLoss
Decision = Restart | RestartBackbone | RestartAll | Abandon | RequestStop | Finish | Fail


def how_lost(hung_s: float | None) -> str:
    """Return the verb of a loss. hung_s: as of ``Restart``."""
    return "died" if hung_s is None else "hangs"


MIN_SAMPLES_TO_JUDGE = 64
"""Below this number of samples the rejected share is not judged."""


class RunState:
    """Decides what each event means.

    actors: name and role of every actor except the coordinator.
    max_restarts: of one producer in this run.
    shortage: what the run would lack, in numbers, if only these encoders were left; None if it can go on.
    leaders: from each encoder rank to the encoder it belongs to. They live, die and end together; only the leader
    counts.
    max_backbone_restarts: of the whole backbone in this run.
    may_be_lost: whether all may start again when the coordinator is lost.
    has_run: an earlier group has run, so a start that fails is worth another one, if there may be one.
    may_start_again: whether this first start is worth another one if it loses a process. One that loses a process again
    most likely fails by what it does.
    counts: of the run's earlier groups; it is counted on.
    """

    def __init__(
        self,
        actors: Mapping[str, Role],
        max_restarts: int,
        max_rejected_fraction: float,
        shortage: Callable[[Sequence[str]], str | None] = lambda encoders: None,
        leaders: Mapping[str, str] | None = None,
        max_backbone_restarts: int = 0,
        may_be_lost: bool = False,
        has_run: bool = False,
        may_start_again: bool = False,
        counts: RestartCounts | None = None,
    ) -> None:
        self._running = {name: role for name, role in actors.items() if role is not Role.ENCODER_RANK}
        self._leaders = dict(leaders or {})
        self._shortage = shortage
        self._max_restarts = max_restarts
        self._max_rejected_fraction = max_rejected_fraction
        self._counts = counts if counts is not None else RestartCounts()
        self._backbone = {name: role for name, role in actors.items() if role is Role.BACKBONE}
        self._max_backbone_restarts = max_backbone_restarts
        self._backbone_runs = has_run and may_be_lost
        self._is_backbone_down = False
        self._has_producers_ended = False
        self._may_be_lost = may_be_lost
        self._may_start_again = may_be_lost and may_start_again
        self._stop_asked = False
        self.phase = Phase.RUNNING

    @property
    def was_stopped(self) -> bool:
        """Whether the user asked for the end before the last step."""
        return self._stop_asked

    def on_returned(self, name: str) -> list[Decision]:
        """An actor's loop ended by itself."""
        if name not in self._running:  # an encoder rank, or a leader that ended with one
            return []
        self._has_producers_ended |= self._running[name] in (Role.ENCODER, Role.FEEDER)
        del self._running[name]
        if self.phase is Phase.FAILED:
            return []
        if not self._running:
            self.phase = Phase.FINISHED
            return [Finish()]
        if not self._has(Role.BACKBONE):
            self.phase = Phase.DRAINING
        return []

    @property
    def may_lose_coordinator(self) -> bool:
        """Whether all may start again without it."""
        return self._may_be_lost and (self._backbone_runs or self._may_start_again)

    @property
    def may_start_again(self) -> bool:
        """Whether this is a first start that is worth another one if a rank dies or does not answer."""
        return self._may_start_again and not self._backbone_runs and self._max_backbone_restarts > 0

    def on_backbone_started(self) -> None:
        """From now on a lost rank is a reason to start all ranks again."""
        self._backbone_runs = True
        self._is_backbone_down = False
        self._running |= self._backbone

    def on_died(self, name: str, reason: str) -> list[Decision]:
        """An actor's process died. A producer is started again; if it was a rank, so is the whole backbone."""
        member, name = name, self._leaders.get(name, name)
        if name not in self._running:
            return []
        role = self._running[name]
        if self.phase in (Phase.FAILED, Phase.DRAINING):
            return self.on_returned(name)
        if role is Role.BACKBONE:
            return self._lose_backbone(name, reason)
        return self._restart_producer(name, member, reason)

    def on_hung(self, name: str, what: str, hung_s: float) -> list[Decision]:
        """An actor hangs. One that died would do less harm, so it is treated as if it had.

        what: what it is in. hung_s: for how long.
        """
        if self.phase in (Phase.FAILED, Phase.DRAINING) or name not in self._running:
            return []
        if self._running[name] is Role.BACKBONE:
            return self._lose_backbone(name, what, hung_s)
        return self._restart_producer(name, name, what, hung_s)

    def on_overdue(self) -> list[Decision]:
        """The backbone is done, and producers do not return in time. All steps are trained, so nobody needs them."""
        assert self.phase is Phase.DRAINING, self.phase
        self._running.clear()
        self.phase = Phase.FINISHED
        return [Finish()]

    def on_failed(self, name: str, error: BaseException) -> list[Decision]:
        """An actor's loop raised: a bug, or a condition that a restart does not fix. While draining it is harmless."""
        leader = self._leaders.get(name, name)
        if leader not in self._running:
            return []
        if isinstance(error, CoordinatorLostError):
            return self.on_coordinator_lost(str(error))
        if isinstance(error, ReplicaLostError):
            return self.on_died(leader, str(error))
        if self.phase in (Phase.FAILED, Phase.DRAINING):
            return self.on_returned(leader)
        if self._running[leader] is Role.BACKBONE and self._is_backbone_down:
            return []  # its group is gone
        if isinstance(error, FlowTrainError):
            return self._fail(error)
        return self._fail(WorkerLostError(f"{name} failed: {type(error).__name__}: {error}"))

    def on_coordinator_lost(self, reason: str, hung_s: float | None = None) -> list[Decision]:
        """The coordinator is lost, and with it all knowledge of where data is. hung_s: as of ``Restart``."""
        name = Role.COORDINATOR.value
        if self.may_lose_coordinator:
            return self._restart_all(name, reason, hung_s)
        error = WorkerLostError(f"the coordinator {how_lost(hung_s)} ({reason}); start again with --resume")
        return self._fail(error, LastLoss(name, reason, hung_s))

    def on_rejected(self, num_rejected: int, num_seen: int) -> list[Decision]:
        """Samples were quarantined; the run fails when their share passes the limit."""
        share = num_rejected / max(1, num_seen)
        if self.phase is Phase.FAILED or num_seen < MIN_SAMPLES_TO_JUDGE or share <= self._max_rejected_fraction:
            return []
        return self._fail(
            DataError(
                f"{num_rejected} of {num_seen} samples ({100 * share:.3g}%) were rejected, more than "
                f"data.max_rejected_fraction ({100 * self._max_rejected_fraction:.3g}%) allows; see quarantine.jsonl "
                "in the run's directory, or let `flowtrain data check` list all such rows"
            )
        )

    def on_stop(self) -> list[Decision]:
        """The user asks for a clean end."""
        if self.phase is not Phase.RUNNING:
            return []
        self.phase = Phase.STOPPING
        self._stop_asked = True
        return [RequestStop()]

    def _restart_producer(self, name: str, member: str, reason: str, hung_s: float | None = None) -> list[Decision]:
        """A producer, or one of its encoder ranks (``member``), is lost; all that it held is produced again."""
        if member != name:
            reason = f"{member}: {reason}"
        restarts = self._counts.producers.get(name, 0) + 1
        if restarts > self._max_restarts:
            limit = f"limits.max_encoder_restarts is {self._max_restarts}"
            how = "died" if hung_s is None else "died or hung"
            error = f"{name} {how} {restarts} times ({reason}), {limit}"
            return self._lose(Abandon(name, reason, hung_s), error)
        self._counts.producers[name] = restarts
        return [Restart(name, None if member == name else member, reason, hung_s)]

    def _restart_all(self, name: str, reason: str, hung_s: float | None = None) -> list[Decision]:
        decisions: list[Decision] = [] if self.phase is Phase.FAILED else [RestartAll(name, reason, hung_s)]
        self.phase = Phase.FAILED  # this group's end
        return decisions

    def _lose_backbone(self, name: str, reason: str, hung_s: float | None = None) -> list[Decision]:
        """A rank is lost, and the gradients of the step with it."""
        if self._is_backbone_down:
            return []  # the others go with the first
        lost = f"{name} {how_lost(hung_s)} ({reason}); its gradients are lost"
        last = LastLoss(name, reason, hung_s)
        way_out = "Start again with --resume to go on from the last checkpoint"
        if self.may_start_again:
            return self._restart_all(name, reason, hung_s)
        if not self._backbone_runs or not self._max_backbone_restarts:
            return self._fail(WorkerLostError(f"{lost}. {way_out}"), last)
        if self._counts.backbone >= self._max_backbone_restarts:
            limit = f"limits.max_backbone_restarts is {self._max_backbone_restarts}"
            return self._fail(WorkerLostError(f"{lost}, and {limit}. {way_out}"), last)
        self._counts.backbone += 1
        if self._has_producers_ended:  # they would be needed again
            if self._may_be_lost:
                return self._restart_all(name, reason, hung_s)
            return self._fail(WorkerLostError(f"{lost}. {way_out}"), last)
        self._is_backbone_down = True
        return [RestartBackbone(name, reason, hung_s)]

    def _lose(self, lost: Abandon, what: str) -> list[Decision]:
        """A producer does not come back; other encoders do its work if their memory suffices."""
        name, last = lost.name, LastLoss(lost.name, lost.reason, lost.hung_s)
        others = [other for other, role in self._running.items() if role is Role.ENCODER and other != name]
        way_out = "look at its log, then start again with --resume"
        if self._running[name] is not Role.ENCODER or not others:
            return self._fail(WorkerLostError(f"{what}; {way_out}"), last)
        shortage = self._shortage(others)
        if shortage is not None:
            return self._fail(WorkerLostError(f"{what}, and without its memory {shortage}; {way_out}"), last)
        del self._running[name]
        return [lost]

    def _has(self, role: Role) -> bool:
        return role in self._running.values()

    def _fail(self, error: FlowTrainError, loss: LastLoss | None = None) -> list[Decision]:
        self.phase = Phase.FAILED
        return [Fail(error, loss)]
