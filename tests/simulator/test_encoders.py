"""An encoder's batches over its replicas."""

from __future__ import annotations

import heapq

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


@given(
    seconds=st.lists(st.floats(0.0, 10.0), max_size=40),
    free=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8),
    opened=st.floats(0.0, 10.0),
)
def test_each_batch_goes_to_the_replica_that_is_free_first(
    seconds: list[float], free: list[float], opened: float
) -> None:
    heapq.heapify(free)
    compiled, ends = np.array(free), [0.0]
    for each in seconds:
        ends.append(max(free[0], opened) + each)
        heapq.heapreplace(free, ends[-1])
    step = EncodedStep(np.array(seconds), np.arange(len(seconds) + 1))
    assert step.ready_s(compiled, opened).tolist() == np.maximum.accumulate(ends).tolist()
    assert sorted(compiled.tolist()) == sorted(free)
