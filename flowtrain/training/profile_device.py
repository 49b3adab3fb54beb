"""Measures a device: its memory's size and bandwidth, and its links to the other devices of a group."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from flowtrain.mempool.host import host_memory
from flowtrain.training.mesh import BackboneGroup

_NBYTES = {"cpu": 1 << 26}
_ACCELERATOR_NBYTES = 1 << 28
_REPEATS = 5
_LAUNCHES, _WORK_S, _WIDTH = 50, 0.01, 384
"""Transfers that are measured, and the work before each: products of matrices of that width."""


def memory_nbytes(device: torch.device) -> int:
    """Return the bytes of one device's memory; on a CPU, one core's share."""
    if device.type == "cpu":
        memory = host_memory()
        return (memory.cgroup_nbytes or memory.total_nbytes) // max(os.cpu_count() or 1, 1)
    _, total = torch.get_device_module(device).mem_get_info(device)
    return int(total)


def memory_bandwidth(device: torch.device) -> float:
    """Return the bytes/s of a large copy on the device, reads plus writes."""
    nbytes = _NBYTES.get(device.type, _ACCELERATOR_NBYTES)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * nbytes / _median_s(clock_of(device), lambda: target.copy_(source))


def link_bandwidth(group: BackboneGroup) -> float:
    """Return bytes/s that a rank sends in a ring all-reduce over the group; collective."""
    nbytes = _NBYTES.get(group.device.type, _ACCELERATOR_NBYTES)
    tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=group.device)
    seconds = _median_s(
        clock_of(group.device, is_alone=False), lambda: dist.all_reduce(tensor, group=group.process_group)
    )
    return 2 * (group.world_size - 1) / group.world_size * nbytes / seconds


def launch_s(group: BackboneGroup) -> float:
    """Return a rank's processor seconds to start a transfer and to wait for it; collective over two ranks of CPUs.

    The median, with computing in between: caches are cold, as in a run, but the core is not asleep, since to wake a
    virtual one takes up to a millisecond. One in and one out at once, as ranks of a pipeline have them, and of one
    number each: what grows with the size is the link's part.
    """
    peer, both = 1 - group.rank, group.process_group
    out, into = torch.zeros(1), torch.zeros(1)

    def swap() -> None:
        ends = [dist.P2POp(dist.isend, out, peer, both), dist.P2POp(dist.irecv, into, peer, both)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    matrix, seconds = torch.ones(_WIDTH, _WIDTH), []
    swap()  # connects
    for _ in range(_LAUNCHES):
        until_s = time.perf_counter() + _WORK_S
        while time.perf_counter() < until_s:
            matrix @ matrix
        started_s = time.process_time()
        swap()
        seconds.append(time.process_time() - started_s)
    return statistics.median(seconds) / 2


def clock_of(device: torch.device, is_alone: bool = True) -> Callable[[], float]:
    """Return a clock in seconds; on an accelerator it waits until the device is done.

    On a CPU it is this thread's processor time, since other processes share the cores. In a group it is the wall time,
    because ranks wait for each other.
    """
    if device.type == "cpu":
        return time.thread_time if is_alone else time.perf_counter

    def now_s() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return now_s


def _median_s(now_s: Callable[[], float], run: Callable[[], object]) -> float:
    durations_s = []
    for _ in range(_REPEATS + 1):  # the first one warms up
        started_s = now_s()
        run()
        durations_s.append(now_s() - started_s)
    return statistics.median(durations_s[1:])
