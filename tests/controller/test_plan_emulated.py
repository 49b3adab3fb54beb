"""Helpers of benchmarks/plan_emulated.py: drawn profiles are valid, every split is found, an emulated run ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared.emulated_hosts import ACTORS, Job
from shared.emulated_run import config_of, settings_of
from shared.emulated_splits import Split, all_splits, planned_split, worth_trying
from shared.emulated_world import (
    BATCH,
    LARGEST_RATIO,
    LEAST_RATIO,
    STEP_S,
    TENSOR_DEGREES,
    VISION,
    World,
    draw_profile,
    draw_ratios,
    draw_world,
)

from flowtrain.allocator.allocation import Allocation
from flowtrain.config.emulated import EmulatedConfig
from flowtrain.controller.prepare import prepare
from flowtrain.costs.profile import ImageCosts, read_profile
from flowtrain.emulation.process import EmulatedRun
from flowtrain.flow.api import CoordinatorApi
from flowtrain.flow.build import build_flow
from flowtrain.training.checkpoint_store import probe_directory
from flowtrain.types.events import UnitDone
from flowtrain.types.plan import Degrees
from tests.actors.local import Background, local_coordinator

NUM_DEVICES, RATIO = 9, 0.7


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return draw_world("emulated", RATIO, 3, 0, NUM_DEVICES, tmp_path_factory.mktemp("emulated"))


@given(count=st.integers(1, 20), seed=st.integers(0, 100))
def test_ratios_cover_their_range_evenly(count: int, seed: int) -> None:
    ratios = draw_ratios(count, seed)
    places = (np.log(sorted(ratios)) - np.log(LEAST_RATIO)) / (np.log(LARGEST_RATIO) - np.log(LEAST_RATIO))
    assert (np.floor(places * count) == np.arange(count)).all()
    assert ratios == draw_ratios(count, seed)


@given(seed=st.integers(0, 10_000), ratio=st.floats(LEAST_RATIO, LARGEST_RATIO))
def test_a_drawn_profile_is_valid_and_scales_imperfectly(
    world: World, tmp_path_factory: pytest.TempPathFactory, seed: int, ratio: float
) -> None:
    draw = np.random.default_rng(seed)
    profile = draw_profile(draw, world.model, world.workload, world.config, ratio, NUM_DEVICES)
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(profile.to_json())
    assert read_profile(path) == profile
    tables = [profile.layers, profile.heads, profile.connectors]
    for by_degree in tables:
        times = {tp: np.array(table.seconds) for tp, table in by_degree.items()}
        assert tuple(times) == TENSOR_DEGREES
        assert (np.diff(times[1]) > 0).all(), "more tokens take longer"
        for low, high in ((1, 2), (2, 4)):
            assert (times[high] < times[low]).all() and (times[high] * high > times[low] * low).all()
    images = {tp: np.array(table.seconds) for tp, table in profile.encoders[VISION].items()}
    assert (np.diff(images[1], axis=0) > 0).all() and (np.diff(images[1], axis=1) > 0).all()
    assert (images[2] < images[1]).all() and (images[2] * 2 > images[1]).all()


def test_a_sample_costs_what_was_asked_for(world: World) -> None:
    profile = replace(world.profile, images={VISION: ImageCosts(0.0, 0.0)})  # the forward alone
    world = replace(world, profile=profile)
    request = world.request
    splits = all_splits(request, world.surrogate(request), VISION)
    encoder_s = 1.0 / next(split for split in splits if split.encoder == Degrees(1)).production
    assert encoder_s * (1.0 + 1.0 / RATIO) == pytest.approx(STEP_S * NUM_DEVICES / BATCH)


def test_every_split_is_found(world: World) -> None:
    request = world.request
    spec, tower = world.model.backbone, world.model.encoders[VISION]
    found = [split.key for split in all_splits(request, world.surrogate(request), VISION)]
    degrees = range(1, NUM_DEVICES)
    feasible = {
        (Degrees(encoder_dp, 1, encoder_tp), Degrees(dp, pp, tp))
        for encoder_dp, encoder_tp, dp, pp, tp in product(degrees, repeat=5)
        if encoder_dp * encoder_tp + dp * pp * tp == NUM_DEVICES
        and 8 % encoder_tp == tower.num_heads % encoder_tp == tower.intermediate_size % encoder_tp == 0
        and BATCH % dp == 0
        and pp <= spec.num_layers
        and 8 % tp == spec.num_heads % tp == spec.num_kv_heads % tp == spec.intermediate_size % tp == 0
    }
    assert len(found) == len(set(found)) and set(found) == feasible


@given(limit=st.integers(1, 3), least_rate=st.floats(1.0, 400.0))
def test_the_best_of_each_number_of_devices_are_tried(world: World, limit: int, least_rate: float) -> None:
    request = world.request
    splits = all_splits(request, world.surrogate(request), VISION)
    chosen = worth_trying(splits, limit, least_rate)
    assert len(chosen) == len(set(chosen)) and set(chosen) >= {s for s in splits if s.rate >= least_rate}
    for count in {split.encoder.world_size for split in splits}:
        rates = sorted((s.rate for s in splits if s.encoder.world_size == count), reverse=True)
        tried = sorted((s.rate for s in chosen if s.encoder.world_size == count), reverse=True)
        assert tried == rates[: len(tried)] and len(tried) >= min(limit, len(rates))
        assert all(rate >= least_rate for rate in tried[limit:])


def test_the_plan_is_a_split_and_none_is_predicted_faster(world: World) -> None:
    request = world.request
    splits = all_splits(request, world.surrogate(request), VISION)
    allocation: Allocation = world.allocation()
    plan = planned_split(allocation, splits, VISION)
    assert plan.rate == pytest.approx(allocation.rate)
    assert plan.rate >= max(split.rate for split in splits) * (1 - 1e-9)


def test_an_emulated_run_consumes_every_position(world: World, tmp_path: Path) -> None:
    split, num_steps = Split(Degrees(2), Degrees(2, 2, 1), 1.0, 1.0), 3
    config = config_of(world, split, num_steps)
    job_fields = {
        "run": EmulatedRun(config, EmulatedConfig(time_scale=0.02), world.profile),
        "run_id": "emulated-test",
        "num_steps": num_steps,
        "checkpoint_dir": str(tmp_path),
    }
    probe_directory(tmp_path, "emulated-test").mkdir()
    run_spec = prepare(config)
    settings = settings_of(run_spec, split)
    with local_coordinator(lambda: build_flow(config, run_spec.model_spec, settings)) as link:
        runs = [run for role, make in ACTORS.items() for run in make(Job(role=role, **job_fields), link)[0]]
        for actor in [Background(run) for run in runs]:
            actor.join()
        link.ask(CoordinatorApi.end_events)
        done = [event for event in link.ask(CoordinatorApi.events) if isinstance(event, UnitDone)]
    assert [event.unit.step for event in done] == [1, 2, 3]
    assert [row.position for event in done for row in event.ledger] == list(range(BATCH * num_steps))
    assert all(row.state == "consumed" for event in done for row in event.ledger)
