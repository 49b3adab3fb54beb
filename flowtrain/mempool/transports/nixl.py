"""Reads from other nodes by NIXL: one-sided, with one transfer per owner for all extents of a batch (FlowTrain 3.2)."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from flowtrain.errors import OwnerLostError, PoolError
from flowtrain.mempool.page_table import Mapping, SegmentKey
from flowtrain.mempool.transports.base import Arrival, Arrived, Transport
from flowtrain.mempool.transports.landing import LandingBuffer, LandingBuffers
from flowtrain.mempool.transports.nixl_agent import Agent, TransferError
from flowtrain.mempool.transports.nixl_batch import Batch, Peer, Share, key_of, lay_out, requests
from flowtrain.mempool.transports.nixl_export import STAMP_NBYTES, NetworkExport
from flowtrain.mempool.transports.nixl_offer import NixlOffer
from flowtrain.types.memory import SegmentExport

_SPIN_S = 20e-3
"""A waiting thread yields its core between two polls for this time, then sleeps between polls. A network that cannot
read memory itself takes in the bytes during polls."""
_POLL_S = 50e-6


class NixlTransport(Transport):
    """Reads DRAM of other nodes into registered buffers of this process, and returns views of these.

    Thread-safe. NIXL's agent is not, so one thread at a time enters it; threads wait for their transfers outside.

    name: of this process on the network, unique.
    timeout_s: longest time of one batch.

    Raises ResourceError without NIXL.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._agent = agent = Agent(f"{name}-{secrets.token_hex(4)}", serves=False)
        # Runs at the latest before the interpreter frees the memory that the agent still writes.
        self._closer = weakref.finalize(self, agent.close)
        self._offer: NixlOffer | None = None
        self._peers: dict[SegmentKey, Peer] = {}
        self._landing = LandingBuffers(lambda buffer: agent.register(buffer.address, buffer.nbytes, buffer))
        self._under_way: list[Batch] = []
        self._abandoned: list[Batch] = []
        self._dropped: deque[Batch] = deque()

    def offer(self, array: np.ndarray) -> bytes:
        """Let other processes read the own segment; as ``NixlOffer.export``."""
        with self._lock:
            self._check_open()
            if self._offer is None:
                # A second agent: a thread that answers other processes and a thread that reads would block each other.
                self._offer = NixlOffer(f"{self._name}-{secrets.token_hex(4)}")
        return self._offer.export(array)

    def view(self, source: Mapping) -> np.ndarray:
        """Return a peer's bytes as ``read`` does."""
        return self.read((source,))[0]

    def read(self, sources: Sequence[Mapping]) -> list[np.ndarray]:
        """Read all sources, with one transfer from each owner; all transfers run at once.

        Returns read-only views of a buffer, which is reused when the last view is gone. Raises OwnerLostError if an
        owner is gone, does not answer in time, or is not the process that published the segment.
        """
        return self.start(sources).wait()

    def start(self, sources: Sequence[Mapping]) -> Arrival:
        """Start a ``read``."""
        if not sources:
            return Arrived([])
        shares, starts, nbytes = lay_out(sources)
        batch = self._begin(shares, nbytes)
        # The views are created while the bytes travel.
        data = self._landing.hand_over(batch.buffer, lambda: self._let_go(batch))
        views = [data[start : start + source.nbytes] for start, source in zip(starts, sources, strict=True)]
        return _Landing(self, batch, views)

    def finish(self, batch: Batch) -> None:
        """Wait until a batch is in its buffer. Raises as ``read``."""
        self._wait(batch)
        self._check_stamps(batch)
        with self._lock:
            self._under_way.remove(batch)
            batch.has_arrived = True

    def drop(self, segment: SegmentKey) -> None:
        """Disconnect from an owner that is gone."""
        with self._lock:
            self._forget(segment)

    def close(self) -> None:
        """Leave the network. Views stay valid."""
        with self._lock:
            if not self._closer.alive:
                return
            for batch in [*self._under_way, *self._abandoned]:
                for share in batch.shares.values():
                    self._release(share)
            for segment in list(self._peers):
                self._forget(segment)
            self._closer()
            if self._offer is not None:
                self._offer.close()

    # --- one batch ----------------------------------------------------------------------------------------------

    def _begin(self, shares: dict[SegmentKey, Share], nbytes: int) -> Batch:
        with self._lock:
            self._check_open()
            self._reap()
            batch = Batch(self._landing.take(nbytes))
            try:
                for key, share in shares.items():
                    batch.shares[key] = share
                    self._post(batch.buffer, share)
            except BaseException:
                self._abandoned.append(batch)
                raise
            self._under_way.append(batch)
        return batch

    def _let_go(self, batch: Batch) -> None:
        """Note that a batch has no views any more. Takes no lock: garbage collection calls it anywhere."""
        if batch.has_arrived:
            self._landing.give_back(batch.buffer)
        else:
            self._dropped.append(batch)

    def _post(self, buffer: LandingBuffer, share: Share) -> None:
        """Start one owner's transfer. Raises OwnerLostError."""
        try:
            share.peer = peer = self._connect(share.segment)
            here, there = requests(share, peer.export, buffer.address)
            share.handle = self._agent.read(peer.name, here, there)
        except TransferError as error:
            raise self._lost(share, f"{error}") from error

    def _connect(self, segment: SegmentExport) -> Peer:
        peer = self._peers.get(key_of(segment))
        if segment.network is None:
            raise PoolError(
                f"process {segment.process_index} on node {segment.node_id} offers no segment on the network; all "
                "processes of a run that spans nodes need pool.network: nixl"
            )
        if peer is None or peer.wire != segment.network:
            export = NetworkExport.from_bytes(segment.network)
            peer = Peer(self._agent.connect(export.metadata), export, segment.network)
            self._peers[key_of(segment)] = peer
        return peer

    def _wait(self, batch: Batch) -> None:
        """Wait for all transfers. Raises OwnerLostError when one breaks off, or at the limit."""
        started = time.monotonic()
        waiting = list(batch.shares.values())
        while True:
            with self._lock:
                self._check_open()
                waiting = [share for share in waiting if not self._is_done(share)]
            if not waiting:
                return
            waited_s = time.monotonic() - started
            if waited_s >= self._timeout_s:
                nbytes = sum(length for share in waiting for _, length, _ in share.runs)
                raise OwnerLostError(
                    f"{', '.join(_describe(share.segment) for share in waiting)}: {nbytes} bytes did not arrive over "
                    f"the network within pool.transfer_timeout_s ({self._timeout_s:g} s); the process hangs, its "
                    "node is gone, or the link is slower than that"
                )
            if waited_s > _SPIN_S:
                time.sleep(_POLL_S)
            else:
                os.sched_yield()

    def _is_done(self, share: Share) -> bool:
        try:
            done = share.handle is None or self._agent.is_done(share.handle)
        except TransferError as error:
            raise self._lost(share, str(error)) from error
        if done:
            self._release(share)
        return done

    def _check_stamps(self, batch: Batch) -> None:
        for key, share in batch.shares.items():
            assert share.peer is not None
            if batch.buffer.bytes_at(share.stamp_start, STAMP_NBYTES) != share.peer.export.stamp:
                with self._lock:
                    self._forget(key)
                raise OwnerLostError(
                    f"{_describe(share.segment)} is gone: another process answers at its network address; ask the "
                    "coordinator again by position"
                )

    def _lost(self, share: Share, reason: str) -> OwnerLostError:
        """Disconnect from an owner whose transfer failed; returns the error to raise."""
        self._release(share)
        self._forget(key_of(share.segment))
        return OwnerLostError(
            f"{_describe(share.segment)} does not answer on the network ({reason}): it is gone, or no link leads "
            "there; ask the coordinator again by position"
        )

    def _forget(self, segment: SegmentKey) -> None:
        peer = self._peers.pop(segment, None)
        if peer is not None:
            self._agent.disconnect(peer.name)

    def _reap(self) -> None:
        """Take back the buffers of unread batches, each when no transfer can write into it any more."""
        while self._dropped:
            batch = self._dropped.popleft()
            self._under_way.remove(batch)
            self._abandoned.append(batch)
        left = []
        for batch in self._abandoned:
            for share in batch.shares.values():
                self._settle(share)
            if all(share.handle is None for share in batch.shares.values()):
                self._landing.give_back(batch.buffer)
            else:
                left.append(batch)
        self._abandoned = left

    def _settle(self, share: Share) -> None:
        """Release the transfer of an abandoned share, if it has ended."""
        if share.handle is None:
            return
        try:
            ended = self._agent.is_done(share.handle)
        except TransferError:
            ended = True  # some of its runs may still be running: only a release shows it
        if ended:
            self._release(share)

    def _release(self, share: Share) -> None:
        if share.handle is not None and self._agent.release(share.handle):
            share.handle = None

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise PoolError("this transport is closed")


class _Landing(Arrival):
    """A batch in progress, and the views of its buffer, valid once it has arrived."""

    def __init__(self, transport: NixlTransport, batch: Batch, views: list[np.ndarray]) -> None:
        self._transport = transport
        self._batch = batch
        self._views = views

    def wait(self) -> list[np.ndarray]:
        """Wait for the transfers; returns views of the buffer. Raises as ``NixlTransport.read``."""
        self._transport.finish(self._batch)
        views, self._views = self._views, []
        return views


def _describe(export: SegmentExport) -> str:
    return f"the segment of process {export.process_index} (pid {export.pid} on node {export.node_id})"
