"""Receives the bytes of same-node peers over private sockets, without shared memory (an ablation)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from flowtrain.errors import OwnerLostError, PoolError
from flowtrain.mempool.page_table import Mapping, SegmentKey
from flowtrain.mempool.transports.base import Transport
from flowtrain.mempool.transports.socket_server import COUNT, REFUSED, connect, receive, receive_into
from flowtrain.types.memory import SegmentExport, Tier


class PointToPointTransport(Transport):
    """Asks owners for bytes, and receives them into the reader's own memory: one request an owner and batch.

    timeout_s: longest wait for an owner that sends nothing.
    """

    name: ClassVar[str] = "point_to_point"

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}  # by process index

    def view(self, source: Mapping) -> None:
        """There are no views: the bytes are in no memory that this process maps."""

    def read(self, sources: Sequence[Mapping]) -> list[np.ndarray]:
        """Return copies, read-only."""
        data = [np.empty(source.nbytes, np.uint8) for source in sources]
        self.scatter(sources, data)
        for each in data:
            each.flags.writeable = False
        return data

    def scatter(self, sources: Sequence[Mapping], destinations: Sequence[np.ndarray]) -> None:
        """See ``Transport``. Raises OwnerLostError also if an owner ends in the middle, or sends nothing for long."""
        by_owner: dict[int, list[int]] = {}
        for index, source in enumerate(sources):
            by_owner.setdefault(source.export.process_index, []).append(index)
        with self._lock, self._dropping_unread(by_owner):
            for indices in by_owner.values():  # all owners work at the same time
                self._request([sources[index] for index in indices])
            for indices in by_owner.values():
                self._receive(sources[indices[0]].export, [destinations[index] for index in indices])

    def drop(self, segment: SegmentKey) -> None:
        """Let go of the connection to a process that is gone."""
        tier, process_index = segment
        with self._lock:
            if tier is Tier.DRAM and process_index in self._connections:
                self._connections.pop(process_index).close()

    def close(self) -> None:
        """Let go of all connections."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _request(self, sources: Sequence[Mapping]) -> None:
        export = sources[0].export
        runs = np.array([(source.offset, source.nbytes) for source in sources], "<i8")
        with _losing(export, "the request"):
            self._connection(export).sendall(COUNT.pack(len(sources)) + runs.tobytes())

    def _receive(self, export: SegmentExport, destinations: Sequence[np.ndarray]) -> None:
        nbytes = sum(map(len, destinations))
        with _losing(export, f"{nbytes} bytes"):
            connection = self._connections[export.process_index]
            if receive(connection, 1) == REFUSED:
                raise PoolError(f"process {export.process_index} refused a request for {nbytes} bytes")
            receive_into(connection, (each.data for each in destinations))

    def _connection(self, export: SegmentExport) -> socket.socket:
        index = export.process_index
        if index not in self._connections:
            assert export.socket is not None, "the reader chooses this transport by the offer"
            self._connections[index] = connect(export.socket, export.pid, self._timeout_s)
        return self._connections[index]

    @contextmanager
    def _dropping_unread(self, owners: dict[int, list[int]]) -> Iterator[None]:
        """After an error, close the connections on which an answer may be under way."""
        try:
            yield
        except BaseException:
            for owner in owners:
                if owner in self._connections:
                    self._connections.pop(owner).close()
            raise


@contextmanager
def _losing(export: SegmentExport, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise OwnerLostError(
            f"process {export.process_index} (pid {export.pid} on node {export.node_id}) is gone or did not answer "
            f"within pool.transfer_timeout_s: {what} was not transferred ({type(error).__name__}: {error}); ask the "
            "coordinator again by position"
        ) from error
