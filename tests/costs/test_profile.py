"""Measured profiles: read back unchanged, refused if stale or foreign, interpolated between measured values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.costs.cluster import DeviceType, Links
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.profile import (
    MEASURE_AGAIN,
    DeviceFacts,
    ImageCosts,
    ImageTable,
    LengthTable,
    Profile,
    StepCosts,
    read_profile,
)
from flowtrain.costs.profiled_times import ProfileTimes
from flowtrain.errors import ConfigError
from tests.allocator.worlds import MODEL, SETUP, workload

LENGTHS = LengthTable((1024, 4096, 8192), (0.01, 0.03, 0.08))
IMAGES = ImageTable((256, 1024), (1, 4), ((0.01, 0.02), (0.03, 0.08)))
PROFILE = Profile(
    device="NVIDIA H200",
    facts=DeviceFacts(9e14, 10**11, 4e12, 3e11, 8),
    model={"backbone": {"hidden_size": 4096}, "dtype": "bfloat16"},
    versions={"torch": "2.13.0"},
    layers={1: LENGTHS, 2: replace(LENGTHS, seconds=(0.007, 0.02, 0.05))},
    heads={1: LENGTHS},
    connectors={1: LENGTHS},
    encoders={"vision": {1: IMAGES}},
    images={"vision": ImageCosts(decode_s=0.001, batch_s=0.0)},
    steps=StepCosts(step_s=0.5, microbatch_s=0.25, parameter_s=1e-9),
)
DEVICE = DeviceType("some", 8, 1e12, 10**9, 1e12, Links(1e11, 1e10, "test"))


def times(profile: Profile = PROFILE, patches: int = 16384, **changes: Any) -> ProfileTimes:
    data = workload(**changes)
    communication = TensorCommunication(DEVICE, MODEL, data, SETUP, 1.0)
    return ProfileTimes(profile, data, communication, {"vision": patches}, {"vision": 1})


def test_a_profile_is_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    found = read_profile(path)
    assert found == PROFILE and found.source == str(path)
    found.check(PROFILE.device, PROFILE.model, PROFILE.versions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema is 2, this version reads 3; run flowtrain profile again on these devices"),
        ({"schema": 9}, "schema is 9, this version reads 3; run flowtrain profile again"),
        (
            {"layers": {"1": {"num_tokens": [8, 4], "seconds": [1, 2]}}},
            r"layers.1: .*num_tokens \(8, 4\) is empty or not",
        ),
        ({"layers": {"1": {"num_tokens": [4, 8], "seconds": [1]}}}, "seconds has 1 values for 2 num_tokens"),
        ({"layers": {"1": {"num_tokens": [4], "seconds": [-1]}}}, "layers.1.seconds.0: Input should be greater than 0"),
        ({"heads": None}, "heads: "),
        ({"more": 1}, "more: "),
    ],
)
def test_a_broken_profile_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(PROFILE.to_json()), **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_an_unreadable_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="the profile cannot be read"):
        read_profile(path)
    for text in ("{", "name: quickstart", "[]", '{"model": {}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="profile.json is not a profile file: flowtrain profile CONFIG --save"):
            read_profile(path)


def test_a_profile_that_is_not_there_says_how_to_write_one(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="no such file; .* flowtrain profile CONFIG --save FILE, or use no profile"):
        read_profile(path)


def test_a_profile_of_another_version_names_some_of_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    values = json.loads(PROFILE.to_json())
    older = {name: value for name, value in values.items() if name not in ("model", "versions")}
    newer = {**values, **dict.fromkeys("abcde", 1)}
    for changed, message in (
        (older, "model: .*; versions: .*; another version may have written it"),
        (newer, "a: .*; b: .*; c: .*; 2 more; another version may have written it"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message):
            read_profile(path)
    path.write_text(json.dumps({**values, "heads": None, "a": 1}))
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert "another version" not in str(caught.value), "a value is wrong as well"


def test_a_foreign_or_stale_profile_names_everything_that_differs() -> None:
    with pytest.raises(ConfigError) as caught:
        PROFILE.check("NVIDIA A100", {"backbone": {"hidden_size": 5120}, "dtype": "bfloat16"}, {"torch": "2.14.0"})
    assert str(caught.value) == (
        "profile: device is 'NVIDIA H200' there and 'NVIDIA A100' in this run; "
        "model.backbone.hidden_size is 4096 there and 5120 in this run; "
        f"versions.torch is '2.13.0' there and '2.14.0' in this run; {MEASURE_AGAIN}"
    )


def test_the_sharding_that_earlier_versions_noted_does_not_matter() -> None:
    noted = replace(PROFILE, model={**PROFILE.model, "sharding": "full"})
    noted.check(PROFILE.device, PROFILE.model, PROFILE.versions)


def test_lengths_are_interpolated_and_held_at_the_short_end() -> None:
    asked = np.array([512.0, 1024.0, 2560.0, 8192.0, 9000.0])
    assert times().layer_s(asked, 1).tolist() == pytest.approx([0.01, 0.01, 0.02, 0.08, 0.08 * 9000 / 8192])


@settings(deadline=None)
@given(st.floats(256, 1024), st.floats(1, 4))
def test_images_are_interpolated_between_sizes_and_batches(patches: float, batch: float) -> None:
    found = float(IMAGES.image_s(np.array([patches]), np.array([batch]))[0])
    corners = [[0.01, 0.02 / 4], [0.03, 0.08 / 4]]
    x, y = (patches - 256) / 768, (batch - 1) / 3
    low, high = (row[0] * (1 - y) + row[1] * y for row in corners)
    assert found == pytest.approx(low * (1 - x) + high * x)


def test_a_single_image_size_scales_in_proportion_above_it() -> None:
    table = ImageTable((256,), (2,), ((0.04,),))
    assert table.image_s(np.array([100.0, 256.0, 320.0]), np.array([1.0, 2.0, 9.0])).tolist() == pytest.approx(
        [0.02, 0.02, 0.025]
    )


def test_samples_go_in_batches_of_the_configured_size() -> None:
    # Two images of 512 patches: a third of the way between the sizes measured.
    assert times(patches=2048).sample_s("vision", 1) == pytest.approx(2 * (0.005 + 0.015 / 3))
    assert times(patches=1).sample_s("vision", 1) == pytest.approx(2 * (0.01 + 0.02 / 3))


def test_ranks_that_hold_the_encoder_lease_no_batches() -> None:
    """Four images of 512 patches are a batch of 2,048 patches; samples with images have two."""
    leasing = replace(PROFILE, images={"vision": ImageCosts(decode_s=0.001, batch_s=0.1)})
    actors, ranks = (times(leasing, 2048).images_s("vision", 1, together=each) for each in (None, 4.0))
    assert ranks.tolist() == pytest.approx(times(patches=2048).images_s("vision", 1).tolist())
    assert (actors - ranks).tolist() == pytest.approx([0.1 / 2, 0.0])


def test_ranks_forward_the_images_of_a_microbatch_at_once() -> None:
    """However large an actor's batch may be: one image alone takes more than a quarter of four."""
    asked = times(patches=2048)
    alone, four, each = (asked.images_s("vision", 1, together=n) for n in (1.0, 4.0, np.array([1.0, 4.0])))
    assert alone[0] == pytest.approx(2 * (0.01 + 0.02 / 3)) and four[0] == pytest.approx(2 * (0.005 + 0.015 / 3))
    assert each.tolist() == [alone[0], four[1]]


