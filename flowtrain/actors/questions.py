"""Questions to an actor on the same node, over a Unix socket: they take an eighth of the processor time of Ray's calls.

A question and its answer are packed bytes; a frame is a byte of state, the length and the bytes. As at the sockets of
the pool, the name is abstract, both ends check that the other is a process of the same user, and the asker presents a
token before anything is unpacked.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import pickle
import secrets
import socket
import struct
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress

from flowtrain.mempool.transports.socket_server import TOKEN_NBYTES, peer_of, receive
from flowtrain.types.memory import SocketOffer

logger = logging.getLogger(__name__)

_FRAME = struct.Struct("<BQ")
_ANSWERED, _FAILED = 0, 1
_GREETING_S = 10.0
"""Time for a connection to present the token."""
_MAX_NBYTES = 1 << 32


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text; the cause of the error that arrives here."""


class FailedQuestion(Exception):
    """The other process raised ``error``. traceback: of it, as text."""

    def __init__(self, error: Exception, traceback: str) -> None:
        super().__init__(error, traceback)
        self.error, self.traceback = error, traceback


class QuestionServer:
    """Answers questions on the running event loop, any number at a time.

    answer: takes a packed question and returns the packed answer.
    """

    def __init__(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._answer = answer
        self._offer: SocketOffer | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> SocketOffer:
        """Listen, unless that was done before; returns what an asker needs to connect."""
        async with self._opening:
            if self._offer is None:
                offer = SocketOffer(f"flowtrain-{secrets.token_hex(16)}", secrets.token_bytes(TOKEN_NBYTES))
                self._server = await asyncio.start_unix_server(self._serve, f"\0{offer.name}", backlog=1024)
                self._offer = offer
        return self._offer

    async def close(self) -> None:
        """Listen no longer."""
        if self._offer is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, EOFError):
            if not await self._is_invited(reader, writer):
                return
            while True:
                _, nbytes = _FRAME.unpack(await reader.readexactly(_FRAME.size))
                if nbytes > _MAX_NBYTES:
                    return
                state, answer = await self._answered(await reader.readexactly(nbytes))
                writer.write(_FRAME.pack(state, len(answer)) + answer)
                await writer.drain()

    async def _is_invited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        assert self._offer is not None
        if peer_of(writer.get_extra_info("socket"))[1] != os.geteuid():
            return False
        token = await asyncio.wait_for(reader.readexactly(TOKEN_NBYTES), _GREETING_S)
        return hmac.compare_digest(token, self._offer.token)

    async def _answered(self, question: bytes) -> tuple[int, bytes]:
        try:
            return _ANSWERED, await self._answer(question)
        except Exception as error:
            return _FAILED, _packed_error(error)


class Asker:
    """Asks a ``QuestionServer``; each thread has a connection of its own."""

    def __init__(self, offer: SocketOffer, timeout_s: float) -> None:
        """timeout_s: longest wait for an answer. Raises OSError if nothing listens there."""
        self._offer, self._timeout_s = offer, timeout_s
        self._of_thread = threading.local()
        self._connection()

    def ask(self, question: bytes) -> bytes:
        """Return the answer.

        Raises FailedQuestion if the other process raised an error, TimeoutError without an answer in time, EOFError or
        ConnectionError if it is gone.
        """
        connection = self._connection()
        try:
            connection.sendall(_FRAME.pack(_ANSWERED, len(question)) + question)
            state, nbytes = _FRAME.unpack(receive(connection, _FRAME.size))
            answer = bytes(receive(connection, nbytes))
        except BaseException:  # an answer that comes later must not be taken for that of the next question
            del self._of_thread.connection
            connection.close()
            raise
        if state == _FAILED:
            raise FailedQuestion(*pickle.loads(answer))
        return answer

    def _connection(self) -> socket.socket:
        found: socket.socket | None = getattr(self._of_thread, "connection", None)
        if found is None:
            found = self._of_thread.connection = self._connected()
        return found

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._timeout_s)
            connection.connect(f"\0{self._offer.name}")
            if peer_of(connection)[1] != os.geteuid():
                raise ConnectionRefusedError(f"the socket {self._offer.name} belongs to another user")
            connection.sendall(self._offer.token)
        except BaseException:
            connection.close()
            raise
        return connection


def _packed_error(error: Exception) -> bytes:
    where = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps((error, where))
        pickle.loads(packed)  # some errors are packed well and cannot be made again
        return packed
    except Exception:
        return pickle.dumps((RuntimeError(repr(error)), where))
