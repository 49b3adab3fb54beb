"""Which actors there are, and which share a place."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.plan import requirements
from flowtrain.controller.actor_specs import actor_specs_of, bundle_indices, bundles_of
from flowtrain.controller.state import Role
from flowtrain.types.run_plan import ModulePlan, Plan

DEGREES = st.integers(1, 4)


def plan_of(backbone: ModulePlan, num_encoders: int = 2, encoder_cpus: float = 0.5, encoder_tp: int = 1) -> Plan:
    encoders = {
        "vision": ModulePlan(num_encoders, encoder_tp, num_cpus=encoder_cpus, segment_nbytes=1 << 20),
    }
    return Plan(encoders, backbone, feeder=ModulePlan(segment_nbytes=1 << 16))


def test_every_actor_of_the_plan_has_a_post() -> None:
    specs = actor_specs_of(plan_of(ModulePlan(data_parallel_size=2, num_cpus=1.0)))
    names = ["encoder-0", "encoder-1", "backbone-dp0-pp0-tp0", "backbone-dp1-pp0-tp0", "feeder-0"]
    assert [spec.name for spec in specs] == names
    assert [spec.role for spec in specs] == [Role.ENCODER] * 2 + [Role.BACKBONE] * 2 + [Role.FEEDER]
    assert [spec.bundle for spec in specs] == [{"CPU": 0.5}] * 2 + [{"CPU": 1.0}] * 2 + [{}]


def test_backbone_ranks_are_numbered_with_the_tensor_axis_fastest() -> None:
    module = ModulePlan(data_parallel_size=2, pipeline_parallel_size=3, tensor_parallel_size=2)
    ranks = [spec for spec in actor_specs_of(plan_of(module)) if spec.role is Role.BACKBONE]
    expected = [f"backbone-dp{dp}-pp{pp}-tp{tp}" for dp, pp, tp in product(range(2), range(3), range(2))]
    assert [spec.name for spec in ranks] == expected
    assert [spec.index for spec in ranks] == list(range(12))


def test_an_encoder_has_its_followers_beside_it() -> None:
    plan = plan_of(ModulePlan(num_cpus=1.0), encoder_tp=2)
    specs = [spec for spec in actor_specs_of(replace(plan, encoders={**plan.encoders, "audio": ModulePlan()}))]
    encoders = [spec for spec in specs if spec.role in (Role.ENCODER, Role.ENCODER_RANK)]
    assert [(spec.name, spec.role, spec.place) for spec in encoders] == [
        ("encoder-0", Role.ENCODER, "encoder-0"),
        ("encoder-0-tp1", Role.ENCODER_RANK, "encoder-0"),
        ("encoder-1", Role.ENCODER, "encoder-1"),
        ("encoder-1-tp1", Role.ENCODER_RANK, "encoder-1"),
        ("encoder-2", Role.ENCODER, "encoder-2"),
    ]
    assert {bundle["CPU"] for bundle in bundles_of(specs)} == {1.0}
    assert [spec.segment_nbytes for spec in encoders] == [1 << 20, 0, 1 << 20, 0, 0]
    assert sum(spec.segment_nbytes for spec in actor_specs_of(plan)) == requirements(plan).pool_nbytes


def test_the_backbones_bundles_come_first() -> None:
    """Ray packs bundles of one size in their order; a backbone behind encoders would be spread over more nodes."""
    plan = plan_of(ModulePlan(data_parallel_size=2, tensor_parallel_size=2, num_cpus=0.25), num_encoders=3)
    specs = actor_specs_of(plan)
    assert bundles_of(specs) == [{"CPU": 0.5}] * 5
    indices = dict(zip((spec.name for spec in specs), bundle_indices(specs), strict=True))
    assert [indices[f"backbone-dp{dp}-pp0-tp{tp}"] for dp in range(2) for tp in range(2)] == [0, 0, 1, 1]
    assert [indices[f"encoder-{index}"] for index in range(3)] == [2, 3, 4]


@given(
    DEGREES,
    DEGREES,
    DEGREES,
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 3),
    DEGREES,
)
def test_bundles_hold_just_what_their_actors_take(
    dp: int, pp: int, tp: int, cpus: float, devices: float, num_encoders: int, encoder_tp: int
) -> None:
    backbone = ModulePlan(dp, tp, pp, num_cpus=cpus, num_devices=devices)
    plan = plan_of(backbone, num_encoders=num_encoders, encoder_tp=encoder_tp)
    specs = actor_specs_of(plan)
    bundles, indices = bundles_of(specs), bundle_indices(specs)
    assert len(bundles) == num_encoders + (dp * pp if cpus or devices else 0)
    for index, bundle in enumerate(bundles):
        members = [spec for spec, where in zip(specs, indices, strict=True) if where == index and spec.bundle]
        assert len({spec.place for spec in members}) == 1
        for name, amount in bundle.items():
            assert amount == pytest.approx(sum(spec.bundle.get(name, 0.0) for spec in members))
    assert all((index == -1) == (not bundles) for index in indices)
    assert sum(bundle.get("CPU", 0.0) for bundle in bundles) == pytest.approx(requirements(plan).num_cpus)


@given(st.integers(1, 9), st.integers(1, 4), DEGREES)
def test_actors_that_take_no_resources_are_spread_over_all_bundles(num_feeders: int, dp: int, tp: int) -> None:
    """Feeders on one node would read for all nodes; the ranks of a group stay together all the same."""
    plan = plan_of(ModulePlan(dp, tp, num_cpus=0.0), num_encoders=3)
    specs = actor_specs_of(replace(plan, feeder=ModulePlan(num_feeders)))
    by_place: dict[str, set[int]] = {}
    for spec, index in zip(specs, bundle_indices(specs), strict=True):
        by_place.setdefault(spec.place, set()).add(index)
    assert all(len(indices) == 1 for indices in by_place.values())
    guests = [min(indices) for place, indices in by_place.items() if not place.startswith("encoder")]
    counts = [guests.count(bundle) for bundle in range(3)]
    assert sum(counts) == len(guests) == dp + num_feeders and max(counts) - min(counts) <= 1


def test_those_that_share_a_device_are_in_one_bundle() -> None:
    """Two bundles of half a device could lie on two of them."""
    half = ModulePlan(num_cpus=1.0, num_devices=0.5)
    plan = Plan({"vision": half}, half, feeder=ModulePlan(segment_nbytes=1 << 16))
    specs = actor_specs_of(plan)
    assert bundles_of(specs) == [{"CPU": 2.0, "GPU": 1.0}]
    assert bundle_indices(specs) == [0, 0, 0]
    assert [spec.bundle["GPU"] for spec in specs[:2]] == [0.5, 0.5]
    whole = ModulePlan(num_cpus=1.0, num_devices=1.0)
    assert len(bundles_of(actor_specs_of(Plan({"vision": whole}, whole, feeder=ModulePlan())))) == 2


def colocated(dp: int, pp: int, tp: int, encoder_tp: int = 1, devices: bool = True) -> Plan:
    rank = ModulePlan(dp, tp, pp, num_cpus=1.0, num_devices=0.6 * devices)
    replicas = rank.num_actors // encoder_tp
    encoder = ModulePlan(replicas, encoder_tp, num_cpus=0.5, num_devices=0.4 * devices, segment_nbytes=1 << 20)
    return Plan({"vision": encoder}, rank, ModulePlan(segment_nbytes=1 << 16), mode="colocated")


@given(DEGREES, DEGREES, st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]), st.booleans())
def test_encoders_are_where_the_ranks_are_whose_devices_they_share(
    dp: int, pp: int, tps: tuple[int, int], devices: bool
) -> None:
    tp, encoder_tp = tps
    specs = actor_specs_of(colocated(dp, pp, tp, encoder_tp, devices))
    bundles, indices = bundles_of(specs), bundle_indices(specs)
    gpus = {"GPU": float(tp)} if devices else {}
    assert bundles == [{"CPU": 1.5 * tp, **gpus}] * (dp * pp)
    for index in range(len(bundles)):
        members = [spec for spec, where in zip(specs, indices, strict=True) if where == index and spec.bundle]
        ranks = [spec for spec in members if spec.role is Role.BACKBONE]
        encoders = [spec for spec in members if spec.role is not Role.BACKBONE]
        assert len(ranks) == len(encoders) == tp
        assert len({spec.leader or spec.name for spec in encoders}) == tp // encoder_tp, "whole replicas"
    assert {spec.name for spec in specs if spec.waits} == {
        spec.name for spec in specs if devices and spec.role in (Role.ENCODER, Role.ENCODER_RANK)
    }


def test_a_type_of_accelerators_is_asked_for_where_there_are_any() -> None:
    typed = ModulePlan(num_cpus=1.0, num_devices=1.0, accelerator_type="H200")
    without = ModulePlan(num_cpus=1.0, accelerator_type="H200")
    plan = Plan({"vision": typed}, without, feeder=ModulePlan())
    assert bundles_of(actor_specs_of(plan)) == [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H200": 0.001}]
