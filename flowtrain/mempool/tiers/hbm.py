"""The HBM tier on one node: segments of device memory, read by peers through the device runtime's IPC.

Only this file and ``page_lock`` name the runtime: CUDA, with the calls by which ``torch.multiprocessing`` shares a
storage (torch 2.11 to 2.13). Nothing is unpickled: peers send a ``DeviceExport``, which is checked before it is used.
``scripts/check_hbm.py`` tries it on a device (docs/results/gpu.md).
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from dataclasses import fields
from pathlib import Path

import torch

from flowtrain.errors import OwnerLostError, PoolError, ResourceError
from flowtrain.types.memory import DeviceExport, SegmentExport

KNOB = "pool.hbm_segment_nbytes"
NO_ACCELERATOR = "no accelerator"
STAMP_NBYTES = 16
_RUNTIME = "cuda"
_HANDLE_NBYTES = range(64, 1 << 16)  # the runtime's handle of 64 bytes, and the bytes that torch puts before it
_COUNTERS = 10_000  # in one of torch's files of reference counters
_COUNTER_FILE = re.compile(rb"/torch_[0-9_]{1,200}")
_SHARED_FILES = Path("/dev/shm")
_STATE_FIELD, _STARTED_FIELD = 0, 19  # of /proc/<pid>/stat, counted after the name


def why_absent(device: torch.device) -> str | None:
    """Return why a process that computes on ``device`` has no HBM tier; None if it can have one."""
    if device.type == "cpu":
        return NO_ACCELERATOR
    return None if device.type == _RUNTIME else f"memory of {device.type} devices is not shared by this version"


def started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone, or dead and not yet reaped.

    The pid and this time together identify a process for good; a pid alone can be used again.
    """
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if values[_STATE_FIELD] in "ZX" else int(values[_STARTED_FIELD])


