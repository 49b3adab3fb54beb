"""A cache of the blocks that were read last, limited in bytes; for reading rows in any order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from flowtrain.data.sources.base import Record

DEFAULT_CACHE_NBYTES = 256 << 20

Key = tuple[int, int]
"""(source, block)"""


class BlockCache:
    """Keeps the most recently used blocks, at most ``max_nbytes`` in total; the last one stays even if it is larger.

    Thread-safe. A block is loaded under the lock, so that threads that need the same one read it once.
    """

    def __init__(self, max_nbytes: int = DEFAULT_CACHE_NBYTES) -> None:
        self.max_nbytes = max_nbytes
        self.nbytes = 0
        self._blocks: OrderedDict[Key, tuple[int, Sequence[Record]]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: Key, nbytes: int, load: Callable[[], Sequence[Record]]) -> Sequence[Record]:
        """Return the rows of a block; load it if it is not in the cache. nbytes: that it takes in memory."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key][1]
            while self._blocks and self.nbytes + nbytes > self.max_nbytes:
                _, (evicted_nbytes, _) = self._blocks.popitem(last=False)
                self.nbytes -= evicted_nbytes
            records = load()
            self._blocks[key] = nbytes, records
            self.nbytes += nbytes
            return records
