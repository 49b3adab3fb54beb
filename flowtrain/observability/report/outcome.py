"""How a run stands or ended, and what limited it: what the first screen says."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flowtrain.observability.report.reading import as_number, as_text
from flowtrain.observability.report.run_data import RunData, event_time
from flowtrain.observability.report.sampling import FloatArray
from flowtrain.observability.report.units import percent
from flowtrain.observability.run_dir import RunDir

STARVED_SHARE = 0.10
"""Above it, the backbone's waits for data are what limits the run."""
BLOCKED_SHARE = 0.10
IMBALANCE = 0.10
FILL = 0.80
MIN_STEPS = 3
BACKBONE_ROLES = ("backbone", "coordinator")
"""With whose loss all ranks start again."""


class State(StrEnum):
    """How a run stands; the values are what people read."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    KILLED = "ended without a word"
    """No process trains there, and none said how it ended."""
    EMPTY = "no steps"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run stands."""

    state: State
    reason: str
    """Why it failed or stopped; empty if it did neither, or did not say."""
    step: int
    """The last one; 0 before the first."""
    num_steps: int | None
    started_s: float | None
    """The first start, in seconds since the Unix epoch."""
    duration_s: float | None
    """Of all starts, as far as it is known."""
    num_starts: int
    last_s: float | None
    """When the last step or event was."""
    checkpoint_step: int | None
    """Of the last complete checkpoint; None: there is none."""
    resume: str
    """The command that goes on, and which steps are lost; empty for a run that runs, is done, or cannot go on: one on
    emulated devices has nothing to go on from."""


def resume_text(run: RunDir, step: int, checkpoint_step: int | None) -> str:
    """Return the command that goes on with a run, and which steps are lost.

    step: the last one that was done. checkpoint_step: of the last complete checkpoint; None: there is none.
    """
    first_lost = (checkpoint_step or 0) + 1
    lost = f"step {step:,} is" if step == first_lost else f"steps {first_lost:,} to {step:,} are"
    lost = f"; {lost} lost" if step >= first_lost else ""
    if checkpoint_step is None:
        return f"there is no checkpoint, so {run.resume_command} begins anew{lost}"
    return f"{run.resume_command} goes on after step {checkpoint_step:,}{lost}"


def outcome_of(run: RunData, now: float | None = None) -> Outcome:
    """Return how a run stands. now: seconds since the Unix epoch; None: the clock's."""
    starts, ends = run.of_kind("run_started"), run.of_kind("run_ended")
    step = int(run.steps.step[-1]) if len(run.steps) else 0
    times = [*map(event_time, run.events), *([run.steps.last("timestamp") or math.nan])]
    last_s = max((each for each in times if math.isfinite(each)), default=None)
    ended = ends[-1] if ends and (not starts or event_time(ends[-1]) >= event_time(starts[-1])) else None
    if ended is not None and run.is_held and run.opened_s is not None and run.opened_s > event_time(ended):
        ended = None  # a resume has begun, and its actors have not started yet
    num_steps = run.num_steps
    reason = ""
    if run.is_held and ended is None:
        state = State.RUNNING
    elif ended is not None:
        outcome = as_text(ended.get("outcome"))
        state = State(outcome) if outcome in (State.DONE, State.STOPPED, State.FAILED) else State.KILLED
        reason = as_text(ended.get("reason"))
    elif num_steps is not None and step >= num_steps > 0:
        state = State.DONE
    else:
        state = State.KILLED if step or starts else State.EMPTY
    started_s = _first_time(run)
    end_s = (time.time() if now is None else now) if state is State.RUNNING else last_s
    spent = [as_number(end.get("duration_s")) for end in ends]
    if ended is not None and len(ends) == len(starts) and all(map(math.isfinite, spent)):
        duration_s: float | None = sum(spent)
    else:
        duration_s = end_s - started_s if end_s is not None and started_s is not None else None
    checkpoint_step = _checkpoint_step(run)
    has_ended = state in (State.STOPPED, State.KILLED, State.FAILED)
    can_go_on = has_ended and not run.is_emulated and (num_steps is None or step < num_steps)
    return Outcome(
        state,
        reason,
        step,
        num_steps,
        started_s,
        duration_s,
        max(len(starts), 1),
        last_s,
        checkpoint_step,
        resume_text(run.files, step, checkpoint_step) if can_go_on else "",
    )


