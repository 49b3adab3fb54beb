"""Plans: from explicit degrees, through YAML and back, and what they need in total."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.plan import (
    Requirements,
    feeders_for,
    feeders_needed,
    fixed_plan,
    from_yaml,
    plan_overrides,
    requirements,
    to_yaml,
)
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError, FaultCode
from flowtrain.types.plan import PLAN_SCHEMA
from flowtrain.types.run_plan import ModulePlan, Plan


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
            "pool": {"feeder_segment_nbytes": 1 << 18},
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
    assert plan.encoders == {"vit": ModulePlan(3, num_cpus=0.1, num_devices=1.0, segment_nbytes=1 << 20)}
    assert plan.backbone == ModulePlan(2, num_cpus=0.5, num_devices=1.0)
    assert [name for name, _ in plan.modules()] == ["vit", "backbone", "feeder"]
    # 3 encoders, 2 ranks, feeder and coordinator; 3 * 0.1 must not become 0.30000000000000004
    assert requirements(plan) == Requirements(7, 1.3, 5.0, 3 * (1 << 20) + (1 << 18))


@pytest.mark.parametrize(("device", "num_devices"), [("auto", 5.0), ("cpu", 0.0)])
def test_accelerators_go_to_encoders_and_backbone(device: str, num_devices: float) -> None:
    plan = fixed_plan(make_config(device=device))
    assert requirements(plan).num_devices == num_devices
    assert plan.feeder.num_devices == 0.0
    assert requirements(plan.without_devices()) == replace(requirements(plan), num_devices=0.0)


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


def split_plan() -> Plan:
    plan = fixed_plan(make_config())
    return replace(plan, encoders={"vit": replace(plan.encoders["vit"], tensor_parallel_size=2)})


def test_an_encoders_degrees_travel_from_a_plan_to_a_configuration() -> None:
    plan = split_plan()
    assert plan_overrides(plan)[:2] == ("encoders.vit.data_parallel_size=3", "encoders.vit.tensor_parallel_size=2")
    config = make_config().with_plan(from_yaml(to_yaml(plan)))
    assert fixed_plan(config) == plan
    assert requirements(plan) == Requirements(10, 1.6, 8.0, 3 * (1 << 20) + (1 << 18)), "encoder ranks give no memory"


@settings(deadline=None)
@given(plans)
def test_a_plan_and_what_a_user_would_write_of_it_change_a_configuration_alike(plan: Plan) -> None:
    plan = replace(plan, encoders={"vit": replace(plan.backbone, pipeline_parallel_size=1)})
    outcomes = []
    for change in (
        lambda: make_config().with_plan(plan),
        lambda: override_config(make_config(), plan_overrides(plan), check_paths=False),
        lambda: override_config(make_config(), [], check_paths=False, plan=plan),
    ):
        try:
            outcomes.append(change())
        except ConfigError as error:
            outcomes.append(error.faults)
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_what_a_plan_says_nothing_of_stays() -> None:
    config = make_config()
    encoders = {"vit": config.encoders["vit"].model_copy(update={"accelerator_type": "H200", "num_devices": 0.5})}
    config = config.model_copy(update={"encoders": encoders})
    changed = config.with_plan(fixed_plan(make_config()).without_devices())
    assert changed.encoders["vit"].accelerator_type == "H200" and changed.encoders["vit"].num_devices == 0.5
    assert changed.training == config.training
    assert changed.data == config.data.model_copy(update={"num_feeders": 1}), "feeders are part of a plan"
    assert changed.pool == config.pool


def test_a_plan_has_as_many_feeders_as_its_rate_needs() -> None:
    assert [feeders_needed(rate) for rate in (0.1, 400.0, 400.1, 36_260.0)] == [1, 1, 2, 91]
    assert [feeders_for(rate, 16) for rate in (0.1, 400.0, 400.1, 5000.0, 1e9)] == [1, 1, 2, 13, 16]
    config = make_config().with_plan(replace(fixed_plan(make_config()), feeder=ModulePlan(3)))
    assert config.data.num_feeders == 3 and fixed_plan(config).feeder.data_parallel_size == 3


def test_overrides_change_a_plans_values_again_and_a_section_of_theirs_stays() -> None:
    plan = split_plan()
    config = override_config(make_config(), ["encoders.vit.tensor_parallel_size=1"], check_paths=False, plan=plan)
    assert fixed_plan(config) == fixed_plan(make_config())
    section = override_config(make_config(), ["backbone={path: other}"], check_paths=False, plan=plan)
    assert section.backbone.data_parallel_size == 1 and section.encoders["vit"].tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("change", "key", "code", "said"),
    [
        ({"data_parallel_size": 4096}, "backbone.data_parallel_size", FaultCode.DEGREES, "smaller than backbone.data"),
        ({"num_devices": 0.5}, "backbone.num_devices", FaultCode.DEGREES, "on one accelerator, which NCCL"),
        (
            {"num_devices": 2.0},
            "backbone.num_devices",
            FaultCode.VALUE,
            "num_devices = 2.0: must be at most 1",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_its_faults(
    change: dict[str, Any], key: str, code: FaultCode, said: str
) -> None:
    plan = fixed_plan(make_config())
    with pytest.raises(ConfigError, match=r"run 'test' with this plan: ") as caught:
        make_config().with_plan(replace(plan, backbone=replace(plan.backbone, **change)))
    (fault,) = caught.value.faults
    assert (fault.key, fault.code) == (key, code) and said in fault.text and fault.text in str(caught.value)


def test_a_segment_that_is_too_large_is_a_fault_of_the_pool() -> None:
    plan = split_plan()
    large = replace(plan, encoders={"vit": replace(plan.encoders["vit"], segment_nbytes=1 << 50)})
    with pytest.raises(ConfigError) as caught:
        make_config().with_plan(large)
    assert [(fault.key, fault.code) for fault in caught.value.faults] == [
        ("encoders.vit.segment_nbytes", FaultCode.POOL)
    ]


def test_a_plan_of_other_encoders_is_refused() -> None:
    plan = fixed_plan(make_config())
    with pytest.raises(ConfigError, match="encoders has vit and the plan has ears; create a plan for this") as caught:
        make_config().with_plan(replace(plan, encoders={"ears": plan.encoders["vit"]}))
    assert caught.value.faults[0].code is FaultCode.ENCODERS
