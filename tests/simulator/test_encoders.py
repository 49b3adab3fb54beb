"""An encoder's batches over its replicas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.simulator.encoders import EncodedStep


@given(seconds=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=40), replicas=st.integers(1, 8))
def test_the_fullest_replica_has_at_most_a_batch_more_than_the_mean(seconds: list[float], replicas: int) -> None:
    step = EncodedStep(np.array(seconds), np.array([len(seconds)]))
    fullest, mean = step.fullest_s(replicas), sum(seconds) / replicas
    assert mean <= fullest + 1e-9 and fullest <= mean + max(seconds) + 1e-9
    assert fullest >= max(seconds)
    free = np.zeros(replicas)
    assert fullest == pytest.approx(float(step.ready_s(free, 0.0)[-1])), "as leases go"
