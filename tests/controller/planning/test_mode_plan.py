"""The plan of any mode's rating is a plan that a run takes, with actors that fit the devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain import api
from flowtrain.allocator.allocation import ModuleAllocation
from flowtrain.allocator.mode_rating import ModeRating
from flowtrain.allocator.plan import fixed_plan, requirements
from flowtrain.controller.planning.mode_plan import plan_of
from flowtrain.controller.planning.nodes import nodes_needed
from flowtrain.controller.planning.planned import Planned
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.controller.planning.request import request_of
from flowtrain.costs.cluster import Cluster, DeviceType, Links
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings, Mode
from tests.profiles import cpu_profile

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
SETTINGS = BackboneSettings(1024, "full", 2, "gradients")


def module(name: str, degrees: Degrees, device_type: str = "cpu") -> ModuleAllocation:
    return ModuleAllocation(
        name=name,
        device_type=device_type,
        degrees=degrees,
        share=1.0,
        rate=1.0,
        production=1.0,
        peak_nbytes=1,
        memory_nbytes=2,
        mfu=0.5,
        waiting=0.0,
        gradient_reduction="step" if name == "backbone" else None,
        num_shards=degrees.dp if name == "backbone" else None,
    )


def rating(mode: Mode, encoder: Degrees | None, backbone: Degrees, **changes: object) -> ModeRating:
    modules = [module("backbone", backbone)]
    if encoder is not None:
        modules.insert(0, module("vision", encoder))
    devices = backbone.world_size + (encoder.world_size if encoder is not None and mode != "colocated" else 0)
    values: dict[str, object] = {"rate": 1.0, "reason": "", "modules": tuple(modules), "devices": devices}
    return ModeRating(mode, **{**values, **changes})  # type: ignore[arg-type]


def cluster_of(count: int, name: str = "cpu") -> Cluster:
    return Cluster((DeviceType(name, count, 1e12, 1 << 34, 1e11, Links(1e10, 1e9, "test"), devices_per_node=4),))


@pytest.fixture(scope="module")
def planned() -> Planned:
    return planned_run(api.resolve(QUICKSTART, ["mode=auto", "model.device=cpu"]))


EVERY = [
    rating("decoupled", Degrees(2), Degrees(2), settings=replace(SETTINGS, chunks=1)),
    rating("disaggregated", Degrees(1), Degrees(1)),
    rating("colocated", Degrees(4), Degrees(2, 2), settings=SETTINGS),
    rating("colocated", Degrees(1), Degrees(1)),
    rating("monolithic", None, Degrees(1, 4), encoder_layers="own"),
    rating("monolithic", None, Degrees(1), encoder_layers="first"),
]


@pytest.mark.parametrize("found", EVERY, ids=lambda found: f"{found.mode}-{found.devices}")
def test_a_plan_of_each_mode_starts_as_it_was_rated(planned: Planned, found: ModeRating) -> None:
    plan = plan_of(planned, found, cluster_of(4))
    assert plan.mode == found.mode and plan.backbone.degrees == found.modules[-1].degrees
    assert [module.degrees for module in plan.encoders.values()] == [each.degrees for each in found.modules[:-1]]
    config = planned.config.with_plan(plan)
    assert config.mode == found.mode
    assert replace(fixed_plan(config), backbone_settings=found.settings, encoder_layers=found.encoder_layers) == plan
    if found.settings is not None:
        assert config.scheduler.microbatch_tokens == 1024 and config.pipeline.chunks == found.settings.chunks
    if found.encoder_layers is not None:
        assert config.pipeline.encoder_layers == found.encoder_layers
    # A device is a core here, and all actors together need no more of them.
    assert requirements(plan).num_cpus <= found.devices


def test_cores_are_shared_in_proportion_to_what_is_configured(planned: Planned) -> None:
    alone, _, *_ = EVERY
    plan = plan_of(planned, alone, cluster_of(4))
    assert (plan.encoders["vision"].num_cpus, plan.backbone.num_cpus) == (0.5, 1.0)
    shared = plan_of(planned, EVERY[2], cluster_of(4))
    assert (shared.encoders["vision"].num_cpus, shared.backbone.num_cpus) == (0.3333, 0.6666)
    wide = api.resolve(QUICKSTART, ["mode=auto", "model.device=cpu", "encoders.vision.num_cpus=2"])
    plan = plan_of(replace(planned, config=wide), alone, cluster_of(4))
    assert (plan.encoders["vision"].num_cpus, plan.backbone.num_cpus) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("found", "shares"),
    [(EVERY[0], (1.0, 1.0)), (EVERY[2], (0.4, 0.6)), (EVERY[3], (0.4, 0.6)), (EVERY[4], (None, 1.0))],
    ids=lambda value: value.mode if isinstance(value, ModeRating) else None,
)
def test_actors_take_whole_devices_or_shares_of_one(
    planned: Planned, found: ModeRating, shares: tuple[float | None, float]
) -> None:
    config = api.resolve(QUICKSTART, ["mode=auto"])
    planned = replace(planned, config=config)
    modules = tuple(replace(each, device_type="h200") for each in found.modules)
    plan = plan_of(planned, replace(found, modules=modules), cluster_of(4, "h200"))
    encoder = plan.encoders["vision"].num_devices if plan.encoders else None
    assert (encoder, plan.backbone.num_devices) == shares
    assert requirements(plan).num_devices == found.devices
    planned.config.with_plan(plan)


def test_nodes_are_counted_once_for_what_shares_devices() -> None:
    assert nodes_needed(EVERY[0], cluster_of(8)) == 1
    assert nodes_needed(rating("colocated", Degrees(8), Degrees(8)), cluster_of(8)) == 2
    assert nodes_needed(rating("decoupled", Degrees(8), Degrees(8)), cluster_of(16)) == 4


def test_only_microbatches_that_a_profile_reaches_are_chosen(planned: Planned) -> None:
    measured = request_of(planned, cluster_of(4), cpu_profile(planned.config))
    free = request_of(planned, cluster_of(4), None)
    assert {each.microbatch_tokens for each in measured.choices} <= {512, 640}
    assert {each.microbatch_tokens for each in free.choices} >= {512, 1024, 2048}
    configured = replace(planned, config=planned.config.model_copy(update={"mode": "decoupled"}))
    assert request_of(configured, cluster_of(4), None).choices == ()