def test_a_trained_encoder_recomputes_as_the_backbone_does() -> None:
    frozen, recomputed = times(), times(freeze=())
    keeping = ProfileTimes(
        PROFILE,
        workload(freeze=()),
        TensorCommunication(DEVICE, MODEL, workload(), replace(SETUP, activation_checkpointing="none"), 1.0),
        {"vision": 16384},
        {"vision": 1},
    )
    once = frozen.images_s("vision", 1)[0]
    assert recomputed.images_s("vision", 1)[0] == pytest.approx(4 * once)
    assert keeping.images_s("vision", 1)[0] == pytest.approx(3 * once)


def test_degrees_that_were_not_measured_come_from_the_nearest_and_the_links() -> None:
    tokens, found = np.array([4096.0]), times()
    assert found.layer_s(tokens, 2).tolist() == pytest.approx([0.02])
    # Six reductions of 4,096 bf16 numbers per token: a ring moves 2 * (tp - 1) / tp of them.
    reduced = 2 * 6 * 4096 * 4096 / 1e11
    expected = (0.02 - reduced * 1.0) / 4 + reduced * 2 * 7 / 8
    assert found.layer_s(tokens, 8).tolist() == pytest.approx([expected])
    assert found.sample_s("vision", 4) > times().sample_s("vision", 1) / 4


@pytest.mark.parametrize(
    ("profile", "changes", "message"),
    [
        (
            PROFILE,
            {"microbatch_tokens": 16384},
            r"layers.1 was measured up to 8192, scheduler.microbatch_tokens is 16384",
        ),
        (replace(PROFILE, encoders={}), {}, "encoders.vision has no table for degree 1"),
        (replace(PROFILE, heads={2: LENGTHS}), {}, "heads has no table for degree 1"),
        (
            PROFILE,
            {"images": {"vision": (np.array([1, 0]), np.array([2048, 0]))}},
            r"encoders.vision was measured up to 1024, patches of an image is 2048: too far to extrapolate",
        ),
    ],
)
def test_far_extrapolation_and_missing_tables_are_refused(profile: Profile, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        times(profile, **changes)


def test_another_recomputation_than_the_measured_one_takes_other_time() -> None:
    data = workload()
    tokens = np.array([4096.0])

    def layer_s(measured: Any, chosen: Any) -> float:
        setup = replace(SETUP, activation_checkpointing=chosen)
        profile = replace(PROFILE, model={**PROFILE.model, "activation_checkpointing": measured})
        communication = TensorCommunication(DEVICE, MODEL, data, setup, 1.0)
        return float(ProfileTimes(profile, data, communication, {"vision": 16384}, {"vision": 1}).layer_s(tokens, 1)[0])

    same = layer_s("full", "full")
    assert layer_s("none", "none") == layer_s("selective", "none") == pytest.approx(same)
    assert layer_s("none", "full") == pytest.approx(same * 4 / 3)
    assert layer_s("full", "none") == pytest.approx(same * 3 / 4)
    assert layer_s(["full", "none"], "full") == pytest.approx(same * 4 / 3.5)


def test_ranks_of_a_replica_also_tell_each_other_of_a_microbatch() -> None:
    profile = replace(PROFILE, steps=replace(PROFILE.steps, messages_s=0.5))
    assert times(profile).microbatch_s(np.array([1, 2, 16])).tolist() == [0.25, 0.75, 0.75]


def test_ranks_of_a_pipeline_launch_transfers() -> None:
    assert times(PROFILE).launch_s == 0.0
    assert times(replace(PROFILE, steps=replace(PROFILE.steps, launch_s=0.5))).launch_s == 0.5


def test_a_profile_tells_how_large_a_microbatch_it_reaches() -> None:
    assert PROFILE.most_tokens == 10240
    short = replace(PROFILE, heads={1: replace(LENGTHS, num_tokens=(8, 16, 64))})
    assert short.most_tokens == 80
