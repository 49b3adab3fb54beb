"""Seeded permutations of 0..n-1 in constant memory."""

from __future__ import annotations

import hashlib
import math
import struct

_MASK = (1 << 64) - 1
_ROUNDS = 6


class Permutation:
    """A permutation of ``range(size)``, a function of (seed, source, epoch) alone; O(1) memory, O(1) time per item.

    It is a Feistel network over the smallest grid a x b that holds ``size`` items (a, b near its square root). Each
    round adds a hash of one coordinate to the other. A result outside the range is shuffled again until it is inside;
    fewer than a of the a * b results are outside.
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
