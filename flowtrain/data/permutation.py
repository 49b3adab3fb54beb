"""Seeded permutations of 0..n-1 in constant memory."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import numpy as np

from flowtrain.costs.flops import IntArray

_MASK = (1 << 64) - 1
_ROUNDS = 6
_FEW = 48
"""Up to so many items, numpy is slower than a loop."""


class Permutation:
    """A permutation of ``range(size)``, a function of its key alone; O(1) memory, O(1) time per item.

    It is a Feistel network over the smallest grid a x b that holds ``size`` items (a, b near its square root). Each
    round adds a hash of one coordinate to the other. A result outside the range is shuffled again until it is inside;
    fewer than a of the a * b results are outside.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        """key: seed, source and epoch, and what else tells this permutation from others."""
        assert size > 0
        self._size = size
        self._a = math.isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        self._round_keys = struct.unpack(f"<{_ROUNDS}Q", _digest(key, 8 * _ROUNDS))

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self._size
        item = self._shuffle(index)
        while item >= self._size:
            item = self._shuffle(item)
        return item

    def items(self) -> IntArray:
        """Return all items in their order; much faster than one after another."""
        if self._size <= _FEW:
            return np.array([self[index] for index in range(self._size)], dtype=np.int64)
        items = self._shuffle_all(np.arange(self._size, dtype=np.uint64))
        while len(outside := np.flatnonzero(items >= self._size)):
            items[outside] = self._shuffle_all(items[outside])
        return items.astype(np.int64)

    def _shuffle(self, item: int) -> int:
        a, b = self._a, self._b
        left, right = divmod(item, b)
        for number, key in enumerate(self._round_keys):
            if number % 2:
                right = (right + _hash(left ^ key)) % b
            else:
                left = (left + _hash(right ^ key)) % a
        return left * b + right

    def _shuffle_all(self, items: Any) -> Any:
        """Do what ``_shuffle`` does, in unsigned 64 bits; sums of coordinates are taken after the remainder."""
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = items // b, items % b
        for number, key in enumerate(self._round_keys):
            if number % 2:
                right = (right + _hash_all(left ^ np.uint64(key)) % b) % b
            else:
                left = (left + _hash_all(right ^ np.uint64(key)) % a) % a
        return left * b + right


class Choices:
    """A sequence of random choices, a function of its key alone."""

    def __init__(self, *key: int | str) -> None:
        self._start = int.from_bytes(_digest(key, 8), "little")

    def choose(self, index: int, num_options: int) -> int:
        """Return the index-th choice among ``range(num_options)``."""
        return _hash((self._start + index * _GOLDEN) & _MASK) % num_options


_GOLDEN = 0x9E3779B97F4A7C15


def _digest(key: tuple[int | str, ...], nbytes: int) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=nbytes).digest()


def _hash(value: int) -> int:
    """Mix 64 bits (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _hash_all(values: Any) -> Any:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
