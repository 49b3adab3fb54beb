"""All that a run's directory tells, of any version, finished or not."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.config.home import expanded
from flowtrain.errors import ConfigError
from flowtrain.observability.report.reading import (
    Notes,
    as_count,
    as_number,
    as_text,
    dig,
    json_object,
    records,
    yaml_mapping,
)
from flowtrain.observability.report.steps import Steps, steps_of
from flowtrain.observability.run_dir import RunDir

PLANNING = "planning.json"
MAX_EVENTS = 20_000
MAX_QUARANTINED = 200
"""Rejected samples that a report knows one by one; it counts the others."""

Record = Mapping[str, Any]
_OF_STEPS = frozenset({"evaluation", "checkpoint"})


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Rejected samples."""

    first: tuple[Record, ...]
    """The first ``MAX_QUARANTINED``."""
    reasons: Mapping[str, int]
    """How many samples by reason, the most frequent one first."""
    sources: Mapping[str, int]
    """How many samples by source, in the same order."""

    @property
    def num_samples(self) -> int:
        """Of all reasons."""
        return sum(self.reasons.values())


@dataclass(frozen=True, slots=True)
class RunData:
    """The files of one run."""

    files: RunDir
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    planning: Mapping[str, Any]
    """What ``flowtrain plan`` predicted for the run (``planning.json``); empty unless its mode was auto."""
    profile: Mapping[str, Any]
    steps: Steps
    events: tuple[Record, ...]
    """In order; empty for a run of a version that wrote none."""
    quarantine: Quarantine
    is_held: bool
    """Whether a process trains in the directory now."""
    opened_s: float | None
    """When a process last began to train there, by the time of ``plan.yaml``; None if that is not known."""
    notes: tuple[str, ...]
    """What is damaged or missing."""

    @property
    def name(self) -> str:
        """The run's name."""
        return as_text(self.config.get("name")) or self.files.root.name

    @property
    def mode(self) -> str:
        """How encoders and backbone share devices."""
        return as_text(self.plan.get("mode") or self.config.get("mode")) or "decoupled"

    @property
    def is_emulated(self) -> bool:
        """Whether its devices are emulated; a run without a step tells it by its configuration."""
        return self.steps.emulated is not None or dig(self.config, "model", "device") == "emulated"

    def of_kind(self, kind: str) -> list[Record]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if event.get("event") == kind]

    @property
    def num_steps(self) -> int | None:
        """Steps that the run is to make in all; None if that is not known."""
        for event in reversed(self.of_kind("run_started")):
            if (count := as_count(event.get("num_steps"))) is not None:
                return count
        return as_count(dig(self.config, "training", "max_steps"))

    @property
    def start_steps(self) -> tuple[int, ...]:
        """The first step of each start: everything is made in it, so it is slower than the others."""
        starts = self.of_kind("run_started")
        if not starts:
            return (int(self.steps.step[0]),) if len(self.steps) else ()
        return tuple((as_count(event.get("resumed_from")) or 0) + 1 for event in starts)

    @property
    def num_encoders(self) -> int:
        """Replicas of encoders with actors of their own: those that ``blocked_s`` sums over."""
        encoders = self.plan.get("encoders")
        if not isinstance(encoders, Mapping):
            return 0
        return sum(as_count(dig(module, "data_parallel_size")) or 1 for module in encoders.values())

    @property
    def has_replicas(self) -> bool:
        """Whether the backbone has several data-parallel replicas, or may have: only these can be uneven."""
        return as_count(dig(self.plan, "backbone", "data_parallel_size")) != 1

    @property
    def planned_pool_nbytes(self) -> int:
        """DRAM that the plan gives to the pool; a feeder's share is missing if it follows from the data."""
        modules = [dig(self.plan, "backbone"), dig(self.plan, "feeder")]
        encoders = self.plan.get("encoders")
        modules += list(encoders.values()) if isinstance(encoders, Mapping) else []
        return sum(
            (as_count(dig(module, "segment_nbytes")) or 0) * (as_count(dig(module, "data_parallel_size")) or 1)
            for module in modules
        )


