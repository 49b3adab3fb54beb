"""The HBM tier as far as it runs without an accelerator; ``scripts/check_hbm.py`` checks the rest."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowtrain.errors import AddressError, OwnerLostError, PoolError, ResourceError
from flowtrain.mempool.device_side import DeviceSide
from flowtrain.mempool.pool import Pool
from flowtrain.mempool.tiers import hbm
from flowtrain.mempool.tiers.dram import DramSegment
from flowtrain.mempool.tiers.hbm import HbmRegion, HbmSegment, checked_export, started_ticks, why_absent
from flowtrain.mempool.transports.base import Distance
from flowtrain.mempool.transports.registry import TransportRegistry
from flowtrain.mempool.watermarks import Watermarks
from flowtrain.types.memory import DeviceExport, Extent, SegmentExport, Tier
from tests.mempool.conftest import Peers

REPOSITORY = Path(__file__).parents[2]
ACCELERATOR = torch.device("cuda")
"""Named only: nothing here reaches for it."""
BOUND_NBYTES = 1 << 16
OWNER, READER = 1, 2


def device_export(**changes: Any) -> DeviceExport:
    values: dict[str, Any] = {
        "runtime": "cuda",
        "handle": bytes(66),
        "storage_nbytes": BOUND_NBYTES + hbm.STAMP_NBYTES,
        "storage_offset": 512,
        "counter_file": b"/torch_12_345_6",
        "counter_index": 3,
        "stamp": bytes(range(16)),
        "started_ticks": started_ticks(os.getpid()),
    }
    return DeviceExport(**(values | changes))


def export(device: DeviceExport | None, pid: int | None = None, node_id: str = "node-a") -> SegmentExport:
    return SegmentExport(OWNER, node_id, Tier.HBM, pid or os.getpid(), -1, BOUND_NBYTES, device=device)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


# --- what a peer sends is checked before the device's runtime sees it -----------------------------------------------


def test_an_export_as_an_owner_builds_it_is_accepted() -> None:
    device = device_export()
    assert checked_export(export(device)) is device


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runtime", "other"),
        ("runtime", b"cuda"),
        ("handle", b"short"),
        ("handle", bytes(1 << 16)),
        ("handle", bytearray(66)),
        ("storage_nbytes", BOUND_NBYTES),
        ("storage_nbytes", 1 << 40),
        ("storage_offset", -512),
        ("storage_offset", 512.0),
        ("counter_file", b"/torch_1/../../etc"),
        ("counter_file", b"/somebody_1_2"),
        ("counter_file", b"/torch_1\0"),
        ("counter_index", -1),
        ("counter_index", 10_000),
        ("counter_index", True),
        ("stamp", bytes(15)),
        ("started_ticks", None),
    ],
)
def test_a_field_that_no_owner_writes_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(PoolError, match=rf"hbm export of process 1 .* is none of this version: {field} "):
        checked_export(export(device_export(**{field: value})))


def test_an_export_without_a_handle_is_refused() -> None:
    with pytest.raises(PoolError, match="process 1 exports hbm without a handle of device memory"):
        HbmRegion(ACCELERATOR).tensor(export(None))


# --- whose memory it is ---------------------------------------------------------------------------------------------


def test_a_dead_process_counts_as_dead_before_it_is_reaped(sleeper: subprocess.Popen[bytes]) -> None:
    born = started_ticks(sleeper.pid)
    assert born is not None and started_ticks(sleeper.pid) == born
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and left as it is
    assert Path(f"/proc/{sleeper.pid}").exists() and started_ticks(sleeper.pid) is None
    sleeper.wait(20)
    assert started_ticks(sleeper.pid) is None


def test_the_memory_of_a_killed_owner_is_lost(sleeper: subprocess.Popen[bytes]) -> None:
    region = HbmRegion(ACCELERATOR)
    lent = export(device_export(started_ticks=started_ticks(sleeper.pid)), sleeper.pid)
    region.check_owner(lent)
    sleeper.kill()
    sleeper.wait(20)
    for read in (region.check_owner, region.tensor):
        with pytest.raises(
            OwnerLostError, match=f"process 1 .pid {sleeper.pid} on node node-a. is gone .* by position"
        ):
            read(lent)


@pytest.mark.parametrize("ending", ["drop", "close"])
def test_what_torch_left_of_a_killed_owner_is_cleared_away(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(hbm, "_SHARED_FILES", tmp_path)
    monkeypatch.setattr(HbmRegion, "_import", lambda self, export: torch.empty(0))
    own, other = tmp_path / f"torch_{sleeper.pid}_7_0", tmp_path / "torch_12_345_6"
    own.touch()
    other.touch()
    lent = device_export(started_ticks=started_ticks(sleeper.pid), counter_file=b"/" + own.name.encode())

    def let_go(device: DeviceExport) -> None:
        region = HbmRegion(ACCELERATOR)
        region.tensor(export(device, sleeper.pid))
        region.drop(OWNER) if ending == "drop" else region.close()

    let_go(lent)
    assert own.exists(), "its owner lives"
    sleeper.kill()
    sleeper.wait(20)
    let_go(replace(lent, counter_file=b"/torch_12_345_6"))
    assert other.exists(), "a file of another process"
    let_go(lent)
    assert not own.exists()


def test_a_process_with_a_dead_owners_pid_is_not_taken_for_it(sleeper: subprocess.Popen[bytes]) -> None:
    earlier = export(device_export(started_ticks=(started_ticks(sleeper.pid) or 0) - 1), sleeper.pid)
    with pytest.raises(OwnerLostError, match="is gone with its process"):
        HbmRegion(ACCELERATOR).tensor(earlier)


# --- routes ---------------------------------------------------------------------------------------------------------


def reader_side(peers: Peers) -> DeviceSide:
    """Return the device side of a process that gives no HBM, like a backbone rank."""
    return DeviceSide(READER, "node-a", peers.space, ACCELERATOR, 0, 64, Watermarks())


def reader(peers: Peers, exports: list[SegmentExport], side: DeviceSide | None = None) -> Pool:
    pool = Pool(READER, "node-a", peers.run_id, peers.space, 0, 64, "knob", lambda: exports, device=side)
    peers.pools[READER] = pool
    return pool


@pytest.mark.parametrize("destination", Tier)
@pytest.mark.parametrize("distance", Distance)
def test_hbm_is_read_on_its_own_node_alone(peers: Peers, distance: Distance, destination: Tier) -> None:
    transports = TransportRegistry()
    reader_side(peers).register(transports)
    if distance is Distance.SAME_NODE:
        assert transports.choose(Tier.HBM, destination, distance).name == "device_ipc"
        return
    with pytest.raises(PoolError, match=f"no transport reads hbm into {destination} at distance {distance}"):
        transports.choose(Tier.HBM, destination, distance)


def test_the_error_names_why_a_part_in_hbm_cannot_be_read(peers: Peers, sleeper: subprocess.Popen[bytes]) -> None:
    there = Extent(peers.space.gva(Tier.HBM, OWNER, 256), 64)
    lent = export(device_export(started_ticks=started_ticks(sleeper.pid)), sleeper.pid)
    with pytest.raises(PoolError, match="no transport reads hbm into dram at distance same_node"):
        reader(peers, [lent]).get([there])
    side = reader_side(peers)
    with pytest.raises(PoolError, match="no transport reads hbm into dram at distance other_node"):
        reader(peers, [replace(lent, node_id="node-b")], side).get([there])
    with pytest.raises(PoolError, match="is none of this version: storage_nbytes"):
        reader(peers, [replace(lent, bound_nbytes=1 << 12)], side).get([there])
    with pytest.raises(AddressError, match="of hbm segment 1, of which 65536 bytes are bound"):
        reader(peers, [lent], side).get([Extent(there.gva, BOUND_NBYTES)])
    sleeper.kill()
    sleeper.wait(20)
    pool = reader(peers, [lent], side)
    for read in (lambda: pool.get([there]), lambda: pool.get_batch([[there]])):
        with pytest.raises(OwnerLostError, match="is gone with its process"):
            read()
    with pytest.raises(OwnerLostError, match="is gone with its process"):
        pool.copy_to_device([there], [torch.empty(64, dtype=torch.uint8)])
    assert reader(peers, [], side).tier_of(there) is Tier.HBM
    with pytest.raises(OwnerLostError, match="no living process exports hbm segment 1"):
        reader(peers, [], side).get([there])


def test_dram_goes_on_as_before_beside_a_device_side(peers: Peers) -> None:
    owner = peers.open(0)
    pool = reader(peers, [*peers.published.values()], reader_side(peers))
    extents = owner.put(b"features")
    assert pool.tier_of(extents[0]) is Tier.DRAM
    assert pool.get(extents).tobytes() == b"features" and pool.exports() == []
    with pytest.raises(PoolError, match="transport shared_memory does not write device memory"):
        pool.copy_to_device(extents, [torch.empty(8, dtype=torch.uint8)])
    assert pool.write_on_device(64, lambda memory: None) is None, "it gives no HBM, so parts lie in DRAM"
    assert owner.write_on_device(64, lambda memory: None) is None
    foreign = Extent(peers.space.gva(Tier.HBM, OWNER, 0), 64)
    for end in (pool, owner):
        with pytest.raises(AddressError, match=r"they belong to process 1 \(hbm\)"):
            end.release([foreign])


# --- without a device -----------------------------------------------------------------------------------------------


def test_a_line_names_why_there_is_no_tier() -> None:
    assert why_absent(torch.device("cpu")) == "no accelerator"
    assert why_absent(torch.device("xpu")) == "memory of xpu devices is not shared by this version"
    assert why_absent(ACCELERATOR) is None


def test_a_device_that_cannot_share_memory_is_refused_with_the_key() -> None:
    with pytest.raises(ResourceError, match=r"cpu cannot give 4096 bytes to the pool .*pool\.hbm_segment_nbytes"):
        HbmSegment(torch.device("cpu"), 4096)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_the_check_for_devices_reports_that_there_is_none() -> None:
    script = REPOSITORY / "scripts" / "check_hbm.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["skipped"] == "no accelerator" and "nothing was checked" in done.stderr


# --- page-locked DRAM -----------------------------------------------------------------------------------------------


class Ledger:
    """Notes what is locked, and the memory's content at that moment."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.events: list[str] = []
        self.changed = threading.Condition()

    def lock(self, address: int, nbytes: int) -> bool:
        with self.changed:
            self.locked[address] = nbytes
            self.events.append(f"lock {nbytes}")
            self.changed.notify_all()
        return True

    def unlock(self, address: int) -> None:
        nbytes = self.locked.pop(address, None)
        if nbytes is not None:
            assert _is_mapped(address, nbytes), "pages are let go before they are unmapped"
            self.events.append(f"unlock {nbytes}")

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= count, 20)


def _is_mapped(address: int, nbytes: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address and address + nbytes <= end:
            return True
    return False


def test_a_segment_is_locked_once_touched_and_unlocked_when_it_closes() -> None:
    pages = Ledger()
    segment = DramSegment(secrets.token_hex(6), 0, 1 << 20, pages)
    pages.wait(1)
    assert pages.locked == {segment.array.ctypes.data: 1 << 20}
    view = segment.array[:8]
    segment.close()
    assert pages.events == ["lock 1048576", "unlock 1048576"] and not pages.locked
    view[:] = 1  # still mapped
    del view
    assert len(pages.events) == 2


def test_a_segment_that_grows_is_locked_at_its_new_place_alone() -> None:
    pages = Ledger()
    segment = DramSegment(secrets.token_hex(6), 0, 1 << 20, pages)
    pages.wait(1)
    kept = segment.array[:8]
    segment.grow(2 << 20)
    pages.wait(2)
    assert sorted(pages.locked.values()) == [1 << 20, 2 << 20]
    segment.close()
    assert list(pages.locked.values()) == [1 << 20], "a view keeps the first mapping"
    assert isinstance(kept, np.ndarray)
    del kept
    assert not pages.locked and pages.events[-1] == "unlock 1048576"
