"""Hands the bytes of a segment to peers over a Unix socket (``pool.exchange: point_to_point``)."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np

from flowtrain.errors import OwnerLostError
from flowtrain.types.memory import SocketOffer

logger = logging.getLogger(__name__)

TOKEN_NBYTES = 32
COUNT = struct.Struct("<Q")
"""A request begins with its number of runs; then offset and length of each follow as int64."""
ACCEPTED, REFUSED = b"\1", b"\0"
"""The first byte of an answer; the bytes of all runs follow where it accepts."""
MAX_RUNS = 1 << 20
"""Runs of one request."""
_CREDENTIALS = struct.Struct("3i")
_BUFFERS_PER_CALL = 256
_RETRY_S = 0.2
"""Pause after a connection that could not be taken."""


class SocketServer:
    """Answers requests for a segment's bytes, each connection in a thread of its own.

    The socket has an abstract name, so nothing is left when the process is killed. Such a name has no permissions.
    So both ends check that the other is a process of the same user, and a reader must present the token.

    memory: returns the segment's bytes, uint8.
    """

    def __init__(self, memory: Callable[[], np.ndarray]) -> None:
        self._memory = memory
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"flowtrain-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self.offer = SocketOffer(name, secrets.token_bytes(TOKEN_NBYTES))
        """What a reader needs to connect."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self._acceptor = threading.Thread(target=self._accept, name="exchange", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for each in (self._listener, *self._connections):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                with self._lock:
                    if self._is_closed:
                        return
                logger.warning("a reader of this segment must wait: %s", error)  # too many files are open, mostly
                time.sleep(_RETRY_S)
                continue
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="exchange", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            with suppress(OSError, EOFError):
                if peer_of(connection)[1] == os.geteuid() and self._is_invited(connection):
                    while self._answer(connection):
                        pass
            with self._lock:
                self._connections.discard(connection)

    def _is_invited(self, connection: socket.socket) -> bool:
        return hmac.compare_digest(receive(connection, TOKEN_NBYTES), self.offer.token)

    def _answer(self, connection: socket.socket) -> bool:
        """Answer a request; returns whether another one may follow."""
        (count,) = COUNT.unpack(receive(connection, COUNT.size))
        if count > MAX_RUNS:
            return False
        runs = np.frombuffer(receive(connection, 16 * count), "<i8").reshape(-1, 2)
        memory = self._memory()
        offsets, lengths = runs.T
        if (offsets < 0).any() or (lengths < 0).any() or (lengths > len(memory) - offsets).any():
            connection.sendall(REFUSED)
            return False
        connection.sendall(ACCEPTED)
        send(connection, (memory[offset : offset + nbytes].data for offset, nbytes in runs.tolist()))
        return True


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, user id) of the process at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def receive(connection: socket.socket, nbytes: int) -> bytearray:
    """Return exactly so many bytes. Raises EOFError if the connection ends before."""
    data = bytearray(nbytes)
    receive_into(connection, [memoryview(data)])
    return data


def receive_into(connection: socket.socket, buffers: Iterable[memoryview]) -> None:
    """Fill buffers one after another; raises as ``receive``."""
    for left in _groups(buffers):
        while left:
            count = connection.recvmsg_into(left)[0]
            if not count:
                raise EOFError("the connection ended")
            left = _after(left, count)


def send(connection: socket.socket, buffers: Iterable[memoryview]) -> None:
    """Send buffers one after another."""
    for left in _groups(buffers):
        while left:
            left = _after(left, connection.sendmsg(left))


def _groups(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield as many buffers at a time as one call takes, without empty ones."""
    filled = [buffer for buffer in buffers if len(buffer)]
    for start in range(0, len(filled), _BUFFERS_PER_CALL):
        yield filled[start : start + _BUFFERS_PER_CALL]


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def connect(offer: SocketOffer, pid: int, timeout_s: float) -> socket.socket:
    """Connect to the server of a process. Raises OwnerLostError if it is gone, or if another process has its name."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{offer.name}")
        found = peer_of(connection)
        if found != (pid, os.geteuid()):
            raise OwnerLostError(
                f"process {pid} of user {os.geteuid()} offered the socket {offer.name}, and process {found[0]} of user "
                f"{found[1]} has it now; ask the coordinator again by position"
            )
        connection.sendall(offer.token)
    except BaseException:
        connection.close()
        raise
    return connection
