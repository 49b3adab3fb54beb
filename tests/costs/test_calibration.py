"""Robust means of measured over predicted times, and module times with such factors."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.parameter_traffic import ParameterTraffic
from flowtrain.costs.action_times import DeviceTimes
from flowtrain.costs.calibration import (
    FEWEST,
    LEAST,
    CalibratedTimes,
    Calibration,
    DeviceTotal,
    factor,
    part_factors,
    robust_mean,
    robust_remainder,
)
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.costs.model_spec import FROZEN_ENCODERS
from flowtrain.costs.profile import Profile, read_profile
from flowtrain.costs.profile_layers import AttentionCosts, LossCosts, StrategyCosts
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster, workload
from tests.costs.test_profile import LENGTHS, PROFILE, times

CALIBRATION = Calibration("measure", backbone=1.5, head=0.75, encoders={"vision": 0.5}, optimizer=2.0, step_host_s=0.25)
TOKENS = np.array([4096.0])


@given(st.floats(0.1, 10.0), st.lists(st.floats(0.01, 1.0), min_size=20, max_size=60), st.integers(0, 3))
def test_a_factor_is_found_whatever_a_few_stalls_take(true: float, predicted: list[float], stalls: int) -> None:
    measured = [true * each for each in predicted]
    for number in range(stalls):
        measured[number] *= 50.0
    assert factor(measured, predicted) == pytest.approx(true)
    assert factor(measured[: FEWEST - 1], predicted[: FEWEST - 1]) == 1.0, "too few say nothing"
    few = measured[:1], predicted[:1]
    assert factor(*few, FEWEST) == pytest.approx(few[0][0] / few[1][0]) and factor(*few, FEWEST - 1) == 1.0, "spans"


@given(st.floats(0.1, 10.0), st.lists(st.floats(0.01, 1.0), min_size=FEWEST, max_size=40), st.floats(0.0, 5.0))
def test_the_rest_of_what_was_measured_tells_its_own_factor(true: float, predicted: list[float], known: float) -> None:
    rest = [known * each for each in predicted]
    measured = [other + true * each for other, each in zip(rest, predicted, strict=True)]
    assert robust_remainder(measured, rest, predicted) == pytest.approx(true)
    assert robust_remainder(measured[1:FEWEST], rest[1:FEWEST], predicted[1:FEWEST]) == 1.0, "too few say nothing"
    assert robust_remainder(rest, [2.0 * each for each in measured], predicted) == LEAST, "less than what is known"


FACTORS = st.floats(0.8, 1.6)


@given(st.lists(FACTORS, min_size=2, max_size=3), st.floats(0.05, 0.95))
def test_totals_with_other_shares_of_work_tell_its_factors_apart(true: list[float], share: float) -> None:
    count, num_steps = len(true), 100

    def total(parts: list[float]) -> DeviceTotal:
        took = sum(factor * part for factor, part in zip(true, parts, strict=True))
        return DeviceTotal(took, tuple(parts), num_steps, num_steps)

    mixed = [10.0 * share, *[10.0 * (1.0 - share) / (count - 1)] * (count - 1)]
    alone = [[10.0 * (part == number) for part in range(count)] for number in range(count)]
    totals = [total(parts) for parts in (mixed, *alone)]
    assert part_factors(totals, count) == pytest.approx(true, rel=0.05)
    alike = part_factors(totals[:1] * 3, count)
    assert sum(each * part for each, part in zip(alike, mixed, strict=True)) == pytest.approx(totals[0].measured_s)
    assert max(alike) == pytest.approx(min(alike)), "one kind of total says nothing of its parts"
    stalled = DeviceTotal(50.0, tuple(mixed), 1, 1)
    assert part_factors([*totals, stalled], count) == pytest.approx(true, rel=0.2), "one step counts little"
    few = [DeviceTotal(1.0, tuple(mixed), FEWEST - 1, FEWEST - 1)]
    assert part_factors(few, count) == [1.0] * count, "too few spans say nothing"


def test_a_part_that_no_total_has_gets_the_mean_of_the_others() -> None:
    totals = [DeviceTotal(11.0, (10.0, 0.0, 0.0), 100, 100), DeviceTotal(13.0, (0.0, 10.0, 0.0), 100, 100)]
    layers, head, encoder = part_factors(totals, 3)
    assert (layers, head) == pytest.approx((1.1, 1.3), rel=0.03) and encoder == pytest.approx((layers + head) / 2.0)
    without = [replace(each, parts_s=each.parts_s[:2]) for each in totals]
    assert part_factors(without, 2) == pytest.approx([layers, head]), "and changes nothing"


@given(st.lists(st.floats(0.1, 1.0), min_size=20, max_size=40), st.integers(0, 3))
def test_a_total_leaves_out_stalled_steps(backbone: list[float], stalls: int) -> None:
    steps = [(1.2 * each + 0.12, (each, 0.1), 4) for each in backbone]
    steps = [(took * (50.0 if number < stalls else 1.0), *rest) for number, (took, *rest) in enumerate(steps)]
    total = DeviceTotal.of([*steps, (1.0, (0.0, 0.0), 1)])
    assert total is not None and (total.num_steps, total.num_spans) == (len(backbone), 4 * len(backbone))
    assert total.measured_s == pytest.approx(1.2 * sum(total.parts_s))
    assert DeviceTotal.of([(1.0, (0.0, 0.0), 1)]) is None, "nothing was predicted"


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40))
def test_a_robust_mean_lies_among_its_values(values: list[float]) -> None:
    assert min(values) - 1e-9 <= robust_mean(values) <= max(values) + 1e-9


def test_times_have_the_factors_and_the_host_counts_once_a_step() -> None:
    (device,) = cluster(h200=8).device_types
    plain = DeviceTimes(device, MODEL, SETUP, FROZEN_ENCODERS)
    fitted = replace(plain, profile=Profile("h200", {}, {}, calibration=CALIBRATION))
    before, after = (each.of(workload()) for each in (plain, fitted))
    assert after.layer_s(TOKENS, 1) == pytest.approx(1.5 * before.layer_s(TOKENS, 1))
    assert after.images_s("vision", 1) == pytest.approx(0.5 * before.images_s("vision", 1))
    parameters = np.array([1e9])
    assert after.step_s(parameters) == pytest.approx(2.0 * before.step_s(parameters) + 0.25)
    work = MicrobatchColumns.of([MicrobatchWork((700, 40), 300, 100)])
    assert after.head_s(TOKENS, 1) == pytest.approx(0.75 * before.head_s(TOKENS, 1))
    one, other = (each.microbatches_s(work, 1) for each in (before, after))
    for field in fields(one):
        by = 0.75 if field.name.startswith("head") else 1.5
        assert getattr(other, field.name) == pytest.approx(by * getattr(one, field.name)), field.name
    assert fitted.link_efficiency == plain.link_efficiency, "links are still by data sheet"


@pytest.mark.parametrize("sharding", ["full", "gradients"])
def test_plans_count_collectives_with_their_factor(sharding: Any) -> None:
    columns = CandidateColumns.of(Candidate("backbone", "h200", Degrees(dp=8)))
    setup, devices, seconds = replace(SETUP, sharding=sharding), cluster(h200=8), []
    for collectives in (1.0, 3.0):
        profile = Profile("h200", {}, {}, calibration=Calibration("measure", 1.0, 1.0, collectives=collectives))
        (device,) = devices.device_types
        times = DeviceTimes(device, MODEL, setup, FROZEN_ENCODERS, profile).of(workload())
        ranks = np.array([[0] * 3, [MODEL.backbone.num_layers] * 3])
        traffic = ParameterTraffic(devices, MODEL, setup, 0.8, ranks, 1, {"h200": times})
        held, stage = traffic.parameters(columns), np.array([0.1])
        found = [traffic.gathering_s(columns, stage, held), traffic.gathering_once_s(columns, stage, held)]
        found.append(traffic.reducing_s(columns, stage, np.array([4.0]), held))
        seconds.append(np.concatenate(found))
    assert seconds[1] == pytest.approx(3.0 * seconds[0]) and (seconds[0] > 0.0).sum() == 2


def test_the_hosts_work_is_that_of_a_step_or_else_as_profiled() -> None:
    def host_s(num_microbatches: np.ndarray, replicas: np.ndarray, *, has_encoders: bool) -> np.ndarray:
        return 2.0 * num_microbatches + replicas + has_encoders

    base: Any = SimpleNamespace(microbatch_s=lambda replica_size: 0.5 * replica_size, host_s=host_s)
    microbatches, replicas = np.array([3.0, 4.0]), np.array([1.0, 2.0])
    unknown, known = (CalibratedTimes(base, each) for each in (Calibration("measure", 1.0, 1.0), CALIBRATION))
    sizes = np.array([1, 2])
    for each in (unknown, known):
        assert each.microbatch_s(sizes).tolist() == [0.5, 1.0], "no factor has a rank's part"
    assert unknown.host_s(microbatches, replicas, has_encoders=True).tolist() == [8.0, 11.0]
    assert known.host_s(microbatches, replicas, has_encoders=True).tolist() == [0.0, 0.0], "it counts once a step"


def test_a_calibrated_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(replace(PROFILE, calibration=CALIBRATION).to_json())
    assert read_profile(path).calibration == CALIBRATION


def test_factors_of_before_the_head_had_its_own_are_refused(tmp_path: Path) -> None:
    profile = json.loads(replace(PROFILE, calibration=CALIBRATION).to_json())
    del profile["calibration"]["head"]
    (tmp_path / "old.json").write_text(json.dumps(profile))
    with pytest.raises(ConfigError, match=r"old.json: calibration.head: .*; run flowtrain calibrate again"):
        read_profile(tmp_path / "old.json")


def test_attention_tells_long_sequences_from_short_ones() -> None:
    """Measured with the data's mix; a microbatch of one long sequence takes more, one of many short ones less."""
    mix = 1280 * 1.36 * np.array(LENGTHS.num_tokens)
    apart = replace(PROFILE, attention={1: AttentionCosts(1e-9, tuple(mix.tolist()))})
    found, before = times(apart), times()
    long, short = (
        float(found.microbatches_s(MicrobatchColumns.of([MicrobatchWork(lengths, 0, 0)]), 1).layer[0])
        for lengths in ((4096,), (64,) * 64)
    )
    assert long - short == pytest.approx(1e-9 * (4096**2 - 64 * 64**2))
    assert short < float(before.layer_s(TOKENS, 1)[0]) < long
    data = workload()
    squares = float(np.square(data.lengths).sum() / data.lengths.sum()) * 4096
    expected = float(before.layer_s(TOKENS, 1)[0]) + 1e-9 * (squares - 1280 * 1.36 * 4096)
    assert float(found.layer_s(TOKENS, 1)[0]) == pytest.approx(expected)


