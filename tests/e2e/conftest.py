"""One Ray instance for all tests that run inside the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

import tests


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray that the runs of these tests share; their test classes travel by value."""
    ray.cloudpickle.register_pickle_by_value(tests)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