def read_run(root: str | os.PathLike[str], last_nbytes: int | None = None) -> RunData:
    """Read a run's directory; files that are damaged are noted.

    last_nbytes: read only so much of the end of ``metrics.jsonl``, for a quick look at a long run.
    Raises ConfigError if it is no run's directory.
    """
    files = RunDir(expanded(root).absolute())
    _check_is_run(files)
    notes = Notes()
    config = yaml_mapping(files.config, notes)
    steps = steps_of(records(files.metrics, notes, last_nbytes))
    if not len(steps):
        notes.add("the run has not finished a step")
    events = _events(files.events, notes)
    if len(steps) and not events:
        name = files.events.name
        why = (
            f"{name} has no event" if files.events.exists() else f"there is no {name}: the run is of an earlier version"
        )
        notes.add(f"{why}, so that restarts, checkpoints and how it ended are not known")
    return RunData(
        files=files,
        config=config,
        plan=yaml_mapping(files.plan, notes),
        planning=json_object(files.root / PLANNING, notes),
        profile=json_object(files.profile, notes),
        steps=steps,
        events=events,
        quarantine=_quarantine(records(files.quarantine, notes)),
        is_held=files.is_held(),
        opened_s=_written_s(files.plan),
        notes=notes.texts,
    )


def _check_is_run(files: RunDir) -> None:
    if not os.path.isdir(files.root):
        raise ConfigError(f"{files.root}: there is no such directory; give a run's directory")
    try:
        if not any(path.is_file() for path in (files.config, files.metrics)):
            raise ConfigError(
                f"{files.root}: not a run's directory (it has neither {files.config.name} nor {files.metrics.name})"
            )
    except PermissionError as error:
        raise ConfigError(f"{files.root}: cannot be read: {error.strerror}; only a run's owner can read it") from error


def _events(path: Path, notes: Notes) -> tuple[Record, ...]:
    """Read events; of a run with very many, single quarantined samples are left out first."""
    found = _without_undone(records(path, notes))
    if len(found) > MAX_EVENTS:
        found = [event for event in found if event.get("event") != "quarantined"]
    if len(found) > MAX_EVENTS:
        notes.add(f"{path.name}: only the first and the last of its {len(found):,} events are shown")
        found = found[: MAX_EVENTS // 2] + found[-MAX_EVENTS // 2 :]
    return tuple(found)


def _without_undone(events: Iterable[Record]) -> list[Record]:
    """Leave out evaluations and checkpoints of steps that a later start, or a run that went back, made again."""
    kept: list[Record] = []
    for event in events:
        step = _went_back_to(event)
        if step is not None:
            kept = [each for each in kept if each.get("event") not in _OF_STEPS or as_number(each.get("step")) <= step]
        kept.append(event)
    return kept


def _went_back_to(event: Record) -> int | None:
    """Return the step after which all is made anew; None for an event that says nothing of the kind."""
    if event.get("event") == "run_started":
        return as_count(event.get("resumed_from")) or 0
    if event.get("event") == "restart" and as_count(event.get("steps_again")):
        return as_count(event.get("step"))
    return None


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _quarantine(found: Iterable[Record]) -> Quarantine:
    first: list[Record] = []
    reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for record in found:
        if len(first) < MAX_QUARANTINED:
            first.append(record)
        reasons[as_text(record.get("reason")) or "unknown"] += 1
        sources[as_text(record.get("source")) or "unknown"] += 1
    return Quarantine(tuple(first), dict(reasons.most_common()), dict(sources.most_common()))


def event_time(event: Record) -> float:
    """Return when something happened, in seconds since the Unix epoch; NaN if it is not known."""
    return as_number(event.get("timestamp"))
