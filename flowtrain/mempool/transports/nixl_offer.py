"""The giving half of the NIXL transport: an agent that answers reads of the own segment."""

from __future__ import annotations

import secrets
import threading
import weakref

import numpy as np

from flowtrain.errors import PoolError
from flowtrain.mempool.transports.nixl_agent import Agent
from flowtrain.mempool.transports.nixl_export import STAMP_NBYTES, NetworkExport, Piece


class NixlOffer:
    """The own segment on the network. Thread-safe. name: as of an ``Agent``."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._agent = agent = Agent(name, serves=True)
        # Runs at the latest before the interpreter frees the memory that the agent still serves.
        self._closer = weakref.finalize(self, agent.close)
        self._stamp = np.frombuffer(secrets.token_bytes(STAMP_NBYTES), np.uint8).copy()
        agent.register(self._stamp.ctypes.data, STAMP_NBYTES, self._stamp)
        self._pieces: list[Piece] = []
        self._export = b""

    def export(self, array: np.ndarray) -> bytes:
        """Register the segment, or the bytes that it grew by. Returns ``SegmentExport.network``.

        array: all its bytes, uint8. After a growth it is a longer array that starts with the same memory.
        """
        with self._lock:
            if not self._closer.alive:
                raise PoolError("this transport is closed")
            known = sum(piece.nbytes for piece in self._pieces)
            if len(array) > known:
                piece = Piece(array.ctypes.data + known, len(array) - known)
                self._agent.register(piece.address, piece.nbytes, array)
                self._pieces.append(piece)
                stamp_address = self._stamp.ctypes.data
                memory = [(piece.address, piece.nbytes) for piece in self._pieces]
                metadata = self._agent.metadata([(stamp_address, STAMP_NBYTES), *memory])
                export = NetworkExport(self._stamp.tobytes(), stamp_address, tuple(self._pieces), metadata)
                self._export = export.to_bytes()
            return self._export

    def close(self) -> None:
        """Leave the network."""
        with self._lock:
            self._closer()
