"""The DRAM tier on one node: segments in anonymous shared memory, read by peers without a copy.

A segment is a memfd that peers open through ``/proc/<pid>/fd/<fd>``. So no file can be left over in ``/dev/shm``, and
the pages are freed with the last process that maps them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import weakref
from functools import partial

import numpy as np

from flowtrain.errors import OwnerLostError, ResourceError
from flowtrain.mempool.gva import AddressSpace
from flowtrain.mempool.memory_file import open_memory
from flowtrain.mempool.tiers import virtual_memory
from flowtrain.mempool.tiers.virtual_memory import Pages
from flowtrain.types.memory import MemoryFile, SegmentExport

logger = logging.getLogger(__name__)

_TOUCH_NBYTES = 8 << 20
_MAX_NAME = 240


def segment_name(run_id: str, process_index: int) -> str:
    """Return the memfd's name, unique if ``run_id`` is; ``/proc/<pid>/maps`` and ``/proc/<pid>/fd`` show it."""
    return f"flowtrain-{run_id}-{process_index}"


class DramSegment:
    """The shared memory that this process gives to the pool: writable here, read-only for peers.

    A background thread touches new pages, since a first touch is slow. It joins them into huge pages if the kernel can,
    and then locks them with ``pages``. With ``is_sparse`` it does not: pages take memory when they are first used.

    run_id: unique to the run.
    process_index: of this process.
    nbytes: bytes bound at first.
    pages: locks the pages; None: they are not locked.

    Raises ResourceError if the machine refuses the memory.
    """

    def __init__(
        self, run_id: str, process_index: int, nbytes: int, pages: Pages | None = None, is_sparse: bool = False
    ) -> None:
        name = segment_name(run_id, process_index)
        assert len(name) <= _MAX_NAME, f"run id of {len(run_id)} characters is too long for a memfd's name"
        self._name = name
        self._pages = pages
        self._is_sparse = is_sparse
        self._closing = threading.Event()
        self._touchers: list[threading.Thread] = []
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # So a reader's mapping never loses bytes, which would be a SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._array = self._bind(0, nbytes)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def fd(self) -> int:
        """Descriptor that peers open; valid until ``close``."""
        return self._fd

    @property
    def array(self) -> np.ndarray:
        """All bound bytes, uint8, writable. A view of the array keeps the memory mapped, also after ``close``."""
        return self._array

    def grow(self, nbytes: int) -> None:
        """Bind more memory, up to ``nbytes`` in all. Old views stay valid; ``array`` is then a longer array."""
        self._array = self._bind(len(self._array), nbytes)

    def close(self) -> None:
        """Stop offering the memory to peers. Peers that map it keep it."""
        if self._closing.is_set():
            return
        self._closing.set()
        for toucher in self._touchers:
            toucher.join()
        if self._pages is not None:
            self._pages.unlock(self._array.ctypes.data)
        os.close(self._fd)
        self._array = np.empty(0, np.uint8)

    def _bind(self, start: int, nbytes: int) -> np.ndarray:
        try:
            os.ftruncate(self._fd, nbytes)
            address = virtual_memory.map_file(self._fd, nbytes, writable=True)
        except OSError as error:
            raise ResourceError(f"{self._name}: cannot bind {nbytes} bytes of shared memory: {error}") from error
        array = virtual_memory.array_at(address, nbytes, writable=True, on_release=partial(_unmap, self._pages))
        if not self._is_sparse:
            toucher = threading.Thread(
                target=self._touch, args=(array, address, start), name=f"touch-{self._name}", daemon=True
            )
            self._touchers.append(toucher)
            toucher.start()
        return array

    def _touch(self, array: np.ndarray, address: int, start: int) -> None:
        """Touch the pages of ``array`` from byte ``start`` on, then lock them. The argument keeps the array mapped."""
        joins = True
        for offset in range(start - start % _TOUCH_NBYTES, len(array), _TOUCH_NBYTES):
            if self._closing.is_set():
                return
            nbytes = min(_TOUCH_NBYTES, len(array) - offset)
            if not virtual_memory.populate(address + offset, nbytes):
                logger.info("%s: this kernel cannot touch pages ahead of use; the first puts are slower", self._name)
                break
            whole = nbytes - nbytes % virtual_memory.HUGE_PAGE_NBYTES
            joins = joins and (not whole or virtual_memory.join_pages(address + offset, whole))
        if self._pages is not None:  # last, since locked pages cannot be joined
            self._pages.lock(address, len(array))


