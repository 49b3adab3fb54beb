"""A campaign can be stopped and goes on with the same faults, and no role is left out."""

from __future__ import annotations

from fault_draws import KINDS, MAX_FAULTS, PHASES, ROLES, planned_faults
from hypothesis import given
from hypothesis import strategies as st

NUM_STEPS, EVERY = 24, 3


@given(st.integers(0, 1000))
def test_every_role_and_kind_comes_before_any_comes_again(seed: int) -> None:
    faults = [fault for run in range(22) for fault in planned_faults(seed, run, ROLES, NUM_STEPS, EVERY)]
    pairs = {(role, kind) for role in ROLES for kind in KINDS} - {("driver", "stop")}
    assert len(faults) >= 2 * len(pairs)
    for first in (0, len(pairs)):
        # The faults of one run are sorted by their steps, so that a deck may end inside a run.
        near = faults[max(0, first - MAX_FAULTS) : first + len(pairs) + MAX_FAULTS]
        drawn = {(fault.role, fault.kind) for fault in near}
        assert drawn == pairs


@given(st.integers(0, 1000), st.integers(0, 40))
def test_a_run_has_the_same_faults_whenever_it_is_drawn(seed: int, run: int) -> None:
    faults = planned_faults(seed, run, ROLES, NUM_STEPS, EVERY)
    assert faults == planned_faults(seed, run, ROLES, NUM_STEPS, EVERY) and 1 <= len(faults) <= MAX_FAULTS
    for fault in faults:
        assert fault.phase in PHASES and 0 <= fault.after_steps < NUM_STEPS - 2
        assert fault.phase != "evaluation" or (fault.after_steps + 1) % EVERY == 0