@pytest.mark.parametrize(("lengths", "ragged"), [((2048, 2048), 0), ((2049, 2047), 2), ((2048, 1024, 1008, 16), 0)])
def test_attention_of_ragged_lengths_takes_longer(lengths: tuple[int, ...], ragged: int) -> None:
    none = (0.0,) * len(LENGTHS.num_tokens)
    costs = AttentionCosts(0.0, none, ragged_s=1e-9, ragged=none)
    found = times(replace(PROFILE, attention={1: costs})).microbatches_s(
        MicrobatchColumns.of([MicrobatchWork(lengths, 0, 100)]), 1
    )
    more = 1e-9 * sum(each * each for each in lengths[:ragged])
    assert float(found.layer[0]) == pytest.approx(float(times().layer_s(TOKENS, 1)[0]) + more)


def test_the_head_takes_longer_the_more_tokens_have_a_loss() -> None:
    measured = 0.1 * np.array(LENGTHS.num_tokens)
    apart = replace(PROFILE, losses={1: LossCosts((1, 1001), (0.0, 1e-3), tuple(measured.tolist()))})
    found, before = times(apart), times()
    none, few, all_of_them = (
        float(found.microbatches_s(MicrobatchColumns.of([MicrobatchWork((4096,), 0, targets)]), 1).head[0])
        for targets in (0, 410, 4096)
    )
    head = float(before.head_s(TOKENS, 1)[0])
    assert few == pytest.approx(head + 1e-6 * 0.4) and all_of_them == pytest.approx(few + 1e-6 * (4096 - 410))
    assert head / 4 <= none < few, "something is left"
    share = workload().target_share
    assert float(found.head_s(TOKENS, 1)[0]) == pytest.approx(max(head + 1e-6 * 4096 * (share - 0.1), head / 4))


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_tokens_with_loss_take_what_was_measured_of_their_number(measured: float, share: float) -> None:
    """From no line, as kernels of matrices with hardly any rows are; in between, linearly."""
    losses = LossCosts((1, 8, 16, 250), (0.0, 30e-6, 20e-6, 254e-6), (1000.0 * measured,))

    def seconds(count: float) -> float:
        if count < 8.0:
            return 30e-6 * max(count - 1.0, 0.0) / 7.0
        return 30e-6 - 10e-6 * (count - 8.0) / 8.0 if count < 16.0 else 20e-6 + 1e-6 * (count - 16.0)

    found = losses.beyond_s((1000,), np.array([1000.0]), np.array([1000.0 * share]))
    assert float(found[0]) == pytest.approx(seconds(1000.0 * share) - seconds(1000.0 * measured), abs=1e-12)


