"""How actors that compute on a CPU get memory, and who decides it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flowtrain.controller.memory_env import memory_options


def test_freed_memory_is_kept_unless_the_environment_decides() -> None:
    variables = memory_options({"PATH": "/bin"})["runtime_env"]["env_vars"]
    assert variables["MALLOC_ARENA_MAX"] == "1" and variables["MALLOC_MMAP_MAX_"] == "0"
    for name in (*variables, "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD"):
        assert memory_options({name: "anything"}) == {}


SCRIPT = """
import ray
from flowtrain.controller.memory_env import memory_options

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Reader:
    def environ(self):
        return open("/proc/self/environ").read().split(chr(0))

options = memory_options({})
readers = [Reader.options(**each).remote() for each in ({}, options)]
plain, keeping = ray.get([each.environ.remote() for each in readers], timeout=60)
wanted = {f"{name}={value}" for name, value in options["runtime_env"]["env_vars"].items()}
print(len(wanted), len(wanted & set(plain)), len(wanted & set(keeping)))
ray.shutdown()
"""


@pytest.mark.processes
def test_an_actors_process_starts_with_it() -> None:
    """The C library reads it when a process starts, so what Python changes later is too late."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["5", "0", "5"], done.stderr
