"""The overflow of HBM into DRAM: a rule for every sequence of puts and releases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ConfigError, OutOfPoolMemory
from flowtrain.mempool.arena import Arena, Run
from flowtrain.mempool.watermarks import TierPolicy, Watermarks
from flowtrain.types.memory import Tier

ALIGNMENT = 1
BOUND = {Tier.HBM: 100, Tier.DRAM: 60}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60),
    st.tuples(st.integers(1, 100), st.integers(1, 100)).map(sorted),
)
def test_hbm_fills_to_its_high_watermark_and_again_from_below_its_low_one(
    deeds: list[tuple[bool, int]], marks: list[int]
) -> None:
    low, high = marks
    policy = TierPolicy(Watermarks(low / 100, high / 100))
    arenas = {tier: Arena(nbytes, ALIGNMENT, "knob") for tier, nbytes in BOUND.items()}
    living: list[tuple[Tier, tuple[Run, ...]]] = []
    above = False
    for is_put, number in deeds:
        if not is_put:
            if living:
                tier, runs = living.pop(number % len(living))
                arenas[tier].free(runs)
            continue
        used = arenas[Tier.HBM].used_nbytes
        above = used >= low if above else used > high
        tier = policy.choose(number, arenas)
        assert tier is (Tier.DRAM if above or used + number > BOUND[Tier.HBM] else Tier.HBM)
        try:
            living.append((tier, arenas[tier].allocate(number)))
        except OutOfPoolMemory:
            assert tier is Tier.DRAM, "only then does the producer wait, and nothing is dropped"
            assert number > arenas[Tier.DRAM].available_nbytes
        assert sum(arena.used_nbytes for arena in arenas.values()) == sum(
            length for _, runs in living for _, length in runs
        )


@given(st.integers(0, 100), st.integers(1, 200))
def test_without_hbm_everything_goes_to_dram(used: int, nbytes: int) -> None:
    arena = Arena(100, ALIGNMENT, "knob")
    arena.allocate(used)
    assert TierPolicy().choose(nbytes, {Tier.DRAM: arena}) is Tier.DRAM


def test_promised_bytes_count_as_used() -> None:
    hbm, dram = Arena(100, ALIGNMENT, "knob"), Arena(100, ALIGNMENT, "knob")
    hold = hbm.hold(95)
    policy = TierPolicy(Watermarks(0.5, 0.9))
    assert policy.choose(1, {Tier.HBM: hbm, Tier.DRAM: dram}) is Tier.DRAM
    hbm.unhold(hold)
    assert policy.choose(1, {Tier.HBM: hbm, Tier.DRAM: dram}) is Tier.HBM


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (0.6, 0.5), (0.5, 1.1)])
def test_watermarks_that_make_no_sense_are_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="0 < low <= high <= 1"):
        Watermarks(low, high)
