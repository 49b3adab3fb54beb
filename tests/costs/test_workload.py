"""Impossible samples are refused."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain.errors import ConfigError
from tests.allocator.worlds import workload


def test_workloads_without_tokens_or_beyond_a_microbatch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"longest sample of the workload \(2048 tokens\)"):
        workload(microbatch_tokens=2047)
    with pytest.raises(ConfigError, match="needs samples, each of at least one token"):
        workload(lengths=np.array([0, 1]))


def test_the_summary_has_the_spread_of_lengths() -> None:
    lengths = np.arange(1, 101)
    columns = dict.fromkeys(("lengths", "vision_lengths", "target_lengths"), lengths)
    found = workload(images={"vision": (lengths, lengths)}, **columns).to_dict()
    assert (found["tokens_p5"], found["tokens_per_sample"], found["tokens_p95"]) == (5, 50.5, 95)
