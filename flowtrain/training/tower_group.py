"""The processes that hold a split vision tower: the first one makes the others run every forward with it."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flowtrain.errors import ReplicaLostError, StallError
from flowtrain.training.mesh import LOOPBACK, TP_AXIS, join_process_group, waiting_for_ranks

logger = logging.getLogger(__name__)

IDLE_WAIT = timedelta(days=1)
"""An encoder rank waits this long for the next forward, then waits again; if the leader ends, the wait ends at once."""
DEATH_S = 3.0
"""Seconds after a broken connection in which to see whether the process at its other end has ended."""
GOODBYE_S = 10.0


class TowerGroup:
    """One rank of a tower's tensor parallel group, all on one node.

    The leader (rank 0) announces every forward in the store through which the ranks met, then sends its pixels to all.
    While nothing is announced, no rank is in a collective, so idle time has no limit. In a forward, waits end after
    ``stall_timeout_s``. mesh: has the one axis ``tp``.
    """

    def __init__(
        self,
        names: Sequence[str],
        rank: int,
        device: torch.device,
        *,
        port: int = 0,
        listener: socket.socket | None = None,
        start_timeout_s: float = 300.0,
        stall_timeout_s: float = 900.0,
    ) -> None:
        """Join; returns when all ranks have joined.

        names: names of the ranks' processes. port, listener: as for ``init_backbone_group``. Raises StallError if not
        all ranks join within ``start_timeout_s``, and ReplicaLostError if the leader, or a process that has joined,
        ends before.
        """
        self._names, self._rank, self._device = names, rank, device
        self._stall_timeout_s = stall_timeout_s
        self._num_forwards = 0
        started = time.monotonic()
        with waiting_for_ranks(names[rank], LOOPBACK, port, start_timeout_s):
            try:
                self._join(port, listener, start_timeout_s)
            except dist.DistNetworkError as error:
                if rank and time.monotonic() - started < start_timeout_s:  # the leader has listened: it gave the port
                    raise ReplicaLostError(f"{names[rank]} lost {names[0]} at the start") from error
                raise

    def _join(self, port: int, listener: socket.socket | None, start_timeout_s: float) -> None:
        self._store = join_process_group(
            self._rank,
            len(self._names),
            self._device,
            host=LOOPBACK,
            port=port,
            listener=listener,
            start_timeout_s=start_timeout_s,
            collective_timeout_s=self._stall_timeout_s,
        )
        self.mesh = DeviceMesh(self._device.type, torch.arange(len(self._names)), mesh_dim_names=(TP_AXIS,))
        if self._rank:
            # A separate connection: a wait on the group's connection would block the group's own requests.
            self._store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        self._store.set(f"pid/{self._rank}", str(os.getpid()))
        self._processes = dict(self._open_process(rank) for rank in range(len(self._names)) if rank != self._rank)

    def _open_process(self, rank: int) -> tuple[int, str]:
        """Descriptor and name of another rank's process; the descriptor becomes readable when the process ends."""
        name = self._names[rank]
        try:
            return os.pidfd_open(int(self._store.get(f"pid/{rank}"))), name
        except ProcessLookupError as error:
            raise ReplicaLostError(f"{self._names[self._rank]} lost {name} at the start") from error

    # --- forwards -----------------------------------------------------------------------------------------------

    def send(self, pixels: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        """Leader: let the other ranks forward these images too. Call it, and the forward, within ``forwarding``.

        pixels: of all images back to back, flat. shapes: of each image.
        """
        self._announce([list(shape) for shape in shapes])
        dist.broadcast(pixels, src=0)

    def receive(self, dtype: torch.dtype) -> tuple[Tensor, list[list[int]]] | None:
        """Other ranks: wait without limit for what is forwarded next; None when the leader dismisses the group.

        Raises ReplicaLostError if the leader has ended.
        """
        shapes = self._next_announced()
        if shapes is None:
            self._store.set(f"stopped/{self._rank}", "")
            return None
        pixels = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=self._device)
        with self.forwarding():
            dist.broadcast(pixels, src=0)
        return pixels, shapes

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Turn a failed collective inside the block into ReplicaLostError (a rank has ended) or StallError."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # from collectives, and from the tower's own faults
            if lost := self._lost(DEATH_S):
                raise ReplicaLostError(f"{self._names[self._rank]} lost {', '.join(lost)} in a forward") from error
            waited_s = time.monotonic() - started
            if waited_s >= self._stall_timeout_s:
                others = ", ".join(self._processes.values())
                raise StallError(
                    f"{self._names[self._rank]} waited {waited_s:.0f} s in a forward for {others}, which live but do "
                    f"not take part; the limit is limits.stall_timeout_s ({self._stall_timeout_s:g} s)"
                ) from error
            raise

    def _announce(self, shapes: list[list[int]] | None) -> None:
        self._store.set(f"forward/{self._num_forwards}", json.dumps(shapes))
        self._num_forwards += 1

    def _next_announced(self) -> list[list[int]] | None:
        key, read_key = f"forward/{self._num_forwards}", f"read/{self._num_forwards}"
        self._num_forwards += 1
        while True:
            try:
                self._store.wait([key], IDLE_WAIT)
                shapes: list[list[int]] | None = json.loads(self._store.get(key))
                # The last rank to read it deletes it, not the leader: on an accelerator it may run ahead of the others.
                if self._store.add(read_key, 1) == len(self._names) - 1:
                    self._store.delete_key(key)
                    self._store.delete_key(read_key)
                return shapes
            except dist.DistStoreError:
                continue
            except dist.DistNetworkError as error:
                raise ReplicaLostError(f"{self._names[self._rank]} lost {self._names[0]}") from error

    def _lost(self, wait_s: float) -> list[str]:
        """Names of ranks whose processes have ended, after a wait of at most ``wait_s``."""
        poll = select.poll()
        for descriptor in self._processes:
            poll.register(descriptor, select.POLLIN)
        return [self._processes[descriptor] for descriptor, _ in poll.poll(1000 * wait_s)]

    # --- the end ------------------------------------------------------------------------------------------------

    def dismiss(self) -> None:
        """Leader: end the other ranks' loops, and wait up to ``GOODBYE_S`` until they have left."""
        self._announce(None)
        try:
            self._store.wait([f"stopped/{rank}" for rank in range(1, len(self._names))], timedelta(seconds=GOODBYE_S))
        except dist.DistStoreError:
            logger.warning("not all of %s have stopped within %g s", ", ".join(self._processes.values()), GOODBYE_S)

    def close(self) -> None:
        """Leave the group. Do not call it after an error: the other ranks would take it for the cause."""
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes = {}
        dist.destroy_process_group()
