"""A cache of the row groups that were read last, limited in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import pyarrow as pa

DEFAULT_CACHE_NBYTES = 256 << 20

Key = tuple[str, int]
"""(file, index of the row group in it)"""


class RowGroupCache:
    """Keeps the most recently used tables, at most ``max_nbytes`` in total; the last one stays even if it is larger.

    Thread-safe. A table is loaded under the lock, so that threads that need the same row group read it once.
    """

    def __init__(self, max_nbytes: int = DEFAULT_CACHE_NBYTES) -> None:
        self.max_nbytes = max_nbytes
        self.nbytes = 0
        self._tables: OrderedDict[Key, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tables)

    def get(self, key: Key, load: Callable[[], pa.Table]) -> pa.Table:
        """Return the table of ``key``; load it if it is not in the cache."""
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
            table = load()
            self._tables[key] = table
            self.nbytes += table.nbytes
            while self.nbytes > self.max_nbytes and len(self._tables) > 1:
                _, evicted = self._tables.popitem(last=False)
                self.nbytes -= evicted.nbytes
            return table
