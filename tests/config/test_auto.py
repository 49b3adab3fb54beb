"""``mode: auto``: what it refuses, how it is read before it is decided, and what of it overrides keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain.allocator.plan import configured_settings, fixed_plan, with_settings_of
from flowtrain.config.allocator import CHOICE_KEYS, PLANNER_CHOICES
from flowtrain.config.kept_choices import with_kept_choices
from flowtrain.config.load import dump_resolved, load_config, load_resolved
from flowtrain.config.schema import key_patterns
from flowtrain.config.startable import check_startable
from flowtrain.controller.resolve import start_of
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.types.run_plan import BackboneSettings

AUTO = "mode=auto"
TRAINED = "encoders.vision.trainable=true"


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("allocator.choose=[chunk]", "allocator.choose", r"choose.0 = 'chunk': .*; did you mean 'chunks'\?"),
        ("allocator.choose=chunks", "allocator.choose", "'chunks': must be auto, all or a list of"),
        ("allocator.method=even", "allocator.method", r"'even'\) is an ablation of mode 'decoupled'"),
        ("pipeline.partition=[4]", "pipeline.partition", "chooses the stages; leave it out"),
        ("pipeline.partition=[2,2]", "pipeline.partition", "chooses the stages; leave it out"),
    ],
)
def test_what_auto_refuses(minimal: Path, override: str, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load_config(minimal, [AUTO, override])
    assert key in [fault.key for fault in caught.value.faults]


def test_shares_of_any_mode_are_left_to_the_plan(minimal: Path) -> None:
    load_config(minimal, [AUTO, "backbone.data_parallel_size=2", "encoders.vision.num_devices=0.4"])
    load_config(minimal, [AUTO, "encoders.vision.tensor_parallel_size=2", "backbone.num_devices=0.6"])


def test_until_it_is_decided_it_is_read_as_one_mode(minimal: Path) -> None:
    config = load_config(minimal, [AUTO])
    assert config.settled_mode == config.settled.mode == fixed_plan(config).mode == "decoupled"
    assert config.has_encoder_actors and config.encoder_replicas("vision") == 1
    check_startable(config)
    trained = load_config(minimal, [AUTO, TRAINED, "model.freeze=[connector,backbone]"])
    assert trained.settled.mode == "monolithic" and not trained.has_encoder_actors
    check_startable(trained)


def test_other_modes_are_settled(minimal: Path) -> None:
    config = load_config(minimal, ["mode=colocated"])
    assert config.settled is config and config.settled_mode == "colocated"


def test_a_plan_decides_the_mode_that_is_open(minimal: Path) -> None:
    settings = BackboneSettings(8192, "full", 1, "gradients")
    plan = fixed_plan(load_config(minimal, ["mode=colocated"]))
    plan = replace(plan, backbone_settings=settings, gradient_reduction="step")
    for overrides in ([AUTO], []):
        config = load_config(minimal, overrides, plan=plan)
        assert config.mode == "colocated" and configured_settings(config) == settings
    # What the run records is what it does: an override of a single key wins.
    changed = load_config(minimal, [AUTO, "scheduler.microbatch_tokens=16384"], plan=plan)
    recorded = with_settings_of(changed, fixed_plan(changed), plan)
    assert recorded.backbone_settings == replace(settings, microbatch_tokens=16384)
    assert with_settings_of(changed, fixed_plan(changed), None).backbone_settings is None


def test_the_keys_of_all_choices_are_keys() -> None:
    assert set(CHOICE_KEYS) == set(PLANNER_CHOICES)
    for keys in CHOICE_KEYS.values():
        assert {tuple(key.split(".")) for key in keys} <= set(key_patterns())


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], set()),
        (["scheduler.microbatch_tokens=16384"], {"microbatch_tokens"}),
        (["pipeline.schedule=1f1b", "backbone.gradient_reduction=step"], {"chunks", "gradient_reduction"}),
        (["pipeline={}"], {"chunks"}),
        (["training.max_steps=2"], set()),
    ],
)
def test_a_setting_that_an_override_sets_is_no_choice(minimal: Path, overrides: list[str], kept: set[str]) -> None:
    config = load_config(minimal, [AUTO, *overrides])
    assert config.planner_choices == set(PLANNER_CHOICES)
    assert with_kept_choices(config, overrides).planner_choices == set(PLANNER_CHOICES) - kept
    asked = load_config(minimal, [AUTO, "allocator.choose=[chunks]"])
    assert with_kept_choices(asked, overrides).planner_choices == {"chunks"}, "the list decides"
    assert load_config(minimal, overrides).planner_choices == set()
    everything = load_config(minimal, [*overrides, "allocator.choose=all"])
    assert with_kept_choices(everything, overrides).planner_choices == set(PLANNER_CHOICES), "with any mode"


def test_a_profile_need_not_be_there_when_a_configuration_is_read(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, ["allocator.profile=profile.json"])
    assert config.allocator.profile == str(tmp_path / "profile.json")
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert load_resolved(tmp_path / "resolved.yaml") == config


def test_an_override_that_contradicts_the_plan_is_refused(minimal: Path) -> None:
    plan = replace(fixed_plan(load_config(minimal)), mode="disaggregated")
    given = [AUTO, "backbone.data_parallel_size=2", "model.tokenizer=assets"]
    start = start_of(minimal, given, resume=False, plan=None)
    assert start.is_open and start.plan is None
    with pytest.raises(ConfigError, match="sets backbone.data_parallel_size to 2, and the plan .* has 1") as caught:
        start.decided(plan)
    assert [(fault.key, fault.code) for fault in caught.value.faults] == [
        ("backbone.data_parallel_size", FaultCode.CONFLICT)
    ]
    # Resources may differ, and what says the same is no contradiction.
    given = [AUTO, "backbone.data_parallel_size=1", "backbone.num_cpus=0.5", "model.tokenizer=assets"]
    decided = start_of(minimal, given, resume=False, plan=None).decided(plan)
    assert (decided.mode, decided.backbone.num_cpus) == ("disaggregated", 0.5)


def test_devices_are_for_a_plan_that_is_made(minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"--devices \(2\) is for a plan that mode 'auto' makes"):
        start_of(minimal, [], resume=False, plan=None, devices=2)
    assert start_of(minimal, [AUTO], resume=False, plan=None, devices=2).is_open
    with pytest.raises(ConfigError, match=r"--devices \(2\) .* and the mode is 'decoupled'"):
        start_of(minimal, [AUTO], resume=False, plan=fixed_plan(load_config(minimal)), devices=2)


def test_a_run_that_goes_on_has_its_own_plan(minimal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from flowtrain.allocator.plan import to_yaml

    given = [AUTO, f"runs_dir={tmp_path}"]
    assert start_of(minimal, given, resume=True, plan=None).is_open, "it was never started"
    plan = fixed_plan(load_config(minimal, ["mode=colocated", "backbone.data_parallel_size=2"]))
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "plan.yaml").write_text(to_yaml(plan))
    start = start_of(minimal, given, resume=True, plan=None)
    assert (start.config.mode, start.config.backbone.data_parallel_size, start.plan) == ("colocated", 2, plan)
    assert "plan.yaml decides for a run that goes on: mode colocated" in caplog.text
    with pytest.raises(ConfigError, match=r"sets backbone.data_parallel_size to 1, and .*plan.yaml, .* has 2; leave"):
        start_of(minimal, [*given, "backbone.data_parallel_size=1"], resume=True, plan=None)
    same = [*given, "backbone.data_parallel_size=2", "backbone.num_cpus=0.5"]
    assert start_of(minimal, same, resume=True, plan=None).config.backbone.num_cpus == 0.5, "resources may differ"
    freed = [*given[1:], "mode=colocated", "backbone.data_parallel_size=4"]
    assert start_of(minimal, freed, resume=True, plan=None).config.backbone.data_parallel_size == 4
    assert start_of(minimal, given, resume=False, plan=None).is_open
