"""A file system under ``counted://`` that adds up the bytes that are read from it, over all processes of a run.

It serves local files as a remote file system does: ranges are fetched through fsspec's own read-ahead cache, which the
opener chooses (``cache_type``), and there is no mmap. Every fetched byte counts, whether its reader wanted it or not.

A process knows the protocol by fsspec's entry points: ``counting`` puts a directory with the metadata of a small
distribution, and this file's directory, on PYTHONPATH. Processes that are spawned later inherit it, Ray's workers too.
Each process writes its total to a file of its own, which stays when it is killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

PROTOCOL = "counted"
DIRECTORY = "FLOWTRAIN_COUNTED"
"""Environment variable: where processes write their totals."""
_IMPLEMENTATION = "_feeding_counted:CountedFileSystem"


class _Total:
    """Fetched bytes and fetches of this process, in a file that others can read at any time."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        descriptor, _ = tempfile.mkstemp(prefix=f"{self._pid}-", dir=os.environ[DIRECTORY])
        os.truncate(descriptor, 16)
        self._values = memoryview(mmap.mmap(descriptor, 16)).cast("Q")
        os.close(descriptor)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._values[0] += nbytes
            self._values[1] += 1

    @property
    def is_own(self) -> bool:
        """False in a child process that was forked after the first read."""
        return self._pid == os.getpid()


class CountedFileSystem(LocalFileSystem):
    """Local files as ``counted:///path``. It only reads."""

    protocol = PROTOCOL
    local_file = False
    _total: _Total | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            path = path.removeprefix(f"{PROTOCOL}://")
        return LocalFileSystem._strip_protocol(path)

    def unstrip_protocol(self, name: str) -> str:
        return f"{PROTOCOL}://{self._strip_protocol(name)}"

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> CountedFile:
        assert mode == "rb", f"{path}: the counted file system only reads"
        return CountedFile(self, path, mode, block_size or "default", **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Fetch a range with one request, as object stores do."""
        size = self.info(path)["size"]
        first, last = (size + place if place is not None and place < 0 else place for place in (start, end))
        return self.fetch(path, first or 0, size if last is None else min(last, size))

    def get_file(self, rpath: str, lpath: Any, *args: Any, **kwargs: Any) -> None:
        """Copy a file out of the file system."""
        Path(lpath).write_bytes(self.cat_file(rpath))

    @classmethod
    def fetch(cls, path: str, start: int, end: int) -> bytes:
        """Read a range, and count it."""
        if CountedFileSystem._total is None or not CountedFileSystem._total.is_own:
            CountedFileSystem._total = _Total()
        with open(cls._strip_protocol(path), "rb", buffering=0) as file:
            pieces, left = [], end - start
            file.seek(start)
            while left > 0 and (piece := file.read(left)):
                pieces.append(piece)
                left -= len(piece)
        found = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        CountedFileSystem._total.add(len(found))
        return found


class CountedFile(AbstractBufferedFile):
    """An open file, whose cache fetches ranges."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return CountedFileSystem.fetch(self.path, start, end)


class Counter:
    """The totals of all processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> tuple[int, int]:
        """Fetched bytes and fetches so far."""
        totals = [memoryview(path.read_bytes()).cast("Q") for path in self._directory.iterdir()]
        return sum(total[0] for total in totals), sum(total[1] for total in totals)

    @property
    def num_processes(self) -> int:
        """Processes that have read anything."""
        return len(list(self._directory.iterdir()))


def counted(path: Path) -> str:
    """The URL of a local path."""
    return f"{PROTOCOL}://{path.resolve()}"


@contextmanager
def counting() -> Iterator[Counter]:
    """Make ``counted://`` known to this process and to those that it starts during the block."""
    with tempfile.TemporaryDirectory() as root:
        totals, metadata = Path(root) / "totals", Path(root) / "path" / "flowtrain_counted-1.dist-info"
        totals.mkdir()
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flowtrain-counted\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(f"[fsspec.specs]\n{PROTOCOL} = {_IMPLEMENTATION}\n")
        path = [str(metadata.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        before = {name: os.environ.get(name) for name in ("PYTHONPATH", DIRECTORY)}
        os.environ |= {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep), DIRECTORY: str(totals)}
        fsspec.register_implementation(PROTOCOL, sys.modules[__name__].CountedFileSystem, clobber=True)
        try:
            yield Counter(totals)
        finally:
            CountedFileSystem._total = None
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
