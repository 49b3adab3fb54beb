"""Try the HBM tier of the memory pool on a machine with an accelerator; needs torch (2.11 or newer) and numpy, no Ray.

python scripts/check_hbm.py > hbm.json

The checks: an owner process puts features into its device memory; this process reads them by ``device_ipc``, compares
them, and kills the owner. Parts overflow into DRAM and return. Page-locked and pageable copies are timed. Copies on the
side stream overlap with compute. A table goes to stderr, JSON to stdout. Exits with 1 if a check failed, with 0 if all
passed or if there is no accelerator.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # in case FlowTrain is not installed

from flowtrain.errors import OwnerLostError
from flowtrain.mempool.device_side import DeviceSide
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.staging import DeviceStaging
from flowtrain.mempool.tiers.hbm import why_absent
from flowtrain.mempool.watermarks import Watermarks
from flowtrain.types.memory import Extent, SegmentExport, Tier

MIB = 1 << 20
HBM_NBYTES, DRAM_NBYTES, PART_NBYTES = 256 * MIB, 256 * MIB, 16 * MIB
SIZES = (64 << 10, MIB, 3 * MIB + 256, PART_NBYTES)
MARKS = Watermarks(0.5, 0.75)
SPACE = AddressSpace(num_processes=4, segment_nbytes=1 << 30)
REPEATS = 20
TIMEOUT_S = 120.0
Result = dict[str, Any]


def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def open_pool(run_id: str, index: int, hbm_nbytes: int, dram_nbytes: int, exports: list[SegmentExport]) -> Pool:
    side = DeviceSide(index, "node", SPACE, accelerator(), hbm_nbytes, 256, MARKS)
    return Pool(index, "node", run_id, SPACE, dram_nbytes, 256, "DRAM_NBYTES", lambda: exports, device=side)


def payload(seed: int, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def put(pool: Pool, seed: int, nbytes: int) -> tuple[Extent, ...]:
    """Put known bytes as an encoder does: into HBM if the watermark policy allows it, else into DRAM."""
    data = payload(seed, nbytes)

    def fill(memory: torch.Tensor) -> None:
        memory.copy_(data)

    return pool.write_on_device(nbytes, fill) or pool.put(data.numpy())


def own(run_id: str, connection: Connection) -> None:
    """The owner process: binds memory, puts parts into it, and lives until it is killed."""
    pool = open_pool(run_id, 1, HBM_NBYTES, DRAM_NBYTES, [])
    parts = [put(pool, seed, nbytes) for seed, nbytes in enumerate(SIZES)]
    parts.append(pool.put(payload(len(SIZES), MIB).numpy()))
    connection.send((pool.exports(), parts))
    connection.recv()


@contextmanager
def owner(run_id: str) -> Iterator[tuple[Any, list[SegmentExport], list[tuple[Extent, ...]]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=own, args=(run_id, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError(f"the owner put nothing within {TIMEOUT_S:g} s")
        yield process, *ours.recv()
    finally:
        process.kill()
        process.join(TIMEOUT_S)


def median_s(function: Callable[[], object]) -> float:
    """Seconds of one call with all the work that it starts on the device; the first two calls do not count."""
    durations = []
    for _ in range(REPEATS + 2):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        function()
        torch.accelerator.synchronize()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations[2:])


def check_device_ipc(run_id: str) -> Result:
    """Read the owner's parts onto the device and to the host; kill it, and read again."""
    with owner(run_id) as (process, exports, parts):
        reader = open_pool(run_id, 0, 0, 0, exports)
        staging = DeviceStaging(reader, accelerator())
        expected = [payload(seed, nbytes) for seed, nbytes in enumerate((*SIZES, MIB))]
        tensors = staging.get_batch(parts)
        staging.hand_over(tensors, staging.mark())
        on_device = all(torch.equal(got.cpu(), want) for got, want in zip(tensors, expected, strict=True))
        on_host = all((reader.get(part) == want.numpy()).all() for part, want in zip(parts, expected, strict=True))
        tiers = [str(reader.tier_of(part[0])) for part in parts]
        there = [torch.empty(PART_NBYTES, dtype=torch.uint8, device=accelerator())]
        seconds = median_s(lambda: reader.copy_to_device(parts[-2], there))
        os.kill(process.pid, signal.SIGKILL)
        error = ""
        deadline = time.monotonic() + TIMEOUT_S
        while not error and time.monotonic() < deadline:
            try:
                reader.copy_to_device(parts[0], [there[0][: SIZES[0]]])
            except OwnerLostError as lost:
                error = str(lost)
        reader.close()
    return {
        "ok": on_device and on_host and bool(error) and tiers == ["hbm"] * len(SIZES) + ["dram"],
        "equal_on_device": on_device,
        "equal_on_host": on_host,
        "tiers": tiers,
        "read_gb_per_s": PART_NBYTES / seconds / 1e9,
        "error_when_killed": error,
    }


