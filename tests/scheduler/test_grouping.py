"""Groups over more than a step: each sample once, within the quotas, and what each sampling is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.scheduler.grouping import device_groups, isf_groups, length_groups
from flowtrain.scheduler.packing.base import Lengths
from flowtrain.scheduler.packing.isf import isf_quotas
from flowtrain.scheduler.summary import dist_ratio

CAPACITY = 64
SAMPLES = st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, 5)), max_size=80)


def lengths_of(samples: list[tuple[int, int]]) -> Lengths:
    return Lengths.of([tokens for tokens, _ in samples], [vision for _, vision in samples])


@given(SAMPLES, st.integers(0, 9))
def test_isf_groups_hold_every_sample_once_within_the_quotas(samples: list[tuple[int, int]], seed: int) -> None:
    lengths = lengths_of(samples)
    groups = isf_groups(lengths, CAPACITY, seed)
    assert sorted(groups.members.tolist()) == list(range(len(samples)))
    assert (groups.tokens(lengths) <= CAPACITY).all() and (np.diff(groups.offsets) > 0).all()
    again = isf_groups(lengths, CAPACITY, seed)
    assert np.array_equal(again.members, groups.members) and np.array_equal(again.offsets, groups.offsets)


@given(SAMPLES, st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_groups_of_samples_alike_have_their_size(
    samples: list[tuple[int, int]], size: int, ranks: int, seed: int
) -> None:
    lengths = lengths_of(samples)
    by_length = length_groups(lengths, size, seed)
    assert sorted(by_length.members.tolist()) == list(range(len(samples)))
    assert sorted(np.diff(by_length.offsets).tolist(), reverse=True)[:-1] == [size] * max(len(by_length) - 1, 0)
    by_device = device_groups(lengths, size, ranks, seed)
    assert (
        len(set(by_device.members.tolist())) == len(by_device.members) == len(samples) // (size * ranks) * size * ranks
    )
    assert (np.diff(by_device.offsets) == size).all()


@pytest.fixture(scope="module")
def drawn() -> Lengths:
    rng = np.random.default_rng(3)
    tiles = rng.integers(1, 6, 4000)
    return Lengths(256 * tiles + rng.lognormal(5.5, 0.8, 4000).astype(np.int64).clip(1, 1500), tiles)


def padding(lengths: Lengths, members: np.ndarray, size: int) -> float:
    tokens = lengths.tokens[members].reshape(-1, size)
    longest = tokens.max(axis=1)
    return float(np.mean(1 - tokens.sum(axis=1) / (size * longest)))


def test_what_each_sampling_is_for(drawn: Lengths) -> None:
    order = np.random.default_rng(0).permutation(len(drawn))
    alike, dealt = length_groups(drawn, 4, 0), device_groups(drawn, 4, 8, 0)
    assert padding(drawn, alike.members, 4) < 0.05 < 0.2 < padding(drawn, order, 4)
    random_ratio, device_ratio = (
        dist_ratio(drawn.tokens[members].reshape(-1, 8, 4).max(axis=2) * 4) for members in (order, dealt.members)
    )
    assert device_ratio < 0.3 * random_ratio
    groups = isf_groups(drawn, 4096, 0)
    slots = len(groups) // 8 * 8
    tokens, tiles = (each[:slots].reshape(-1, 8) for each in (groups.tokens(drawn), groups.vision(drawn)))
    assert dist_ratio(tokens) < random_ratio and dist_ratio(tiles) < random_ratio
    assert isf_quotas(drawn, 4096)[1] == 4096