def _checkpoint_step(run: RunData) -> int | None:
    if run.files.checkpoints.is_dir():  # events may lack a checkpoint, or name one that was deleted
        names = (path.parent.name.removeprefix("step-") for path in run.files.checkpoints.glob("step-*/meta.json"))
        return max((int(name) for name in names if name.isdecimal()), default=None)
    steps = (as_number(event.get("step")) for event in run.of_kind("checkpoint"))
    return max((int(step) for step in steps if math.isfinite(step)), default=None)


def _first_time(run: RunData) -> float | None:
    """The start of the first driver, as far as its end tells; the first event comes when the actors have started."""
    starts = [event_time(event) for event in run.of_kind("run_started") if math.isfinite(event_time(event))]
    if starts:
        until_s = starts[1] if len(starts) > 1 else math.inf
        ends = (event for event in run.of_kind("run_ended") if starts[0] <= event_time(event) <= until_s)
        began_s = (event_time(event) - as_number(event.get("duration_s")) for event in ends)
        return min((each for each in (*began_s, starts[0]) if math.isfinite(each)), default=starts[0])
    if not len(run.steps):
        return None
    first = float(run.steps["timestamp"][0] - np.nan_to_num(run.steps["step_time_s"][0]))
    return first if math.isfinite(first) else None


@dataclass(frozen=True, slots=True)
class KeyFigures:
    """The numbers of a run that fit on one line each; None where they are not known.

    Rates and shares are over ``steady_steps``.
    """

    first_loss: float | None
    last_loss: float | None
    """Mean of the last ``num_last`` steps."""
    num_last: int
    """A twentieth of the steps."""
    eval_losses: Mapping[str, tuple[float, float, int]]
    """By held-out set: the last loss, the best one, and the step of the best one."""
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    samples_per_s: float | None
    step_time_s: float | None
    """Median."""
    mfu: float | None
    backbone_mfu: float | None
    starved_share: float | None
    blocked_share: float | None
    """None without encoder actors."""
    fill: float | None
    imbalance: float | None
    """None with one replica."""
    pool_peak_nbytes: float | None
    num_steady: int
    """Steps that rates and shares are over."""