def check_watermarks(run_id: str) -> Result:
    """Fill this process's HBM until parts go to DRAM; free it until parts go to HBM again, below the low watermark."""
    pool = open_pool(run_id, 2, HBM_NBYTES, DRAM_NBYTES, [])
    parts = []
    while not parts or pool.tier_of(parts[-1][0]) is Tier.HBM:
        parts.append(put(pool, len(parts), PART_NBYTES))
    in_hbm = len(parts) - 1
    equal = all((pool.get(part) == payload(seed, PART_NBYTES).numpy()).all() for seed, part in enumerate(parts))
    freed = 0
    while freed < in_hbm:
        pool.release(parts[freed])
        freed += 1
        again = put(pool, 0, PART_NBYTES)
        back = pool.tier_of(again[0]) is Tier.HBM
        pool.release(again)
        if back:
            break
    pool.close()
    left = (in_hbm - freed) * PART_NBYTES / HBM_NBYTES
    return {
        "ok": equal and MARKS.high < in_hbm * PART_NBYTES / HBM_NBYTES <= MARKS.high + 0.1 and left < MARKS.low,
        "equal": equal,
        "share_at_overflow": in_hbm * PART_NBYTES / HBM_NBYTES,
        "share_at_return": left,
    }


def check_page_lock(run_id: str) -> Result:
    """Time copies between the device and host memory: the pool's page-locked memory against pageable memory."""
    pool = open_pool(run_id, 3, 0, DRAM_NBYTES, [])
    room = pool.reserve(4 * PART_NBYTES)
    locked = torch.from_numpy(room.views[0])
    deadline = time.monotonic() + TIMEOUT_S
    while not locked.is_pinned() and time.monotonic() < deadline:  # a thread locks it after it has touched it
        time.sleep(0.05)
    pageable = torch.empty_like(locked, pin_memory=False).fill_(1)
    there = torch.empty_like(locked, device=accelerator())
    speeds = {}
    for name, memory in (("page_locked", locked), ("pageable", pageable)):
        copies = {"to_device": (there, memory), "to_host": (memory, there)}
        for way, (destination, source) in copies.items():
            seconds = median_s(lambda d=destination, s=source: d.copy_(s, non_blocking=True))
            speeds[f"{name}_{way}_gb_per_s"] = len(locked) / seconds / 1e9
    is_locked = locked.is_pinned()
    room.abort()
    pool.close()
    return {"ok": is_locked and not locked.is_pinned(), "is_page_locked": is_locked, **speeds}


def check_overlap(run_id: str) -> Result:
    """Stage parts while the device computes: they should arrive before it is done."""
    pool = open_pool(run_id, 3, 0, DRAM_NBYTES, [])
    parts = [pool.put(payload(seed, PART_NBYTES).numpy()) for seed in range(4)]
    staging = DeviceStaging(pool, accelerator())
    matrix = torch.randn(4096, 4096, device=accelerator())

    def compute() -> torch.Event:
        for _ in range(100):
            torch.mm(matrix, matrix)
        return torch.accelerator.current_stream().record_event()

    def stage() -> list[torch.Tensor]:
        tensors = staging.get_batch(parts)
        ready = staging.mark()
        ready.synchronize()
        staging.hand_over(tensors, ready)
        return tensors

    compute_s, stage_s = median_s(compute), median_s(stage)
    computed = compute()
    tensors = stage()
    overlapped = not computed.query()
    equal = all(torch.equal(got.cpu(), payload(seed, PART_NBYTES)) for seed, got in enumerate(tensors))
    pool.close()
    return {
        "ok": overlapped and equal,
        "overlapped": overlapped,
        "equal": equal,
        "compute_s": compute_s,
        "stage_s": stage_s,
    }


def attempt(check: Callable[[str], Result]) -> Result:
    try:
        return check(secrets.token_hex(4))
    except Exception as error:  # a failed check is reported, and the others still run
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def main() -> int:
    device = accelerator()
    reason = why_absent(device)
    report: Result = {"torch": torch.__version__, "device": str(device), "skipped": reason}
    if reason is not None:
        print(f"nothing was checked: {reason}", file=sys.stderr)
        print(json.dumps(report))
        return 0
    report["device"] = torch.get_device_module(device).get_device_name(device)
    checks = (check_device_ipc, check_watermarks, check_page_lock, check_overlap)
    report["checks"] = {check.__name__.removeprefix("check_"): attempt(check) for check in checks}
    with suppress(FileNotFoundError):
        report["left_in_dev_shm"] = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    for name, result in report["checks"].items():
        print(f"{name:12} {'held' if result['ok'] else 'FAILED'}", file=sys.stderr)
        for key, value in result.items():
            shown = f"{value:.3g}" if isinstance(value, float) else value
            print(f"    {key:32} {shown}", file=sys.stderr)
    print(json.dumps(report, indent=2))
    return 0 if all(result["ok"] for result in report["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
