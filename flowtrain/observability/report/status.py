"""How a run stands now, for a terminal: a quick look at the ends of its files."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowtrain.observability.report.outcome import (
    BACKBONE_ROLES,
    State,
    eval_points,
    median,
    outcome_of,
    ratio,
    steady_steps,
)
from flowtrain.observability.report.reading import TAIL_NBYTES, as_text
from flowtrain.observability.report.run_data import Record, RunData, event_time, read_run

STATUS_SCHEMA = 2
RECENT_STEPS = 20
"""Steps that rates and shares are over."""


@dataclass(frozen=True, slots=True)
class Said:
    """Something that the run said, or an actor's loss: a text, and its age in seconds; None: not known."""

    text: str
    age_s: float | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run stands; numbers are None where they are not known.

    Rates and shares are over its last ``RECENT_STEPS`` steps without the first of a start.
    """

    name: str
    directory: Path
    state: State
    reason: str
    """Why it failed or was stopped; empty otherwise."""
    mode: str
    step: int
    num_steps: int | None
    age_s: float | None
    """Since the last step or event."""
    step_age_s: float | None
    """Since the last step of this start; None before it, and unless it runs."""
    start_age_s: float | None
    """Since the start; None unless it runs."""
    recovering: tuple[Said, ...]
    """Actors that were lost and do not work again yet, each with the reason; empty unless it runs."""
    eta_s: float | None
    """Until the last step, at the recent pace; None unless it runs."""
    loss: float | None
    eval_losses: dict[str, float]
    """The last loss of each held-out set; NaN if it was not finite."""
    num_recent: int
    """Steps that rates and shares are over."""
    tokens_per_s: float | None
    step_time_s: float | None
    mfu: float | None
    starved_share: float | None
    blocked_share: float | None
    """None without encoder actors."""
    pool_nbytes: float | None
    pool_bound_nbytes: int | None
    num_restarts: int
    num_rejected: int
    num_skipped: int
    checkpoint_step: int | None
    """Of the last complete checkpoint; None: there is none."""
    resume: str
    """Where ``--resume`` would go on, and which steps are lost; empty unless the run was stopped or killed."""
    warnings: tuple[Said, ...]
    """The last warnings."""
    notes: tuple[str, ...]
    """What is damaged or missing among the run's files."""
    emulated: str | None

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        losses = {name: loss if math.isfinite(loss) else None for name, loss in self.eval_losses.items()}
        changed = {"directory": str(self.directory), "state": self.state.name.lower(), "eval_losses": losses}
        lists = {
            "recovering": [asdict(each) for each in self.recovering],
            "warnings": [asdict(each) for each in self.warnings],
            "notes": list(self.notes),
        }
        return {"schema": STATUS_SCHEMA, **asdict(self), **changed, **lists}


def status_of(root: str | os.PathLike[str], now: float | None = None) -> RunStatus:
    """Return how the run in a directory stands, also while it runs; raises ConfigError if it is no run's directory.

    now: seconds since the Unix epoch; None: the clock's.
    """
    now = time.time() if now is None else now
    run = read_run(root, last_nbytes=TAIL_NBYTES)
    outcome = outcome_of(run, now)
    steps = run.steps
    recent = _recent_steps(run)
    time_s = steps["step_time_s"][recent]
    blocked = ratio(steps["blocked_s"][recent], time_s) if run.num_encoders else None
    seconds_a_step = _pace(run)
    left = outcome.num_steps - outcome.step if outcome.num_steps is not None else None
    is_running = outcome.state is State.RUNNING
    warnings = [event for event in run.of_kind("note") if event.get("level") == "warning"]
    return RunStatus(
        name=run.name,
        directory=run.files.root,
        state=outcome.state,
        reason=outcome.reason,
        mode=run.mode,
        step=outcome.step,
        num_steps=outcome.num_steps,
        age_s=max(0.0, now - outcome.last_s) if outcome.last_s is not None else None,
        step_age_s=_since(now, run.steps.last("timestamp"), run.opened_s) if is_running else None,
        start_age_s=_since(now, run.opened_s) if is_running else None,
        recovering=tuple(_recovering(run, now)) if is_running else (),
        eta_s=left * seconds_a_step if is_running and left is not None and seconds_a_step is not None else None,
        loss=steps.last("loss"),
        eval_losses={name: float(losses[-1]) for name, (_, losses) in eval_points(run).items() if len(losses)},
        num_recent=len(recent),
        tokens_per_s=ratio(steps["num_tokens"][recent], time_s),
        step_time_s=median(time_s),
        mfu=ratio(steps["mfu"][recent] * time_s, time_s),
        starved_share=ratio(steps["starved_s"][recent], time_s),
        blocked_share=None if blocked is None else min(1.0, blocked / run.num_encoders),
        pool_nbytes=steps.last("pool_dram_nbytes"),
        pool_bound_nbytes=run.planned_pool_nbytes or None,
        num_restarts=len(run.of_kind("restart")),
        num_rejected=int(steps.last("rejected") or 0),
        num_skipped=int(steps.last("skipped_steps") or 0),
        checkpoint_step=outcome.checkpoint_step,
        resume=outcome.resume,
        warnings=tuple(Said(as_text(event.get("text")), _age(event, now)) for event in warnings[-3:]),
        notes=run.notes,
        emulated=steps.emulated,
    )


def _age(event: Record, now: float) -> float | None:
    time_s = event_time(event)
    return max(0.0, now - time_s) if math.isfinite(time_s) else None


def _recent_steps(run: RunData) -> npt.NDArray[np.intp]:
    """Return which of the last steps rates are over: of a run that loses actors all the time, as they are."""
    steady = np.flatnonzero(steady_steps(run))
    recent = steady[steady >= len(run.steps) - 3 * RECENT_STEPS][-RECENT_STEPS:]
    return recent if len(recent) else np.arange(len(run.steps))[-RECENT_STEPS:]


def _since(now: float, time_s: float | None, not_before_s: float | None = None) -> float | None:
    """Return the seconds since a time; None if it is not known, or before another one."""
    if time_s is None or (not_before_s is not None and time_s < not_before_s):
        return None
    return max(0.0, now - time_s)


def _recovering(run: RunData, now: float) -> Iterator[Said]:
    """Yield the actors of this start that were lost, and of which no event says that they work again."""
    lost: dict[str, Record] = {}
    since_s = -math.inf if run.opened_s is None else run.opened_s
    for event in run.events:
        kind, name = event.get("event"), as_text(event.get("name"))
        if kind == "lost" and event.get("given_up"):
            lost.pop(name, None)
        elif kind == "lost" and event_time(event) >= since_s:  # else the process of an earlier start
            lost[name] = event
        elif kind == "restart" and event.get("role") in BACKBONE_ROLES:  # all its ranks started again
            lost = {other: each for other, each in lost.items() if each.get("role") not in BACKBONE_ROLES}
        elif kind == "restart":
            lost.pop(name, None)
    for name, event in lost.items():
        yield Said(f"{name}: {as_text(event.get('reason'))}", _age(event, now))


def _pace(run: RunData) -> float | None:
    """Return seconds of the wall clock that a step takes, evaluations and checkpoints included; None if not known."""
    times = run.steps["timestamp"][-RECENT_STEPS:]
    starts = run.of_kind("run_started")
    if starts and math.isfinite(event_time(starts[-1])):
        times = times[times >= event_time(starts[-1])]
    times = times[np.isfinite(times)]
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return float((times[-1] - times[0]) / (len(times) - 1))
