"""Which actors there are, and which share a place."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.plan import ModulePlan, Plan, requirements
from flowtrain.controller.posts import bundle_indices, bundles_of, posts_of
from flowtrain.controller.state import Role

DEGREES = st.integers(1, 4)


def plan_of(backbone: ModulePlan, num_encoders: int = 2, encoder_cpus: float = 0.5) -> Plan:
    encoders = {"vision": ModulePlan(data_parallel_size=num_encoders, num_cpus=encoder_cpus)}
    return Plan(encoders, backbone, feeder=ModulePlan(segment_nbytes=1 << 16))


def test_every_actor_of_the_plan_has_a_post() -> None:
    posts = posts_of(plan_of(ModulePlan(data_parallel_size=2, num_cpus=1.0)))
    names = ["encoder-0", "encoder-1", "backbone-dp0-pp0-tp0", "backbone-dp1-pp0-tp0", "feeder-0"]
    assert [post.name for post in posts] == names
    assert [post.role for post in posts] == [Role.ENCODER] * 2 + [Role.BACKBONE] * 2 + [Role.FEEDER]
    assert [post.bundle for post in posts] == [{"CPU": 0.5}] * 2 + [{"CPU": 1.0}] * 2 + [{}]


def test_backbone_ranks_are_numbered_with_the_tensor_axis_fastest() -> None:
    module = ModulePlan(data_parallel_size=2, pipeline_parallel_size=3, tensor_parallel_size=2)
    ranks = [post for post in posts_of(plan_of(module)) if post.role is Role.BACKBONE]
    expected = [f"backbone-dp{dp}-pp{pp}-tp{tp}" for dp, pp, tp in product(range(2), range(3), range(2))]
    assert [post.name for post in ranks] == expected
    assert [post.index for post in ranks] == list(range(12))


@given(DEGREES, DEGREES, DEGREES, st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 1.0]), st.integers(0, 3))
def test_bundles_hold_just_what_their_actors_take(
    dp: int, pp: int, tp: int, cpus: float, devices: float, num_encoders: int
) -> None:
    backbone = ModulePlan(dp, tp, pp, num_cpus=cpus, num_devices=devices)
    plan = plan_of(backbone, num_encoders=num_encoders)
    posts = posts_of(plan)
    bundles, indices = bundles_of(posts), bundle_indices(posts)
    assert len(bundles) == num_encoders + (dp * pp if cpus or devices else 0)
    for index, bundle in enumerate(bundles):
        members = [post for post, where in zip(posts, indices, strict=True) if where == index]
        assert len({post.place for post in members}) == 1
        for name, amount in bundle.items():
            assert amount == pytest.approx(sum(post.bundle.get(name, 0.0) for post in members))
    assert all((index == -1) == (not post.bundle) for post, index in zip(posts, indices, strict=True))
    assert sum(bundle.get("CPU", 0.0) for bundle in bundles) == pytest.approx(requirements(plan).num_cpus)
