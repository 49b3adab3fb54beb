"""Saves checkpoints while training goes on: the training thread only copies the state, another thread writes it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from flowtrain.mempool.host import HOST_MEMORY_SHARE, host_memory
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.snapshot import HostBuffers, Snapshot
from flowtrain.training.work_spans import SpanRecorder

logger = logging.getLogger(__name__)

Write = Callable[[Path, Snapshot], str | None]
"""Writes a snapshot into a directory; collective. Returns why it failed, the same on all ranks, or None."""
Report = Callable[[int, Path, str | None], None]
"""Gets the step of a save that ended, its directory, and why it failed or None; called in the thread that wrote."""
Keep = Callable[[int, Snapshot], None]
"""Keeps the snapshot after a step in memory; collective. Called in the thread that writes."""


class CheckpointSaver:
    """Saves one rank's checkpoints, one at a time; all ranks call the same methods in the same order.

    take: takes a snapshot, into the given buffers. background: write in a thread of its own.
    record: gets the spans ``checkpoint_copy``, ``checkpoint_wait`` (training waits for the save before) and
    ``checkpoint_write``, or ``snapshot_copy`` and ``snapshot_write``.
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
        self._begin(partial(self._buffers.reserve, self._take(None).tensors))

    def save(self, step: int, directory: Path, keep: Keep | None = None, *, in_place: bool = False) -> None:
        """Save the state after ``step`` into ``directory``; waits for the save before. The state may then change.

        keep: keeps the same snapshot in memory before it is written; None: nobody.
        in_place: write the state without a copy; it must not change until ``wait`` returns.
        Raises what ended the save before, unless it was an error of the file system; that was reported.
        """
        self.wait()
        self._step = step
        buffers = None if in_place else self._buffers
        self._start(step, "checkpoint_copy", partial(self._save, step, directory, keep), buffers)

    def is_free(self) -> bool:
        """Whether no rank is writing; training must not wait for that. Then all of this rank's work has ended.

        Collective over all ranks. Raises as ``save``.
        """
        is_busy = torch.tensor([float(self._under_way is not None and not self._under_way.done())])
        dist.all_reduce(is_busy, dist.ReduceOp.MAX, group=self._group.process_group)
        if is_busy.item():
            return False
        self.wait()
        return True

    def keep(self, step: int, keep: Keep) -> None:
        """Keep the state after ``step`` in memory; call it only if ``is_free``."""
        self._start(step, "snapshot_copy", partial(self._keep, step, keep), self._buffers)

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

    def _start(self, step: int, span: str, work: Callable[[Snapshot], str | None], buffers: HostBuffers | None) -> None:
        """Take a snapshot, into ``buffers`` if there are any, and begin to work on it. span: name of the copy's."""
        started_s = time.monotonic()
        snapshot = self._take(buffers)
        self._record(span, started_s, time.monotonic(), step=step)
        self._begin(partial(work, snapshot))

    def _begin(self, work: Callable[[], str | None]) -> None:
        """Do the work, in a thread of its own if there are buffers."""
        self._under_way = Future()
        if self._buffers is None:
            self._run(work, self._under_way)
        else:
            # A daemon: a rank that fails must not wait for a collective of ranks that failed too.
            arguments = (work, self._under_way)
            threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True).start()

    def _run(self, work: Callable[[], str | None], ended: Future[str | None]) -> None:
        try:
            self._use_device()
            ended.set_result(work())
        except BaseException as error:  # the training thread raises it at its next wait
            ended.set_exception(error)

    def _save(self, step: int, directory: Path, keep: Keep | None, snapshot: Snapshot) -> str | None:
        if keep is not None:
            self._keep(step, keep, snapshot)
        started_s = time.monotonic()
        problem = self._write(directory, snapshot)
        self._record("checkpoint_write", started_s, time.monotonic(), step=step)
        self._report(step, directory, problem)
        return problem

    def _keep(self, step: int, keep: Keep, snapshot: Snapshot) -> None:
        started_s = time.monotonic()
        keep(step, snapshot)
        self._record("snapshot_write", started_s, time.monotonic(), step=step)

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
    lacking = lacking_memory(copy_nbytes, group)
    if lacking is not None and group.rank == 0:
        logger.warning(
            "checkpoint.background: auto writes checkpoints while training waits: a node's copies need %s", lacking
        )
    return lacking is None


def lacking_memory(nbytes: int, group: BackboneGroup) -> str | None:
    """Whether a node lacks host memory for what its ranks need, with the numbers; the same on all ranks.

    nbytes: what this rank needs; all of a node may take ``HOST_MEMORY_SHARE`` of its free memory. Collective over the
    checkpoint group.
    """
    # Ranks in several containers of one machine share its memory; the boot id tells machines apart.
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    every: list[tuple[str, int, int]] = [("", 0, 0)] * group.world_size
    dist.all_gather_object(every, (machine, nbytes, host_memory().available_nbytes), group=group.checkpoint_group)
    for machine in sorted({each[0] for each in every}):
        needed = sum(nbytes for where, nbytes, _ in every if where == machine)
        free = min(available for where, _, available in every if where == machine)
        if needed > HOST_MEMORY_SHARE * free:
            return f"{needed:,} bytes, more than half of the {free:,} bytes of memory that are free there"
    return None
