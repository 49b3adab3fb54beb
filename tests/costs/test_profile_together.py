"""What a profile knows of processes that run at once: old files without it, and the costs that come of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.costs.profile import read_profile
from flowtrain.costs.profile_together import HostCosts, Interference, ReplicaCosts
from flowtrain.errors import ConfigError
from tests.costs.test_profile import PROFILE, times

AMOUNTS = st.floats(0.0, 10.0)
MEASURED = replace(
    PROFILE,
    interference={"vision": Interference((1.1, 0.9, 1.2))},
    replicas={"full": ReplicaCosts(0.1, 1e-9, 0.2, 2e-9), "gradients": ReplicaCosts(0.0, 0.0, 0.3, 3e-9)},
    host=HostCosts(sample_s=0.01, call_s=0.001),
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


def test_an_old_profile_is_read_and_knows_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    record = json.loads(PROFILE.to_json())
    for key in ("interference", "replicas", "host"):
        del record[key]
    path.write_text(json.dumps({**record, "schema": 1}))
    found = read_profile(path)
    assert found == PROFILE
    asked = np.array([1e6])
    assert times(found).slowdown("vision") is None and times(found).replicas_s("full", asked, asked) is None
    assert times(found).host_s(asked, has_encoders=True).tolist() == [0.0]


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


def test_host_work_grows_with_samples_batches_and_microbatches() -> None:
    host, slots = HostCosts(sample_s=1.0, call_s=0.1), np.array([4.0, 8.0])
    assert host.seconds(10, 3.0, slots).tolist() == pytest.approx([10 + 1.6, 10 + 2.0])
    measured, counts = times(MEASURED), np.array([4.0])
    assert measured.host_s(counts, has_encoders=True)[0] > measured.host_s(counts, has_encoders=False)[0] > 0.0
