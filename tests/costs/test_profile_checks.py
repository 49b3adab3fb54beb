"""Profiles of a loaded machine give warnings; those of an idle one do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowtrain.costs.profile import DeviceFacts, ImageCosts, ImageTable, LengthTable, Profile, StepCosts
from flowtrain.costs.profile_checks import profile_warnings

TOKENS = (128, 256, 384)


def lengths(*milliseconds: float) -> LengthTable:
    return LengthTable(TOKENS, tuple(each / 1e3 for each in milliseconds))


@pytest.fixture
def profile() -> Profile:
    return Profile(
        device="cpu",
        facts=DeviceFacts(1e11, 2**33, 1e10, None, 4),
        model={},
        versions={},
        layers={1: lengths(4, 8, 12)},
        heads={1: lengths(6, 12, 18)},
        connectors={1: lengths(1e-6, 0.5, 0.2)},  # too small to differ from noise
        encoders={"vision": {1: ImageTable((16, 49), (1, 8), ((0.01, 0.05), (0.03, 0.2)))}},
        images={"vision": ImageCosts(decode_s=0.005, batch_s=0.0)},
        steps=StepCosts(step_s=0.0, microbatch_s=0.0, parameter_s=0.0),
    )


def test_an_idle_machine_and_times_that_grow_give_no_warning(profile: Profile) -> None:
    assert profile_warnings(profile, 0.9) == () == profile_warnings(profile, None)


def test_other_load_on_the_machine_is_named(profile: Profile) -> None:
    (warning,) = profile_warnings(profile, 3.25)
    assert warning.startswith("the load average was 3.2 before measuring began")
    assert warning.endswith("measure again on a machine that does nothing else")


@pytest.mark.parametrize(
    ("table", "name"), [("layers", "a layer"), ("heads", "the head"), ("connectors", "the connector")]
)
def test_a_time_that_falls_with_the_length_is_named(profile: Profile, table: str, name: str) -> None:
    odd = replace(profile, **{table: {1: getattr(profile, table)[1], 2: lengths(39.9, 7.9, 60.4)}})
    others = {other: {**getattr(odd, other), 2: lengths(4, 8, 12)} for other in ("layers", "heads", "connectors")}
    odd = replace(odd, **{other: tables for other, tables in others.items() if other != table})
    (warning,) = profile_warnings(odd, 0.0)
    assert warning.startswith(f"{name} (tp=2) takes 39.9 / 7.9 / 60.4 ms with 128 / 256 / 384 tokens")


def test_more_images_or_patches_in_less_time_are_named(profile: Profile) -> None:
    odd = replace(profile, encoders={"vision": {1: ImageTable((16, 49), (1, 8), ((0.01, 0.2), (0.03, 0.1)))}})
    (warning,) = profile_warnings(odd, 0.0)
    assert warning.startswith("encoders.vision with 8 images takes 200 / 100 ms with 16 / 49 patches an image")
    odd = replace(profile, encoders={"vision": {1: ImageTable((16,), (1, 8), ((0.1, 0.05),))}})
    (warning,) = profile_warnings(odd, 0.0)
    assert warning.startswith("encoders.vision with 16 patches an image takes 100 / 50 ms with 1 / 8 images")