def key_figures(run: RunData) -> KeyFigures:
    """Return a run's numbers."""
    steps = run.steps
    steady = steady_steps(run)
    time_s = steps["step_time_s"][steady]

    def rate(name: str) -> float | None:
        return ratio(steps[name][steady], time_s)

    def mean_in_time(name: str) -> float | None:
        return ratio(steps[name][steady] * time_s, time_s)

    blocked = rate("blocked_s") if run.num_encoders else None
    loss = steps["loss"][np.isfinite(steps["loss"])]
    num_last = max(1, len(loss) // 20)
    pool = np.nan_to_num(steps["pool_dram_nbytes"]) + np.nan_to_num(steps["pool_hbm_nbytes"])
    return KeyFigures(
        first_loss=float(loss[0]) if len(loss) else None,
        last_loss=float(loss[-num_last:].mean()) if len(loss) else None,
        num_last=num_last,
        eval_losses={name: _eval_figures(points) for name, points in eval_points(run).items()},
        tokens_per_s=rate("num_tokens"),
        tokens_per_s_per_device=mean_in_time("tokens_per_s_per_device"),
        samples_per_s=rate("num_samples"),
        step_time_s=median(time_s),
        mfu=mean_in_time("mfu"),
        backbone_mfu=mean_in_time("backbone_mfu"),
        starved_share=rate("starved_s"),
        blocked_share=None if blocked is None else min(1.0, blocked / run.num_encoders),
        fill=_mean(steps["packing_fill"]),
        imbalance=_mean(steps["dp_imbalance"]) if run.has_replicas else None,
        pool_peak_nbytes=float(pool.max()) if len(pool) and pool.max() > 0 else None,
        num_steady=int(steady.sum()),
    )


def steady_steps(run: RunData) -> npt.NDArray[np.bool_]:
    """Return a mask: all steps but the first of each start and those of ``disturbed_steps``, or all if none is left."""
    steady = ~np.isin(run.steps.step, run.start_steps) & ~disturbed_steps(run)
    return steady if steady.any() else np.ones(len(run.steps), bool)


def disturbed_steps(run: RunData) -> npt.NDArray[np.bool_]:
    """Return a mask of the steps in which an actor was lost, hung, or was not back yet.

    A backbone's first step after its restart is one of them.
    """
    ends = run.steps["timestamp"]
    found = np.zeros(len(run.steps), bool)
    if not np.isfinite(ends).all():
        return found
    if not len(ends):
        return found
    # From one end to the next: emulated step times are not those of the clock.
    begins = np.concatenate(([ends[0] - np.nan_to_num(run.steps["step_time_s"][0])], ends[:-1]))
    for event in (*run.of_kind("lost"), *run.of_kind("restart")):
        noticed_s, hung_s, down_s = (as_number(event.get(key)) for key in ("timestamp", "hung_s", "down_s"))
        if not math.isfinite(noticed_s):
            continue
        is_of_all = event.get("event") == "restart" and event.get("role") in BACKBONE_ROLES
        if is_of_all and "hung_s" not in event:  # earlier versions gave the time at which all ran again
            noticed_s -= np.nan_to_num(down_s)
        until_s = noticed_s + np.nan_to_num(down_s)
        first = int(np.searchsorted(ends, noticed_s - np.nan_to_num(hung_s)))
        last = int(np.searchsorted(begins, until_s, side="right"))
        found[first:last] = True
        if is_of_all:
            after = int(np.searchsorted(ends, until_s))
            found[after : after + 1] = True
    return found


def eval_points(run: RunData) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return (steps, losses) of each held-out set by name; a run without events has one set, ``held-out``.

    There are none on emulated devices.
    """
    if run.steps.emulated:
        return {}
    found: dict[str, dict[int, float]] = {}
    for event in run.of_kind("evaluation"):
        step, loss = as_number(event.get("step")), as_number(event.get("loss"))
        if math.isfinite(step):
            found.setdefault(as_text(event.get("name")) or "held-out", {})[int(step)] = loss
    if found:
        return {name: _arrays(points) for name, points in found.items()}
    known = np.isfinite(run.steps["eval_loss"])
    return {"held-out": (run.steps.step[known], run.steps["eval_loss"][known])} if known.any() else {}


def _arrays(points: Mapping[int, float]) -> tuple[FloatArray, FloatArray]:
    steps = sorted(points)
    return np.array(steps, float), np.array([points[step] for step in steps], float)


def _eval_figures(points: tuple[FloatArray, FloatArray]) -> tuple[float, float, int]:
    steps, losses = points
    known = np.isfinite(losses)
    if not known.any():
        return math.nan, math.nan, 0
    best = int(np.argmin(losses[known]))
    return float(losses[known][-1]), float(losses[known][best]), int(steps[known][best])


def ratio(parts: FloatArray, wholes: FloatArray) -> float | None:
    """Return the sum of parts over that of wholes, where both are known; None if they are nowhere."""
    known = np.isfinite(parts) & np.isfinite(wholes) & (wholes > 0)
    return float(parts[known].sum() / wholes[known].sum()) if known.any() else None


def _mean(values: FloatArray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def median(values: FloatArray) -> float | None:
    """Return the median of the known values; None if there are none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the run's speed, and what to do about it."""

    limit: str
    advice: tuple[str, ...] = ()


def verdict_of(run: RunData, figures: KeyFigures) -> Verdict:
    """Return what limits a run, from the shares of waiting, as docs/running.md reads them."""
    if figures.num_steady < MIN_STEPS or figures.starved_share is None:
        return Verdict("Too few steps to tell what limits the speed.")
    starved, blocked = figures.starved_share, figures.blocked_share
    if starved <= STARVED_SHARE:
        text = f"The limit is the backbone: it waited for data in {percent(starved)} of its time"
        if blocked is None:
            text = f"Computation is the limit: the ranks waited for data in {percent(starved)} of their time"
        elif blocked > 0:
            text += f", and encoders for it in {percent(blocked)} of theirs"
        return Verdict(f"{text}.", tuple(_backbone_advice(figures)))
    waits = f"the backbone waited for data in {percent(starved)} of its time"
    if blocked is not None:
        waits += f", encoders for the backbone in {percent(blocked)} of theirs"
    if blocked is None:
        return Verdict(
            f"Data limits the speed: {waits}.", ("Raise data.num_feeders, or data.read_ahead_blocks on slow storage.",)
        )
    if blocked > BLOCKED_SHARE:
        advice = "Both sides wait: raise data.num_feeders, or pool segments if the pool is near its bound below."
        return Verdict(f"Data or the pool limit the speed: {waits}.", (advice,))
    return Verdict(f"Encoders limit the speed: {waits}.", ("Add encoders, or CPUs and decode threads for them.",))


def _backbone_advice(figures: KeyFigures) -> list[str]:
    advice = []
    if figures.imbalance is not None and figures.imbalance > IMBALANCE:
        advice.append(
            f"The costliest rank has {percent(figures.imbalance)} more work than the mean: flowtrain pack --compare "
            "shows which packing is more even."
        )
    if figures.fill is not None and figures.fill < FILL:
        advice.append(
            f"Microbatches are {percent(figures.fill)} full: another scheduler.microbatch_tokens may fill them better."
        )
    return advice
