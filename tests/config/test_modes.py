"""What each mode asks of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.allocator.plan import fixed_plan, from_yaml, requirements, to_yaml
from flowtrain.config.load import load_config, override_config
from flowtrain.config.run import RunConfig
from flowtrain.config.startable import check_startable
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.types.run_plan import ENCODER_MODES, Mode

GROUPS = ["backbone.data_parallel_size=2", "backbone.tensor_parallel_size=2", "encoders.vision.num_cpus=0.5"]


def config_of(minimal: Path, mode: Mode, *overrides: str) -> RunConfig:
    return load_config(minimal, [f"mode={mode}", *overrides])


@pytest.mark.parametrize("mode", ["decoupled", "disaggregated", "colocated", "monolithic", "llm_only"])
def test_a_plan_has_encoders_where_actors_run_them(minimal: Path, mode: Mode) -> None:
    config = config_of(minimal, mode, *GROUPS)
    plan = fixed_plan(config)
    assert plan.mode == mode and bool(plan.encoders) == (mode in ENCODER_MODES) == config.has_encoder_actors
    replicas = {"decoupled": 1, "disaggregated": 1, "colocated": 4}.get(mode, 0)
    assert sum(module.num_actors for module in plan.encoders.values()) == replicas
    assert requirements(plan).num_actors == 1 + replicas + 4 + 1
    assert from_yaml(to_yaml(plan)) == plan
    assert fixed_plan(config.with_plan(plan)) == plan


def test_a_saved_plan_brings_its_mode(minimal: Path) -> None:
    plan = fixed_plan(config_of(minimal, "colocated", *GROUPS))
    assert load_config(minimal, plan=plan).mode == "colocated"
    assert load_config(minimal, ["mode=colocated"], plan=plan).mode == "colocated"
    with pytest.raises(ConfigError, match="the plan is for mode 'colocated' and an override sets mode 'disaggregated'"):
        load_config(minimal, ["mode=disaggregated"], plan=plan)


@pytest.mark.parametrize(
    ("mode", "freeze", "message"),
    [
        ("decoupled", "connector,backbone", "take connector or backbone out of it$"),
        ("monolithic", "connector,backbone", r"or train an encoder with encoders.<name>.trainable=true$"),
        ("llm_only", "backbone", "take backbone out of it: mode 'llm_only' has no images"),
    ],
)
def test_a_run_that_trains_nothing_is_refused_at_its_start(
    minimal: Path, mode: Mode, freeze: str, message: str
) -> None:
    config = config_of(minimal, mode, f"model.freeze=[{freeze}]")
    with pytest.raises(ConfigError, match=message):
        check_startable(config)
    if mode == "monolithic":
        check_startable(override_config(config, ["encoders.vision.trainable=true"], check_paths=False))


def test_a_learning_rate_of_frozen_encoders_is_refused(minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_rates.encoders \(0.001\) has no effect"):
        config_of(minimal, "monolithic", "training.learning_rates.encoders=1e-3")
    trained = ["training.learning_rates.encoders=1e-3", "encoders.vision.trainable=true"]
    assert config_of(minimal, "monolithic", *trained).trains_encoders


def test_colocated_actors_share_each_device(minimal: Path) -> None:
    plan = fixed_plan(config_of(minimal, "colocated", *GROUPS))
    assert (plan.encoders["vision"].num_devices, plan.backbone.num_devices) == (0.4, 0.6)
    assert requirements(plan).num_devices == 4.0
    plan = fixed_plan(config_of(minimal, "colocated", "encoders.vision.num_devices=0.25"))
    assert (plan.encoders["vision"].num_devices, plan.backbone.num_devices) == (0.25, 0.75)
    assert plan.is_shared
    plan = fixed_plan(config_of(minimal, "colocated", "model.device=cpu"))
    assert (plan.encoders["vision"].num_devices, plan.backbone.num_devices) == (0.0, 0.0)


@pytest.mark.parametrize("mode", ["monolithic", "llm_only"])
def test_a_rank_alone_shares_with_nobody(minimal: Path, mode: Mode) -> None:
    assert not fixed_plan(config_of(minimal, mode)).is_shared


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["encoders.vision.num_devices=0.5"], "encoders.vision.num_devices", "leaves the backbone 0.5 of each device"),
        (["backbone.num_devices=0.7"], "backbone.num_devices", r"\(0.7\) is not 0.6"),
        (
            ["encoders.vision.tensor_parallel_size=2", "encoders.vision.num_cpus=1"],
            "encoders.vision.tensor_parallel_size",
            r"\(2\) does not divide backbone.tensor_parallel_size \(1\)",
        ),
        (
            ["encoders.vision.accelerator_type=H200"],
            "encoders.vision.accelerator_type",
            r"\(H200\) is not backbone.accelerator_type \(None\)",
        ),
    ],
)
def test_what_colocated_refuses(minimal: Path, overrides: list[str], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        config_of(minimal, "colocated", *overrides)
    (fault,) = caught.value.faults
    assert (fault.key, fault.code) == (key, FaultCode.DEGREES)


def test_settings_of_encoder_actors_do_not_matter_without_any(minimal: Path) -> None:
    split = ["encoders.vision.tensor_parallel_size=2", "encoders.vision.num_cpus=0", "encoders.vision.num_devices=0.5"]
    for mode in ("monolithic", "llm_only"):
        assert not fixed_plan(config_of(minimal, mode, *split)).encoders  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        config_of(minimal, "decoupled", *split)
