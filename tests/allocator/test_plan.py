"""Plans: from explicit degrees, through YAML and back, and what they need in total."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.plan import (
    ModulePlan,
    Plan,
    Requirements,
    degree_overrides,
    fixed_plan,
    from_yaml,
    plan_overrides,
    requirements,
    to_yaml,
)
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.types.plan import PLAN_SCHEMA


def make_config(**model: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": model,
            "encoders": {
                "vit": {"path": "somewhere", "data_parallel_size": 3, "num_cpus": 0.1, "segment_nbytes": 1 << 20}
            },
            "backbone": {"path": "somewhere", "data_parallel_size": 2, "num_cpus": 0.5},
            "data": {"sources": [{"path": "somewhere.parquet"}]},
            "pool": {"text_segment_nbytes": 1 << 18},
        }
    )


modules = st.builds(
    ModulePlan,
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 1 << 40),
)
plans = st.builds(Plan, st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), modules), modules, modules)


def test_fixed_plan_spells_out_the_degrees() -> None:
    plan = fixed_plan(make_config())
    assert plan.encoders == {"vit": ModulePlan(3, num_cpus=0.1, segment_nbytes=1 << 20)}
    assert plan.backbone == ModulePlan(2, num_cpus=0.5)
    assert [name for name, _ in plan.modules()] == ["vit", "backbone", "feeder"]
    # 3 encoders, 2 ranks, feeder and coordinator; 3 * 0.1 must not become 0.30000000000000004
    assert requirements(plan) == Requirements(7, 1.3, 0.0, 3 * (1 << 20) + (1 << 18))


@pytest.mark.parametrize(("device", "num_devices"), [("auto", 5.0), ("cpu", 0.0)])
def test_accelerators_go_to_encoders_and_backbone(device: str, num_devices: float) -> None:
    plan = fixed_plan(make_config(device=device), use_devices=True)
    assert requirements(plan).num_devices == num_devices
    assert plan.feeder.num_devices == 0.0


@settings(deadline=None)
@given(plans)
def test_yaml_gives_the_same_plan_back(plan: Plan) -> None:
    assert from_yaml(to_yaml(plan)) == plan


@settings(deadline=None)
@given(plans)
def test_requirements_add_up_over_modules(plan: Plan) -> None:
    needs = requirements(plan)
    every = [plan.backbone, plan.feeder, *plan.encoders.values()]
    degrees = [m.data_parallel_size * m.tensor_parallel_size * m.pipeline_parallel_size for m in every]
    assert needs.num_actors == sum(degrees) + 1
    assert needs.num_cpus == pytest.approx(sum(n * m.num_cpus for n, m in zip(degrees, every, strict=True)))
    assert needs.num_devices == pytest.approx(sum(n * m.num_devices for n, m in zip(degrees, every, strict=True)))
    assert needs.pool_nbytes == sum(m.data_parallel_size * m.segment_nbytes for m in every), "one segment a replica"


VALID = to_yaml(fixed_plan(make_config()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VALID.replace(f"schema: {PLAN_SCHEMA}", "schema: 99"), r"my\.yaml: schema \(99\).*\(1\)"),
        ("- just\n- a list\n", r"my\.yaml: schema \(None\)"),
        ("a: [", r"my\.yaml: line \d+: not valid YAML"),
        (VALID.replace("data_parallel_size: 3", "data_parallel_size: 0"), r"encoders\.vit\.data_parallel_size = 0"),
        (VALID.replace("num_cpus: 0.5", "num_cpus: many"), r"backbone\.num_cpus = 'many'"),
        (VALID + "extra: 1\n", "extra = 1"),
        ("!!python/object/apply:os.getcwd []", "schema"),
    ],
)
def test_a_bad_plan_is_refused_with_its_place(text: str, message: str) -> None:
    assert text != VALID
    with pytest.raises(ConfigError, match=message):
        from_yaml(text, label="my.yaml")


def test_an_encoders_degrees_travel_from_a_plan_to_a_configuration() -> None:
    plan = fixed_plan(make_config())
    plan = replace(plan, encoders={"vit": replace(plan.encoders["vit"], tensor_parallel_size=2)})
    assert degree_overrides(plan)[:2] == ("encoders.vit.data_parallel_size=3", "encoders.vit.tensor_parallel_size=2")
    config = override_config(make_config(), plan_overrides(from_yaml(to_yaml(plan))), check_paths=False)
    assert fixed_plan(config) == plan
    assert requirements(plan) == Requirements(10, 1.6, 0.0, 3 * (1 << 20) + (1 << 18)), "followers give no memory"
