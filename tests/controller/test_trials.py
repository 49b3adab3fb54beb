"""Which plans are tried, and when trials end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from flowtrain import api
from flowtrain.config.run import RunConfig
from flowtrain.controller import at_hand, trials
from flowtrain.controller.at_hand import DevicesAtHand
from flowtrain.controller.planning.devices import AskedDevices, SizedType
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.controller.planning.report import PlanReport, make_report
from flowtrain.costs.profile_trials import Trial
from flowtrain.errors import StallError
from flowtrain.observability.run_dir import run_dir
from flowtrain.types.run_plan import Mode, Plan
from tests.profiles import cpu_profile

QUICKSTART = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml")
TWO = DevicesAtHand((SizedType("cpu", 2, 2),), "this machine")
Rate = Callable[[Plan], float]


@pytest.fixture
def config() -> RunConfig:
    return api.resolve(QUICKSTART, ["mode=auto"])


def tried(
    config: RunConfig, rate: Rate, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Mode], tuple[Trial, ...], PlanReport]:
    """Run trials with given rates; returns the modes in the order of the runs, the trials, and the plan with them."""
    order: list[Mode] = []

    def run(config: RunConfig, plan: Plan) -> float:
        order.append(plan.mode)
        return rate(plan)

    monkeypatch.setattr(at_hand, "of_cluster", lambda config, count: TWO)
    monkeypatch.setattr(trials, "_rate", run)
    profile = cpu_profile(config, image_s=4e-3)  # so that all modes are predicted to be close
    found = trials.run_trials(config, profile, None, lambda what: None)
    report = make_report(planned_run(config), AskedDevices(at_hand=TWO.sized), profile=found)
    return order, found.trials, report


def test_the_fastest_in_trials_wins_and_has_its_measured_rate(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in ("decoupled", "colocated", "monolithic", "disaggregated"):
        order, found, report = tried(config, lambda plan, mode=mode: 99.0 if plan.mode == mode else 80.0, monkeypatch)
        assert report.winner.mode == mode and report.winner.was_tried and report.rate == pytest.approx(99.0)
        assert "trials ran 99 samples/s" in report.winner.reason
        assert order[: len(found)] == [trial.plan.mode for trial in found], "each plan once, then those that are close"
        assert len({repr(trial.plan) for trial in found}) == len(found) <= trials.MOST_TRIALS


def test_only_what_is_close_runs_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"decoupled": 100.0, "colocated": 95.0, "monolithic": 60.0, "disaggregated": 89.0}
    order, found, report = tried(config, lambda plan: rates[plan.mode], monkeypatch)
    counts = {trial.plan.mode: len(trial.rates) for trial in found}
    assert counts["decoupled"] == counts["colocated"] == trials.ROUNDS
    assert all(count == 2 for mode, count in counts.items() if rates[mode] < 90.0), "one run may meet a disturbance"
    assert report.winner.mode == "decoupled" and len(order) == sum(len(trial.rates) for trial in found)


def test_one_bad_round_takes_no_plan_its_third(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Mode] = []
    rates = {"decoupled": (100.0, 60.0, 98.0), "colocated": (95.0, 95.0, 95.0)}

    def rate(plan: Plan) -> float:
        if plan.mode not in rates:
            return 50.0
        runs.append(plan.mode)
        return rates[plan.mode][min(runs.count(plan.mode), 3) - 1]

    _, found, _ = tried(config, rate, monkeypatch)
    first = next(trial for trial in found if trial.plan.mode == "decoupled")
    assert first.rates == (100.0, 60.0, 98.0) and first.measured == 98.0


def test_a_plan_whose_runs_differ_gets_a_third(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even far below the best: its rate is what the table of modes shows."""
    runs: list[str] = []
    rates = {"decoupled": (100.0,), "colocated": (60.0, 80.0, 78.0), "monolithic": (60.0, 62.0)}

    def rate(plan: Plan) -> float:
        runs.append(repr(plan))
        given = rates.get(plan.mode, (50.0,))
        return given[min(runs.count(repr(plan)), len(given)) - 1]

    _, found, _ = tried(config, rate, monkeypatch)
    assert {(trial.plan.mode, trial.rates) for trial in found} >= {
        ("colocated", (60.0, 80.0, 78.0)),
        ("monolithic", (60.0, 62.0)),
    }


@pytest.mark.parametrize(("seed", "brings_up"), [(0, True), (1, True), (2, False), (3, True), (4, True)])
def test_the_winner_has_run_however_much_rates_vary(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, seed: int, brings_up: bool
) -> None:
    """New rates of later rounds may bring up a plan that was not worth a trial before."""
    random, ran = Random(seed), []
    monkeypatch.setattr(trials, "MOST_TRIALS", 1000)

    def rate(plan: Plan) -> float:
        ran.append(repr(plan))
        return random.uniform(60.0, 100.0)

    _, found, report = tried(config, rate, monkeypatch)
    assert report.winner.was_tried
    runs_again = len(set(ran[: len(found)])) < len(found)
    assert runs_again == brings_up, "with all seeds but one some plan runs again before the last is tried"


