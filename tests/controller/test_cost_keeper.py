from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from flowtrain.allocator.plan import fixed_plan
from flowtrain.config.load import override_config
from flowtrain.controller.cost_keeper import CostKeeper
from flowtrain.controller.prepare import RunSpec
from flowtrain.costs.microbatch_costs import FittedCost, MicrobatchCosts
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec, TransformerSpec
from flowtrain.costs.profile import Profile, read_profile
from flowtrain.errors import ConfigError
from flowtrain.observability.run_dir import RunDir
from flowtrain.scheduler.cost import eq3
from flowtrain.scheduler.run_cost import costs_of, profiled_model
from flowtrain.types.events import CostFitted
from flowtrain.types.plan import CostModel
from tests.training.ranks import make_config

SPEC = ModelSpec({}, ConnectorSpec(8, 16, 16), TransformerSpec(2, 16, 32, 4, 2, 4, 128))
FITTED = CostModel("profile", per_token=1e-4, per_square=2e-7, constant=0.01)


def prepared_with(cost: CostModel, profile: Profile | None = None, *overrides: str) -> RunSpec:
    config = override_config(make_config(), overrides, check_paths=False)
    return RunSpec(config, fixed_plan(config), SPEC, ("cats",), (8,), (), 10, None, cost=cost, cost_profile=profile)


FIT = FittedCost(FITTED, "squares", 0.9, 0.8, 128)


def event(in_use: bool, r2: float = 0.9) -> CostFitted:
    return CostFitted(16, FITTED, "squares", r2, 0.8, 128, in_use)


def make_keeper(tmp_path: Path, run_spec: RunSpec, frozen: CostModel | None = None) -> tuple[CostKeeper, list[str]]:
    notes: list[str] = []
    return CostKeeper(run_spec, RunDir(tmp_path), frozen, notes.append), notes


def test_what_was_measured_is_written_for_later_runs_and_not_used_by_this_one(tmp_path: Path) -> None:
    run_spec = prepared_with(eq3(512))
    keeper, notes = make_keeper(tmp_path, run_spec)
    keeper.start("cpu")
    keeper.write()
    assert not RunDir(tmp_path).profile.exists() and keeper.r2 is None
    keeper.take(event(in_use=False))
    keeper.write()
    profile = read_profile(RunDir(tmp_path).profile)
    costs = costs_of(profile)
    assert costs.fitted == FittedCost(FITTED, "squares", 0.9, 0.8, 128)
    assert (costs.capacity, profile.device) == (run_spec.config.scheduler.microbatch_tokens, "cpu")
    assert {"torch", "transformers"} <= set(profile.versions)
    costs.check(profile.source, profiled_model(run_spec.config, SPEC), costs.capacity)
    assert keeper.r2 == 0.9 and keeper.in_use == eq3(512) and notes == []


def test_a_refit_is_in_use_and_said(tmp_path: Path) -> None:
    keeper, notes = make_keeper(tmp_path, prepared_with(eq3(512), None, "data.order=arrival", "scheduler.cost=profile"))
    keeper.take(event(in_use=True))
    assert keeper.in_use == FITTED
    figures = "R2 0.900 with squares, 0.800 with the other form"
    assert notes == [f"step 16: costs are now fitted to 128 microbatches ({figures})"]


def test_the_checkpoints_cost_goes_before_the_configurations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = Profile("NVIDIA H200", {}, {}, microbatches=MicrobatchCosts(FIT, {}, 512))
    other = dataclasses.replace(FITTED, per_token=3e-4)
    with caplog.at_level(logging.WARNING):
        keeper, _ = make_keeper(tmp_path, prepared_with(FITTED, profile), frozen=FITTED)
        assert keeper.in_use == FITTED and caplog.text == ""
        keeper, _ = make_keeper(tmp_path, prepared_with(FITTED, profile), frozen=other)
    assert keeper.in_use == other
    assert "0.0003" in caplog.text and "0.0001" in caplog.text
    keeper.start("cpu")  # a profile that is not used may be of any device
    fresh, _ = make_keeper(tmp_path, prepared_with(FITTED, profile))
    with pytest.raises(ConfigError, match="device is 'NVIDIA H200' there and 'cpu' in this run"):
        fresh.start("cpu")
