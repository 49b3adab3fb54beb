"""What a profile knows of processes that run at once: files without it, and the costs that come of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.costs.profile import read_profile
from flowtrain.costs.profile_together import (
    HostCosts,
    Interference,
    ReplicaCosts,
    interference_factor,
    line_through,
    replica_costs,
)
from flowtrain.errors import ConfigError
from flowtrain.types.profile import ReplicaSteps
from tests.allocator.worlds import workload
from tests.costs.test_profile import PROFILE, times

AMOUNTS = st.floats(0.0, 10.0)
MEASURED = replace(
    PROFILE,
    interference={"vision": Interference((1.1, 0.9, 1.2))},
    replicas={"full": ReplicaCosts(0.1, 1e-9, 0.2, 2e-9), "gradients": ReplicaCosts(0.0, 0.0, 0.3, 3e-9)},
    host=HostCosts(sample_s=0.01, asking_s=0.002, answering_s=0.001),
)


def test_what_was_measured_together_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(MEASURED.to_json())
    assert read_profile(path) == MEASURED
    record = json.loads(path.read_text())
    record["interference"]["vision"]["factors"] = []
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="interference.vision.factors: Tuple should have at least 1 item"):
        read_profile(path)


def test_a_profile_without_it_knows_nothing_of_it() -> None:
    asked = np.array([1e6])
    assert times(PROFILE).slowdown("vision") is None and times(PROFILE).replicas_s("full", asked, asked) is None
    assert times(PROFILE).host_s(asked, asked, has_encoders=True).tolist() == [0.0]


def test_times_come_of_the_measured_amounts() -> None:
    measured = times(MEASURED)
    assert measured.slowdown("vision") == 1.1 and measured.slowdown("other") is None
    parameters, shards = np.array([1e8, 1e8]), np.array([2.0, 4.0])
    for sharding in ("full", "hybrid"):
        found = measured.replicas_s(sharding, parameters, shards)
        assert found is not None
        gathering, reducing = found
        assert gathering.tolist() == pytest.approx([0.2, 0.3]) and reducing.tolist() == pytest.approx([0.4, 0.6])
    found = measured.replicas_s("gradients", parameters, shards)
    assert found is not None and found[0].tolist() == [0.0, 0.0] and found[1].tolist() == pytest.approx([0.6, 0.9])


@given(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.integers(1, 64))
def test_sharing_costs_a_rank_alone_nothing_and_more_with_each_replica(
    fixed: float, each: float, step: float, parameter: float, replicas: int
) -> None:
    costs = ReplicaCosts(fixed, each, step, parameter)
    parameters, counts = np.array([10.0, 10.0]), np.array([replicas, replicas + 1.0])
    for seconds in (costs.gathering_s(parameters, counts), costs.reducing_s(parameters, counts)):
        assert 0.0 <= seconds[0] <= seconds[1]
        assert replicas > 1 or seconds[0] == 0.0
    assert costs.gathering_s(parameters, np.array([2.0]))[0] == pytest.approx(fixed + 10.0 * each)
    assert costs.reducing_s(parameters, np.array([2.0]))[0] == pytest.approx(step + 10.0 * parameter)


@given(AMOUNTS, AMOUNTS, AMOUNTS, st.integers(0, 50), st.integers(1, 50), st.integers(1, 8))
def test_host_work_is_linear_in_what_there_is(
    sample: float, asking: float, answering: float, batches: int, slots: int, replicas: int
) -> None:
    host, counts, some = HostCosts(sample, asking, answering), np.array([float(slots)]), np.array([float(replicas)])
    base = host.seconds(10, batches, counts, some)
    assert host.seconds(11, batches, counts, some) - base == pytest.approx(sample, abs=1e-6)
    assert host.seconds(10, batches + 1, counts, some) - base == pytest.approx(2 * answering, abs=1e-6)
    assert host.seconds(10, batches, counts + 1, some) - base == pytest.approx(answering, abs=1e-6)
    assert host.seconds(10, batches, counts, some + 1) - base == pytest.approx(2 * answering, abs=1e-6)


def test_batches_have_samples_of_one_step_up_to_the_limit() -> None:
    def work(max_batch_patches: int) -> float:
        found = times(MEASURED, patches=max_batch_patches).host_s(np.zeros(1), np.zeros(1), has_encoders=True)
        return float(found[0])

    without = times(MEASURED).host_s(np.zeros(1), np.zeros(1), has_encoders=False)[0]
    data = workload()
    with_images = np.count_nonzero(data.images["vision"][1]) / len(data.lengths) * data.global_batch_size
    assert work(1) - without == pytest.approx(with_images * 2 * 0.001), "each sample its own"
    assert without < work(1 << 40) < work(1)


PIECES = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4)


@given(PIECES)
def test_processes_that_take_turns_do_not_interfere(alone: list[float]) -> None:
    together = [len(alone) * seconds for seconds in alone]
    assert interference_factor(alone, together) == pytest.approx(1.0)
    assert interference_factor(alone, alone) == pytest.approx(1 / len(alone)), "as if each had a device of its own"
    slower = [1.5 * seconds for seconds in together]
    assert interference_factor(alone, slower) == pytest.approx(1.5)


@given(st.integers(1, 100), st.integers(1, 100), st.floats(-1.0, 5.0), st.floats(-1.0, 5.0))
def test_a_line_goes_through_the_larger_point_and_is_never_negative(
    fewer: int, more: int, shallow: float, deep: float
) -> None:
    fixed, slope = line_through((fewer, fewer + more), (shallow, deep))
    assert fixed >= 0.0 and slope >= 0.0
    assert fixed + slope * (fewer + more) == pytest.approx(max(deep, 0.0))


def test_a_line_through_no_units_at_all_says_nothing_of_one() -> None:
    assert line_through((0, 0), (1e-4, 3e-4)) == (3e-4, 0.0)
    assert line_through((0.0, 0), (0.0, 3e-4)) == (3e-4, 0.0)


def test_two_replicas_cost_what_their_steps_take_more_than_one_alone() -> None:
    alone = ReplicaSteps((100, 300), (1.0, 2.0), (0.5, 0.7))
    shared = ReplicaSteps((100, 300), (1.1, 2.3), (0.7, 0.8), first_s=(0.05, 0.1), last_s=(0.15, 0.4))
    costs = replica_costs(alone, shared, step_s=0.4, parameter_s=1e-3)
    two, numbers = np.array([2.0, 2.0]), np.array([100.0, 300.0])
    assert costs.gathering_s(numbers, two).tolist() == pytest.approx([0.1, 0.3])
    # Each of both updates half of the parameters, the rest is the reduction.
    assert costs.reducing_s(numbers, two).tolist() == pytest.approx([0.9 - 0.45, 1.3 - 0.55])
    # A first backward that saves less than one alone, which is taken off every step, is a cost of theirs.
    alone, shared = (
        replace(each, first_backward_s=saved) for each, saved in ((alone, (0.1, 0.3)), (shared, (0.1, 0.2)))
    )
    costs = replica_costs(alone, shared, step_s=0.4, parameter_s=1e-3)
    assert costs.reducing_s(numbers, two).tolist() == pytest.approx([0.9 - 0.45, 1.3 - 0.55 + 0.1])