def test_a_plan_whose_trial_fails_is_left_out(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, report = tried(config, lambda plan: 0.0 if plan.mode == "decoupled" else 50.0, monkeypatch)
    failed = [trial for trial in found if trial.plan.mode == "decoupled"]
    assert failed and all(len(trial.rates) == 1 for trial in failed)
    assert report.winner.mode != "decoupled"


def test_a_configured_mode_is_the_only_one_that_is_tried(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    order, _, report = tried(api.resolve(QUICKSTART, ["mode=monolithic"]), lambda plan: 50.0, monkeypatch)
    assert set(order) == {"monolithic"} and report.winner.mode == "monolithic"


def test_trials_do_not_count_under_other_conditions(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_hand, "of_cluster", lambda config, count: TWO)
    monkeypatch.setattr(trials, "_rate", lambda config, plan: 50.0)
    profile = cpu_profile(config)
    found = trials.run_trials(config, profile, None, lambda what: None)
    four, larger = (
        AskedDevices(at_hand=(SizedType("cpu", 4, 4),)),
        api.resolve(QUICKSTART, ["mode=auto", f"training.global_batch_size={2 * config.training.global_batch_size}"]),
    )
    for asked, given, said in (
        (AskedDevices(at_hand=TWO.sized), config, None),
        (four, config, "devices was 2 and is 4"),
        (AskedDevices(at_hand=TWO.sized), larger, "training.global_batch_size was"),
    ):
        report = make_report(planned_run(given), asked, profile=found)
        plain = make_report(planned_run(given), asked, profile=profile)
        notes = " ".join(report.notes)
        if said is None:
            assert report.winner.was_tried and "do not count" not in notes
        else:
            assert "the profile's trials do not count" in notes and said in notes
            assert report.rate == plain.rate and not report.winner.was_tried


def test_a_repeat_that_fails_takes_no_rate_away(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Mode] = []

    def sometimes(config: RunConfig, plan: Plan) -> float:
        runs.append(plan.mode)
        if runs.count(plan.mode) == 2:
            raise StallError("once")
        return 50.0

    monkeypatch.setattr(at_hand, "of_cluster", lambda config, count: TWO)
    monkeypatch.setattr(trials, "_rate", sometimes)
    found = trials.run_trials(api.resolve(QUICKSTART, ["mode=decoupled"]), cpu_profile(config), None, lambda what: None)
    assert all(trial.measured == 50.0 for trial in found.trials)


def test_an_interrupt_ends_the_trials(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = config.model_copy(update={"runs_dir": str(tmp_path)})
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    summary = SimpleNamespace(stopped=True, directory=tmp_path)
    monkeypatch.setattr(at_hand, "of_cluster", lambda config, count: TWO)
    monkeypatch.setattr(trials, "run_training", lambda config, plan: summary)
    with pytest.raises(KeyboardInterrupt):
        trials.run_trials(ended, cpu_profile(config), None, lambda what: None)


def test_the_failure_of_the_only_plan_is_told(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: RunConfig, plan: Plan) -> float:
        raise StallError("nothing came")

    monkeypatch.setattr(trials, "MOST_FAILURES", 1000)
    monkeypatch.setattr(trials, "MOST_TRIALS", 1000)
    monkeypatch.setattr(at_hand, "of_cluster", lambda config, count: TWO)
    monkeypatch.setattr(trials, "_rate", fail)
    one = api.resolve(QUICKSTART, ["mode=llm_only", "allocator.choose=[]"])
    with pytest.raises(StallError, match="nothing came"):
        trials.run_trials(one, cpu_profile(config), None, lambda what: None)


def test_if_the_first_plans_fail_their_error_is_told_and_nothing_is_left(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[RunConfig] = []

    def fail(config: RunConfig, plan: Plan) -> None:
        started.append(config)
        raise StallError("nothing came")

    monkeypatch.setattr(at_hand, "of_cluster", lambda config, count: TWO)
    monkeypatch.setattr(trials, "run_training", fail)
    with pytest.raises(StallError, match="nothing came"):
        trials.run_trials(config, cpu_profile(config), None, lambda what: None)
    assert len(started) == trials.MOST_FAILURES and "a trial failed: nothing came" in caplog.text
    for each in started:
        assert each.mode != "auto" and not Path(each.runs_dir).exists()
        assert run_dir(each).root.parent != run_dir(config).root.parent
        assert each.data.eval is None and each.training.num_epochs is None and not each.checkpoint.at_end