def _unmap(pages: Pages | None, address: int, nbytes: int) -> None:
    if pages is not None:
        pages.unlock(address)
    virtual_memory.unmap(address, nbytes)


class _Reservation:
    """A range of addresses, given back when neither the region nor a view needs it."""

    def __init__(self, nbytes: int) -> None:
        self.address = virtual_memory.reserve(nbytes)
        weakref.finalize(self, virtual_memory.unmap, self.address, nbytes).atexit = False

    def withdraw(self, address: int, nbytes: int) -> None:
        virtual_memory.withdraw(address, nbytes)


class DramRegion:
    """This process's read-only mapping of its node's part of the DRAM region.

    The node's part of the region is also one contiguous range of addresses in this process. Each segment is mapped at
    its place when it is first read, so that finding an extent is an addition. If the host forbids such a reservation,
    segments are mapped at any free place, with the same interface.

    space: the pool's address space.
    run_id: unique to the run.
    processes: indices that processes on this node can have.
    """

    def __init__(self, space: AddressSpace, run_id: str, processes: range) -> None:
        self._space = space
        self._run_id = run_id
        self._processes = processes
        self._lock = threading.Lock()
        self._arrays: dict[int, np.ndarray] = {}
        self._placed: set[int] = set()
        self._reservation = self._reserve()

    @property
    def is_contiguous(self) -> bool:
        """Whether the region is one reserved range."""
        return self._reservation is not None

    def view(self, export: SegmentExport, offset: int, nbytes: int) -> np.ndarray:
        """Return bytes of a segment as a read-only uint8 array, without copying.

        The caller must check that the bytes are bound. The view keeps the segment mapped, also after the owner's death.
        Raises OwnerLostError if the segment was never mapped here and its owner is gone.
        """
        array = self._arrays.get(export.process_index)
        if array is None or offset + nbytes > len(array):
            array = self._attach(export)
        return array[offset : offset + nbytes]

    def drop(self, process_index: int) -> None:
        """Let go of a segment. Its memory is given back when the last view of it is gone."""
        with self._lock:
            self._arrays.pop(process_index, None)

    def close(self) -> None:
        """Let go of all segments."""
        with self._lock:
            self._arrays.clear()
            self._reservation = None
            self._processes = range(0)

    def _reserve(self) -> _Reservation | None:
        if not self._processes or self._space.segment_nbytes % virtual_memory.PAGE_NBYTES:
            return None
        nbytes = len(self._processes) * self._space.segment_nbytes
        try:
            return _Reservation(nbytes)
        except OSError as error:
            logger.info(
                "mapping the pool segment by segment: this host forbids one range of %d bytes (%s)", nbytes, error
            )
            return None

    def _attach(self, export: SegmentExport) -> np.ndarray:
        with self._lock:
            array = self._arrays.get(export.process_index)
            if array is None or len(array) < export.bound_nbytes:
                fd = _open_segment(export, self._run_id)
                try:
                    array = self._map(fd, export)
                finally:
                    os.close(fd)
                self._arrays[export.process_index] = array
            return array

    def _map(self, fd: int, export: SegmentExport) -> np.ndarray:
        reservation, index = self._reservation, export.process_index
        # A place is used once: if a dropped segment comes back, a view of its first mapping may still exist.
        if reservation is None or index not in self._processes or index in self._placed:
            address = virtual_memory.map_file(fd, export.bound_nbytes, writable=False)
            return virtual_memory.array_at(
                address, export.bound_nbytes, writable=False, on_release=virtual_memory.unmap
            )
        # The segment's largest size is mapped at once, so that growth needs no new mapping. The page table refuses
        # reads past the bound bytes.
        nbytes = self._space.segment_nbytes
        address = reservation.address + self._processes.index(index) * nbytes
        virtual_memory.map_file(fd, nbytes, writable=False, address=address)
        self._placed.add(index)
        return virtual_memory.array_at(address, nbytes, writable=False, on_release=reservation.withdraw)


def _open_segment(export: SegmentExport, run_id: str) -> int:
    """Open a peer's segment. Raises OwnerLostError if the process is gone, or another one has its pid."""
    file = MemoryFile(export.pid, export.fd, segment_name(run_id, export.process_index))
    found = open_memory(file)
    if isinstance(found, int):
        if os.fstat(found).st_size >= export.bound_nbytes:
            return found
        os.close(found)
        found = f"it has fewer than {export.bound_nbytes} bytes"
    raise OwnerLostError(
        f"the segment of process {export.process_index} (pid {export.pid} on node {export.node_id}) is gone: {found}; "
        "ask the coordinator again by position"
    )