def test_more_tokens_with_loss_than_were_measured_go_on_as_from_half_of_them() -> None:
    """The last two numbers may be so close that noise between them would be far off."""
    losses = LossCosts((1, 64, 128, 130), (0.0, 0.064, 0.128, 0.5), (1.0,))
    assert losses(np.array([130.0, 260.0])).tolist() == pytest.approx([0.5, 0.5 + 2 * (0.5 - 0.065)])
    assert LossCosts((1,), (0.0,), (1.0,))(np.array([0.0, 1.0, 9.0])).tolist() == [0.0, 0.0, 0.0], "one sample of two"


def test_losses_that_cannot_be_read_as_a_curve_are_refused(tmp_path: Path) -> None:
    profile = json.loads(replace(PROFILE, losses={1: LossCosts((1, 8), (0.0, 0.1), (1.0,))}).to_json())
    profile["losses"]["1"]["counts"] = [8, 1]
    (tmp_path / "changed.json").write_text(json.dumps(profile))
    with pytest.raises(
        ConfigError, match=r"losses.1: .*counts \(8, 1\) is empty or not ascending; run flowtrain profile"
    ):
        read_profile(tmp_path / "changed.json")
    profile["losses"]["1"] = {"target_s": 1e-6, "targets": [1.0]}
    (tmp_path / "old.json").write_text(json.dumps(profile))
    with pytest.raises(ConfigError, match=r"old.json: losses.1.counts: .*; run flowtrain profile again"):
        read_profile(tmp_path / "old.json")


