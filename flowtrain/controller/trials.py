"""Runs the plans that a profile predicts to be fast for a few steps each, until the fastest one has run."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flowtrain.allocator.mode_rating import ModeRating
from flowtrain.config.home import expanded
from flowtrain.config.kept_choices import with_kept_choices
from flowtrain.config.run import RunConfig
from flowtrain.controller import at_hand
from flowtrain.controller.planning.devices import AskedDevices
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.controller.planning.report import PlanReport, make_report, startable_plan
from flowtrain.controller.resolve import resolve
from flowtrain.controller.run import run_training
from flowtrain.costs.profile import Profile
from flowtrain.costs.profile_trials import CLOSE, Trial, trial_conditions
from flowtrain.errors import ConfigError, DataError, FlowTrainError
from flowtrain.observability.metrics import read_metrics
from flowtrain.types.run_plan import Plan

logger = logging.getLogger(__name__)

MOST_TRIALS, MOST_FAILURES = 8, 3
"""Plans that are tried; plans that may fail before any has run."""
WORTH = 0.8
"""Plans with less than this share of the best rate are not tried."""
ROUNDS = 3
"""Plans within ``CLOSE`` of the best measured rate run so often; so do those whose two runs differ by more."""
NUM_STEPS = 16
"""Measured steps of a run."""
_OVERRIDES = (
    "training.num_epochs=null",
    "training.warmup_steps=0",
    "data.eval=null",
    "checkpoint.every_steps=1000000",
    "checkpoint.keep_best=null",
    "checkpoint.at_end=false",
    "observability.progress=off",
    "observability.dashboard=false",
    "observability.trace.steps=0",
    "observability.trackers=[]",
    "observability.tracker_options={}",
)


def run_trials(
    config: RunConfig, profile: Profile, num_devices: int | None, progress: Callable[[str], None]
) -> Profile:
    """Return the profile with trials of the best plans of the configured mode, or of all modes with ``mode: auto``.

    They run on the cluster. Next is the fastest of the modes' best plans that was not tried; each trial corrects the
    rates of plans like it. Once every best plan with 80 % of the best rate was tried, or after eight, the fastest plan
    of each mode runs again, in turn, and a third time if it is close to the fastest or its two runs differ. Their new
    rates may bring up another plan, which is tried too. A plan that fails is left out; if none runs, the first error is
    raised, at the latest after three failures. num_devices: at most so many; None: all of the cluster.
    """
    config = with_kept_choices(config, ())
    planned = planned_run(config)
    asked = AskedDevices(at_hand=at_hand.of_cluster(config, num_devices).sized)
    count = sum(each.count for each in asked.at_hand)
    profile = replace(profile, trial_conditions=trial_conditions(config, planned.workload, count))
    tries = _Tries(config)
    while True:
        try:
            so_far = replace(profile, trials=tuple(tries.trials))
            report = make_report(planned, asked, profile=so_far, may_be_tried=True)
        except ConfigError as error:  # all plans have failed; the first failure says why
            raise tries.first_error or error from None
        rating = _next(report) if len(tries.trials) < MOST_TRIALS else None
        if rating is not None:
            progress(f"trial {len(tries.trials) + 1}: {rating.plan}")
            tries.run(rating, startable_plan(planned, rating, report.cluster))
        elif (index := tries.undecided) is not None:
            progress(f"trial {index + 1}, round {tries.rounds(index) + 1}")
            tries.run_again(index)
        else:
            return so_far


class _Tries:
    """Runs plans and keeps their rates."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.trials: list[Trial] = []
        self._plans: list[Plan] = []
        self.first_error: FlowTrainError | None = None

    def run(self, rating: ModeRating, plan: Plan) -> None:
        """Try a plan."""
        assert rating.plan is not None and rating.predicted is not None
        rate = self._rate(plan)
        self.trials.append(Trial(rating.plan, rating.predicted, (rate,)))
        self._plans.append(plan)
        if self.first_error and len(self.trials) >= MOST_FAILURES and not any(each.measured for each in self.trials):
            raise self.first_error

    @property
    def undecided(self) -> int | None:
        """The trial with the fewest rounds of those that need another one; None if all have theirs.

        The fastest of each mode runs twice, since one run may have met a disturbance. A plan runs a third time if its
        two differ, or if the better one is close to the best of all. A bad second run takes no plan its third.
        """
        ran = [index for index, trial in enumerate(self.trials) if trial.measured > 0]
        if len(ran) < 2:
            return None
        fastest = sorted(ran, key=lambda index: self.trials[index].measured)
        of_modes = {self.trials[index].plan.mode: index for index in fastest}.values()
        best = self.trials[fastest[-1]].measured
        close = {index for index in ran if max(self.trials[index].rates) >= CLOSE * best}
        rivals = close if len(close) > 1 else set()
        again = {index for index in ran if self.rounds(index) > 1}
        wanted = {
            index: ROUNDS if index in rivals or self._differs(index) else 2 for index in {*of_modes, *rivals, *again}
        }
        missing = [index for index in sorted(wanted) if self.rounds(index) < wanted[index]]
        return min(missing, key=self.rounds, default=None)

    def _differs(self, index: int) -> bool:
        """Whether the runs of a trial differ by more than those of close plans may."""
        ran = [rate for rate in self.trials[index].rates if rate]
        return min(ran) < CLOSE * max(ran)

    def rounds(self, index: int) -> int:
        """How often a trial ran."""
        return len(self.trials[index].rates)

    def run_again(self, index: int) -> None:
        """Run a tried plan once more."""
        trial = self.trials[index]
        self.trials[index] = replace(trial, rates=(*trial.rates, self._rate(self._plans[index])))

    def _rate(self, plan: Plan) -> float:
        try:
            return _rate(self._config, plan)
        except FlowTrainError as error:
            logger.warning("a trial failed: %s", error)
            self.first_error = self.first_error or error
            return 0.0


def _next(report: PlanReport) -> ModeRating | None:
    """The fastest plan that was not tried, if it may matter."""
    ratings = [each for each in report.comparison.ratings if each.rate is not None and not each.was_tried]
    if report.winner.mode != "llm_only":
        ratings = [each for each in ratings if each.mode != "llm_only"]
    best = max(ratings, key=lambda each: each.rate or 0.0, default=None)
    return best if best is not None and (best.rate or 0.0) >= WORTH * report.rate else None


def _rate(config: RunConfig, plan: Plan) -> float:
    """Samples/s of a plan's steps while encoders and backbone both work."""
    idle_ends = config.scheduler.lookahead_steps + 1
    steps = NUM_STEPS + 2 * idle_ends
    root = expanded(config.runs_dir)
    root.mkdir(parents=True, exist_ok=True)
    # Ranks on other nodes must see it too.
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=root) as directory:
        own = (f"runs_dir={directory}", "name=trial", f"training.max_steps={steps}")
        summary = run_training(resolve(config, (*_OVERRIDES, *own), plan=plan), plan=plan)
        lines = list(read_metrics(Path(summary.directory) / "metrics.jsonl"))
    if summary.stopped:
        raise KeyboardInterrupt
    if len(lines) < steps:
        raise DataError(f"a trial ended after {len(lines)} of {steps} steps; give the run more data")
    window = lines[idle_ends : steps - idle_ends]
    seconds = window[-1]["timestamp"] - lines[idle_ends - 1]["timestamp"]
    return float(sum(line["num_samples"] for line in window) / seconds)
