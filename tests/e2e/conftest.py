"""One Ray instance for all tests that run inside the test process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import tests
from flowtrain.observability.run_dir import RunDir
from tests.e2e import disturbed
from tests.prefork import prefork_server

CRASH = re.compile(r"\*\*\* SIG(SEGV|ABRT|BUS|FPE|ILL) received")
CRASH_CHARS = 6000
"""Shown of what a worker that crashed wrote."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray that the runs of these tests share; their test classes travel by value.

    Warns of workers that crashed, with their stacks: runs recover from that, so no test need fail.
    """
    ray.cloudpickle.register_pickle_by_value(tests)
    with prefork_server() as runtime_env:
        context = ray.init(
            address="local",
            num_cpus=4,
            num_gpus=4,  # no run takes them, since model.device is cpu; for tests of where actors are placed
            include_dashboard=False,
            log_to_driver=False,
            runtime_env=runtime_env,
        )
        logs = Path(context.address_info["session_dir"]) / "logs"
        yield
        ray.shutdown()
    for log in logs.glob("worker-*.err"):
        text = log.read_text(errors="replace")
        if crash := CRASH.search(text):
            warnings.warn(f"{log.name}: {text[crash.start() :][:CRASH_CHARS]}", stacklevel=1)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the data of the runs that are disturbed."""
    directory = tmp_path_factory.mktemp("disturbed")
    disturbed.spoiled_world().write(directory / "train.parquet")
    disturbed.eval_world().write(directory / "eval.parquet")
    return directory


@pytest.fixture(scope="session")
def undisturbed(world: Path) -> RunDir:
    """The run as it goes when nothing happens."""
    return disturbed.run_undisturbed(disturbed.config_of(world, "undisturbed"), world / "undisturbed.log")
