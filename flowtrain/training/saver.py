"""Saves checkpoints while training goes on: the training thread only copies the state, another thread writes it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from flowtrain.mempool.host import host_memory
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.snapshot import HostBuffers, Snapshot
from flowtrain.training.work_spans import SpanRecorder

logger = logging.getLogger(__name__)

Write = Callable[[Path, Snapshot], str | None]
"""Writes a snapshot into a directory; collective. Returns why it failed, the same on all ranks, or None."""
Report = Callable[[int, Path, str | None], None]
"""Gets the step of a save that ended, its directory, and why it failed or None; called in the thread that wrote."""

HOST_MEMORY_SHARE = 0.5
"""``checkpoint.background: auto`` writes in the background if all copies on a node fit into this share of its free
memory; the rest is for what the pool and the data will still take."""


class CheckpointSaver:
    """Saves one rank's checkpoints, one at a time; all ranks call the same methods in the same order.

    take: takes a snapshot, into the given buffers. background: write in a thread of its own.
    record: gets the spans ``checkpoint_copy``, ``checkpoint_wait`` (training waits for the save before) and
    ``checkpoint_write``.
    """

    def __init__(
        self,
        group: BackboneGroup,
        take: Callable[[HostBuffers | None], Snapshot],
        write: Write,
        report: Report,
        record: SpanRecorder,
        *,
        background: bool,
        saved_step: int,
    ) -> None:
        self._group, self._take, self._write, self._report, self._record = group, take, write, report, record
        self._buffers = HostBuffers(group.device) if background else None
        self._under_way: Future[str | None] | None = None
        self._is_prepared = not background
        # The device may come without a number; a new thread would use the first one.
        self._device_index = None if group.device.type == "cpu" else torch.accelerator.current_device_index()
        self._step = self._saved_step = saved_step

    @property
    def step(self) -> int:
        """The last step that is saved or is being saved; a save that is known to have failed does not count."""
        return self._step

    def prepare(self) -> None:
        """Get the memory of the copies, once, in another thread; call it when the optimizer has its state.

        Without it the first save takes longer.
        """
        if self._is_prepared or self._buffers is None:
            return
        self._is_prepared = True
        self.wait()
        tensors, self._under_way = self._take(None).tensors, Future()
        arguments = (self._buffers, tensors, self._under_way)
        threading.Thread(target=self._reserve, args=arguments, name="checkpoint", daemon=True).start()

    def save(self, step: int, directory: Path) -> None:
        """Save the state after ``step`` into ``directory``; waits for the save before. The state may then change.

        Raises what ended the save before, unless it was an error of the file system; that was reported.
        """
        self.wait()
        started_s = time.monotonic()
        snapshot = self._take(self._buffers)
        self._record("checkpoint_copy", started_s, time.monotonic(), step=step)
        self._step, self._under_way = step, Future()
        arguments = (step, directory, snapshot, self._under_way)
        if self._buffers is None:
            self._run(*arguments)
        else:
            # A daemon: a rank that fails must not wait for a collective of ranks that failed too.
            threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True).start()

    def wait(self) -> str | None:
        """Wait for the save that is under way; returns why the last save failed, or None. Raises as ``save``."""
        if self._under_way is None:
            return None
        started_s, waits = time.monotonic(), not self._under_way.done()
        problem = self._under_way.result()
        if waits:
            self._record("checkpoint_wait", started_s, time.monotonic(), step=self._step)
        self._under_way = None
        if problem is None:
            self._saved_step = self._step
        self._step = self._saved_step
        return problem

    def _run(self, step: int, directory: Path, snapshot: Snapshot, ended: Future[str | None]) -> None:
        try:
            self._use_device()
            started_s = time.monotonic()
            problem = self._write(directory, snapshot)
            self._record("checkpoint_write", started_s, time.monotonic(), step=step)
            self._report(step, directory, problem)
            ended.set_result(problem)
        except BaseException as error:  # the training thread raises it at its next wait
            ended.set_exception(error)

    def _reserve(self, buffers: HostBuffers, tensors: Mapping[str, torch.Tensor], ended: Future[str | None]) -> None:
        try:
            self._use_device()
            buffers.reserve(tensors)
            ended.set_result(None)
        except BaseException as error:  # the training thread raises it at its next wait
            ended.set_exception(error)

    def _use_device(self) -> None:
        """Let the calling thread use the training thread's accelerator, if there is one."""
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)


def writes_in_background(setting: Literal["auto"] | bool, copy_nbytes: int, group: BackboneGroup) -> bool:
    """Whether to save in the background; the same on all ranks. Collective over the checkpoint group for ``auto``.

    copy_nbytes: host memory that this rank's copies take.
    """
    if setting != "auto":
        return setting
    # Ranks in several containers of one machine share its memory; the boot id tells machines apart.
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    every: list[tuple[str, int, int]] = [("", 0, 0)] * group.world_size
    dist.all_gather_object(every, (machine, copy_nbytes, host_memory().available_nbytes), group=group.checkpoint_group)
    for machine in sorted({each[0] for each in every}):
        needed = sum(nbytes for where, nbytes, _ in every if where == machine)
        free = min(available for where, _, available in every if where == machine)
        if needed > HOST_MEMORY_SHARE * free:
            if group.rank == 0:
                logger.warning(
                    "checkpoint.background: auto writes checkpoints while training waits: a node's copies need %s "
                    "bytes, more than half of the %s bytes of memory that are free there",
                    *(f"{needed:,}", f"{free:,}"),
                )
            return False
    return True
