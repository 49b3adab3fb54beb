"""Sizes and checksums of a checkpoint's files. No torch.

CRC-32: the fastest check of the standard library (1.6 GB/s on a core where SHA-256 has 0.4); it finds every flipped bit
and every damaged run of up to 32 bits. It is no protection against somebody who changes files on purpose.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SUMS_FILE = "checksums.json"
_CHUNK_NBYTES = 1 << 20
"""Small, and read in place: glibc keeps what a thread freed, in one of up to eight arenas a core."""
_MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file must hold."""

    nbytes: int
    crc32: str | None
    """Eight hexadecimal digits; None in checkpoints of schema 1."""

    def difference(self, path: Path) -> str | None:
        """Why a file is not this one, with both values; None if it is. Reads the file if the checksum is known."""
        found = path.stat().st_size if path.is_file() else None
        if found != self.nbytes:
            has = "no file" if found is None else f"{found} bytes"
            return f"{path.name} has {has} where {self.nbytes} bytes were written"
        if self.crc32 is not None and (crc32 := sum_of(path).crc32) != self.crc32:
            return f"{path.name} has CRC-32 {crc32} where {self.crc32} was written: it was damaged on the disk"
        return None


def sum_of(path: Path) -> FileSum:
    """Read a file and return its size and checksum."""
    nbytes = crc32 = 0
    chunk = memoryview(bytearray(_CHUNK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            nbytes += count
            crc32 = zlib.crc32(chunk[:count], crc32)  # lets other threads run
    return FileSum(nbytes, f"{crc32:08x}")


def sums_of(paths: Iterable[Path]) -> dict[str, FileSum]:
    """Sums of files by their names, read by several threads."""
    paths = list(paths)
    with ThreadPoolExecutor(_num_threads()) as pool:
        return dict(zip((path.name for path in paths), pool.map(sum_of, paths), strict=True))


def first_difference(directory: Path, files: Mapping[str, FileSum]) -> str | None:
    """The first file that differs from its sum, in words; None if none does. Several threads read."""
    with ThreadPoolExecutor(_num_threads()) as pool:
        found = pool.map(lambda name: files[name].difference(directory / name), files)
        return next((difference for difference in found if difference is not None), None)


def write_sums(directory: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the sums of what all ranks wrote, for the commit."""
    write_durably(directory / SUMS_FILE, json.dumps({name: asdict(each) for name, each in sums.items()}))


def read_sums(directory: Path) -> dict[str, FileSum]:
    """What `write_sums` wrote; empty if there is no such file."""
    path = directory / SUMS_FILE
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: FileSum(**each) for name, each in values.items()}


def write_durably(path: Path, text: str) -> None:
    """Write a file that a crash after the return leaves whole."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _num_threads() -> int:
    return min(_MAX_THREADS, 2 * (os.cpu_count() or 1))