def test_a_heads_forward_has_the_losss_share_of_further_tokens_and_not_its_stages() -> None:
    steps = replace(PROFILE.steps, pass_s=0.01, pass_forward_share=0.6)
    losses = {1: LossCosts((1, 1000), (0.0, 1e-3), (0.0,) * len(LENGTHS.num_tokens), forward_share=0.9)}
    plain, apart = times(), times(replace(PROFILE, steps=steps, losses=losses, head_forward_share=0.5))
    work = MicrobatchColumns.of([MicrobatchWork((4096,), 0, 1000)])
    head = float(plain.head_s(TOKENS, 1)[0])
    found = apart.microbatches_s(work, 1)
    assert float(found.head[0]) == pytest.approx(head - 0.01 + 1e-3)
    assert float(found.head_forward[0]) == pytest.approx(0.5 * head - 0.006 + 0.9e-3)
    longer = times(replace(PROFILE, steps=replace(steps, pass_s=0.9 * head)))
    assert float(longer.head_s(TOKENS, 1)[0]) == pytest.approx(0.1 * head), "both make what was measured"
    lossless = {1: LossCosts((1, 1001), (0.0, 1000.0), LENGTHS.num_tokens)}
    least = times(replace(PROFILE, steps=replace(steps, pass_s=0.1 * head), losses=lossless))
    assert float(least.head_s(TOKENS, 1)[0]) == pytest.approx(head / 4 - 0.1 * head), "something is left"
    alone = replace(PROFILE, heads={1: PROFILE.heads[1]})
    of_four, apart_of_four = (float(times(each).head_s(TOKENS, 4)[0]) for each in (alone, replace(alone, steps=steps)))
    assert apart_of_four == pytest.approx(of_four - 0.01 / 4), "ranks do not share a stage's own time"


def test_measured_strategies_come_before_counted_forwards() -> None:
    strategies = {"none": StrategyCosts(4096, 0.02, 1e8), "full": StrategyCosts(4096, 0.025, 1e6)}
    profile = replace(PROFILE, strategies=strategies, model={**PROFILE.model, "activation_checkpointing": "none"})
    found = times(profile)  # the setup recomputes in full
    assert float(found.layer_s(TOKENS, 1)[0]) == pytest.approx(1.25 * 0.03)


@given(st.floats(0.1, 0.9), st.integers(0, 4096))
def test_a_connector_takes_as_long_as_its_rows(measured: float, rows: int) -> None:
    before, works = times(), MicrobatchColumns.of([MicrobatchWork((4096,), rows, 0)])
    known = tuple(measured * each for each in LENGTHS.num_tokens)
    found = times(replace(PROFILE, connector_rows={1: known}))
    plain = float(before.microbatches_s(works, 1).connector[0])
    assert float(found.microbatches_s(works, 1).connector[0]) == pytest.approx(plain * rows / (measured * 4096))
    share = workload().vision_share
    assert float(found.connector_s(TOKENS, 1)[0]) == pytest.approx(plain * share / measured)
    assert float(before.connector_s(TOKENS, 1)[0]) == pytest.approx(plain), "as many as measured, if that is not known"
