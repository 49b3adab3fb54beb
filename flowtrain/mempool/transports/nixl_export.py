"""What a process publishes for reads of its segment over the network: the bytes of ``SegmentExport.network``."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flowtrain.errors import AddressError, PoolError

STAMP_NBYTES = 16

_HEADER = struct.Struct(f"<4s{STAMP_NBYTES}sQI")
_PIECE = struct.Struct("<QQ")
_MAGIC = b"ftn1"


@dataclass(frozen=True, slots=True)
class Piece:
    """Registered memory: ``nbytes`` bytes of the segment that lie at ``address`` in the owner."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class NetworkExport:
    """A segment as its owner registered it."""

    stamp: bytes
    """Random bytes of this process. Every transfer reads them too, to notice another process at the same address."""
    stamp_address: int
    """Where the stamp lies in the owner."""
    pieces: tuple[Piece, ...]
    """The segment from its start, one piece per growth."""
    metadata: bytes
    """NIXL's own."""

    def to_bytes(self) -> bytes:
        """Return the wire form."""
        header = _HEADER.pack(_MAGIC, self.stamp, self.stamp_address, len(self.pieces))
        return header + b"".join(_PIECE.pack(piece.address, piece.nbytes) for piece in self.pieces) + self.metadata

    @classmethod
    def from_bytes(cls, data: bytes) -> NetworkExport:
        """Read the wire form. Raises PoolError for other bytes."""
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise PoolError(f"{len(data)} bytes that start with {data[:4]!r} are no network export of this version")
        _, stamp, stamp_address, count = _HEADER.unpack_from(data)
        end = _HEADER.size + count * _PIECE.size
        pieces = tuple(Piece(*fields) for fields in _PIECE.iter_unpack(data[_HEADER.size : end]))
        return cls(stamp, stamp_address, pieces, data[end:])

    def locate(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield (address in the owner, nbytes) of a run of the segment, a pair per piece. Raises AddressError."""
        start, end = 0, offset + nbytes
        for piece in self.pieces:
            low, high = max(offset, start), min(end, start + piece.nbytes)
            if low < high:
                yield piece.address + low - start, high - low
            start += piece.nbytes
        if end > start:
            raise AddressError(f"bytes up to offset {end} were asked of a segment with {start} bytes on the network")
