"""The garbage collector's share of an actor's time."""

from __future__ import annotations

import gc

MANY_OBJECTS = 100_000
"""New objects between two rounds of the collector in a process that holds records by the ten thousand: they form no
cycles, and the default of 700 would look through them all the time."""


def keep_imports() -> None:
    """Keep what was imported so far from the collector's rounds, which take a quarter of a second with it."""
    gc.collect()
    gc.freeze()


def expect_many_objects() -> None:
    """Have the collector come less often; memory is freed without it but for cycles."""
    gc.set_threshold(MANY_OBJECTS, *gc.get_threshold()[1:])
