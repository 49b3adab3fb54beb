"""Seeded permutations of 0..n-1 that cost no memory."""

from __future__ import annotations

import hashlib
import math
import struct

_MASK = (1 << 64) - 1
_ROUNDS = 6


class Permutation:
    """A permutation of ``range(size)``, a function of (seed, source, epoch) alone; O(1) memory and time an item.

    A Feistel network over the grid a x b that just holds ``size`` items (a, b near its square root): each round adds a
    hash of one coordinate to the other. Results outside the range walk on along their cycle, fewer than a of a * b.
    """

    def __init__(self, size: int, seed: int, source: int, epoch: int) -> None:
        assert size > 0
        self._size = size
        self._a = math.isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        key = repr((seed, source, epoch)).encode()
        self._round_keys = struct.unpack(f"<{_ROUNDS}Q", hashlib.blake2b(key, digest_size=8 * _ROUNDS).digest())

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self._size
        item = self._shuffle(index)
        while item >= self._size:
            item = self._shuffle(item)
        return item

    def _shuffle(self, item: int) -> int:
        a, b = self._a, self._b
        left, right = divmod(item, b)
        for number, key in enumerate(self._round_keys):
            if number % 2:
                right = (right + _hash(left ^ key)) % b
            else:
                left = (left + _hash(right ^ key)) % a
        return left * b + right


def _hash(value: int) -> int:
    """Mix 64 bits (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
