"""What a run tells its callbacks: one class for each kind of event.

``step`` is the number of steps done when the event happened; ``timestamp`` is in seconds since the Unix epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowtrain.types.metrics import StepMetrics

EVENTS_SCHEMA = 1
"""Of a line of ``events.jsonl``."""

Level = Literal["info", "warning"]
Outcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """All actors have started, and the first step comes next."""

    step: int
    """Steps that were done before."""
    run: str
    """The run's name."""
    mode: str
    num_steps: int
    """Of the whole run."""
    resumed_from: int | None
    """The step after which the run goes on; None: it starts from the beginning."""
    roles: Mapping[str, int]
    """Actors of each role."""
    device: str
    """What a backbone rank computes on."""
    versions: Mapping[str, str]
    """Of FlowTrain, torch and Ray."""
    directory: str
    """The run's directory, absolute."""
    config: Mapping[str, Any] = field(repr=False)
    """The configuration as plain values, without secrets and without the options of trackers."""
    emulated: bool = False
    """Whether devices are emulated (docs/emulated.md)."""
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A training step is done, and so is the evaluation that may follow it."""

    metrics: StepMetrics

    @property
    def step(self) -> int:
        """The step."""
        return self.metrics.step

    @property
    def timestamp(self) -> float:
        """When the step ended."""
        return self.metrics.timestamp


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """What the model generated for a held-out sample."""

    source: str
    row: int
    prompt: str
    reference: str
    """The answer in the data."""
    text: str
    """The answer that was generated."""
    images: tuple[str, ...] = ()
    """Files of the sample's images, relative to the run's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFinished:
    """A held-out set was evaluated; its step was announced before."""

    step: int
    name: str
    """Of the set."""
    loss: float
    num_samples: int
    num_target_tokens: int
    duration_s: float
    generated: tuple[GeneratedSample, ...] = ()
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFinished:
    """A checkpoint is complete."""

    step: int
    """Its step; later ones may be done."""
    duration_s: float
    """From the copy of the state until the checkpoint was complete."""
    nbytes: int | None
    """Bytes of all its files; None: not known."""
    best_of: str | None = None
    """The metric by which it is the best one so far; None: it is kept for its age."""
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLost:
    """An actor died or hangs. It is started again, which ``Restarted`` tells, or given up."""

    step: int
    role: str
    name: str
    reason: str
    hung_s: float | None
    """Seconds that it had hung when it was noticed; None: it died."""
    given_up: bool = False
    """Whether it is not started again: other encoders do its work, or the run ends."""
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """A lost actor was started again. The event comes once the new one works; at the latest when it is lost too, when
    all actors start again, or when the run ends."""

    step: int
    role: str
    name: str
    reason: str
    """Why it was lost."""
    hung_s: float | None = None
    """As of ``ActorLost``."""
    down_s: float | None = None
    """Seconds from the notice of its loss until the new one worked; None: it is not known to have worked."""
    steps_again: int = 0
    """Steps that were done and are done again: of a backbone, those after its checkpoint."""
    timestamp: float = field(default_factory=time.time)
    """When its loss was noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A sample was rejected."""

    step: int
    num_rejected: int
    """Training samples rejected so far in the run, with those that were reported together with this one."""
    position: int
    source: str
    """Name of its source, as the quarantine file has it."""
    row: int
    reason: str
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFound:
    """A worker is much slower than the others of its role; it is named once, and again after it recovered."""

    step: int
    role: str
    """``encoder`` or ``backbone``."""
    name: str
    """Its actor; of a replica of the backbone, the first rank."""
    ratio: float
    """Its time for the same work over the median of its role."""
    num_workers: int
    """Of its role that were compared: encoders, or replicas of the backbone."""
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A line for the user."""

    step: int
    level: Level
    text: str
    timestamp: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is over; no event follows."""

    step: int
    outcome: Outcome
    reason: str | None
    """Why it failed or was stopped."""
    duration_s: float
    """Since the command began."""
    timestamp: float = field(default_factory=time.time)


RunEvent = (
    RunStarted
    | StepFinished
    | EvaluationFinished
    | CheckpointFinished
    | ActorLost
    | Restarted
    | Quarantined
    | StragglerFound
    | Noted
    | RunEnded
)