class HbmSegment:
    """Device memory that this process gives to the pool: writable here, exported to its node.

    nbytes: bytes bound, for good. Raises ResourceError if the device has too little memory left, or cannot share it.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        stamp = secrets.token_bytes(STAMP_NBYTES)
        try:
            memory = torch.empty(nbytes + STAMP_NBYTES, dtype=torch.uint8, device=device)
            memory[nbytes:].copy_(torch.frombuffer(bytearray(stamp), dtype=torch.uint8))
            torch.accelerator.synchronize(device)
            # The last values describe an event; no reader needs to wait for it, since the stamp is written already.
            _, handle, size, offset, counter_file, index, *_ = memory.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise ResourceError(
                f"{device} cannot give {nbytes} bytes to the pool ({error}); lower {KNOB}, or set it to 0 to keep "
                "embeddings in dram"
            ) from error
        self.tensor = memory[:nbytes]
        """All bound bytes, uint8."""
        started = started_ticks(os.getpid())
        assert started is not None, "this process runs"
        self.export = DeviceExport(_RUNTIME, handle, size, offset, counter_file, index, stamp, started)

    def close(self) -> None:
        """Stop offering the memory. It is freed with the last view of it here; peers must not read it any more."""
        # Torch expects one reader of each handle and keeps memory that none has read. Here the owner decides.
        torch.UntypedStorage._release_ipc_counter_cuda(self.export.counter_file, self.export.counter_index)
        self.tensor = torch.empty(0, dtype=torch.uint8)


class HbmRegion:
    """The HBM segments of this process's node, each imported onto ``device`` when it is first read.

    The owner may compute on a device that this process does not see; the runtime maps its memory in that case too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen: dict[int, SegmentExport] = {}

    def tensor(self, export: SegmentExport) -> torch.Tensor:
        """Return a peer's bound bytes, uint8. They are valid while the peer lives: copy them, then ``check_owner``.

        Raises OwnerLostError if the peer is gone, PoolError for an invalid export or one that cannot be mapped.
        """
        with self._lock:
            tensor = self._tensors.get(export.process_index)
            if tensor is None:
                checked_export(export)
                self._seen[export.process_index] = export
                tensor = self._tensors[export.process_index] = self._import(export)
            return tensor

    def check_owner(self, export: SegmentExport) -> None:
        """Raise OwnerLostError unless the process that exported a segment is alive."""
        if started_ticks(export.pid) != checked_export(export).started_ticks:
            raise OwnerLostError(
                f"the hbm segment of process {export.process_index} (pid {export.pid} on node {export.node_id}) is "
                "gone with its process; ask the coordinator again by position"
            )

    def drop(self, process_index: int) -> None:
        """Let go of a segment whose owner is gone."""
        with self._lock:
            self._tensors.pop(process_index, None)
            self._clear_away(process_index)

    def close(self) -> None:
        """Let go of all segments."""
        with self._lock:
            self._tensors.clear()
            for process_index in list(self._seen):
                self._clear_away(process_index)

    def _clear_away(self, process_index: int) -> None:
        """Remove the file of counters that torch left if the owner was killed; it removes the file at a proper end."""
        export = self._seen.pop(process_index, None)
        if export is None:
            return
        found = checked_export(export)
        owner, name = f"torch_{export.pid}_", found.counter_file.decode().removeprefix("/")
        if name.startswith(owner) and started_ticks(export.pid) != found.started_ticks:
            (_SHARED_FILES / name).unlink(missing_ok=True)

    def _import(self, export: SegmentExport) -> torch.Tensor:
        self.check_owner(export)
        found = checked_export(export)
        try:
            torch.cuda.init()
            index = torch.accelerator.current_device_index() if self._device.index is None else self._device.index
            storage = torch.UntypedStorage._new_shared_cuda(
                index,
                found.handle,
                found.storage_nbytes,
                found.storage_offset,
                found.counter_file,
                found.counter_index,
                bytes(64),  # no event to wait for
                False,
            )
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            memory = empty.set_(storage, 0, (found.storage_nbytes,), (1,))
            stamp = bytes(memory[export.bound_nbytes : export.bound_nbytes + STAMP_NBYTES].tolist())
        except RuntimeError as error:
            self.check_owner(export)
            raise PoolError(
                f"the hbm segment of process {export.process_index} cannot be mapped onto {self._device} ({error}); "
                f"devices must reach each other's memory, and processes must share a container; or set {KNOB} to 0"
            ) from error
        if stamp != found.stamp:
            raise OwnerLostError(
                f"what was mapped as the hbm segment of process {export.process_index} (pid {export.pid}) is another "
                "one; ask the coordinator again by position"
            )
        return memory[: export.bound_nbytes]


def checked_export(export: SegmentExport) -> DeviceExport:
    """Return the device part of an export, if every field is safe to give to the runtime. Raises PoolError."""
    device = export.device
    if type(device) is not DeviceExport:
        raise PoolError(f"process {export.process_index} exports {export.tier} without a handle of device memory")
    if wrong := _wrong_fields(device, export.bound_nbytes):
        given = ", ".join(f"{name} {repr(getattr(device, name))[:80]}" for name in wrong)
        raise PoolError(
            f"the hbm export of process {export.process_index} ({export.bound_nbytes} bytes) is none of this version: "
            f"{given}; all processes of a run need the same torch and FlowTrain"
        )
    return device


def _wrong_fields(device: DeviceExport, bound_nbytes: int) -> list[str]:
    types = {field.name: field.type for field in fields(device)}  # by exact name: subclasses are refused
    if wrong := [name for name, kind in types.items() if type(getattr(device, name)).__name__ != kind]:
        return wrong
    holds = {
        "runtime": device.runtime == _RUNTIME,
        "handle": len(device.handle) in _HANDLE_NBYTES,
        "storage_nbytes": device.storage_nbytes == bound_nbytes + STAMP_NBYTES,
        "storage_offset": device.storage_offset >= 0,
        "counter_file": _COUNTER_FILE.fullmatch(device.counter_file) is not None,
        "counter_index": 0 <= device.counter_index < _COUNTERS,
        "stamp": len(device.stamp) == STAMP_NBYTES,
        "started_ticks": device.started_ticks >= 0,
    }
    return [name for name, is_right in holds.items() if not is_right]
