"""Memory that this machine gives to a process, as the kernel reports it; nothing is allocated to find out."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from flowtrain.types.memory import HostMemory

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),  # version 2
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),  # version 1
)

HOST_MEMORY_SHARE = 0.5
"""Copies of the backbone's state are made if all of them on a node fit into this share of its free memory; the rest is
for what the pool and the data will still take."""


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return this host's memory. root: a test's directory in place of ``/``."""
    total, available = _meminfo(root / "proc/meminfo")
    limit, used = _cgroup(root)
    if limit is not None and limit < total:
        available = min(available, max(0, limit - used))
    else:
        limit = None  # version 1 reports "unlimited" as a number larger than any machine's memory
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostMemory(total, available, limit, None if memlock == resource.RLIM_INFINITY else memlock)


def _meminfo(path: Path) -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]


def _cgroup(root: Path) -> tuple[int | None, int]:
    """Return (limit or None, bytes used) of this process's control group."""
    for limit, used in _CGROUPS:
        files = [root / os.path.relpath(name, "/") for name in (limit, used)]
        if all(file.is_file() for file in files):
            most, now = (file.read_text().strip() for file in files)
            return (None if most == "max" else int(most)), int(now)
    return None, 0
