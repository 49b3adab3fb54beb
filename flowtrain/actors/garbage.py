"""Limits the time that the garbage collector takes from an actor."""

from __future__ import annotations

import gc

MANY_OBJECTS = 100_000
"""New objects between two rounds of the collector in a process that holds tens of thousands of records. They form no
cycles; with the default of 700 the collector would look through them all the time."""


def keep_imports() -> None:
    """Exclude all objects imported so far from the collector's rounds, which take a quarter of a second with them."""
    gc.collect()
    gc.freeze()


def expect_many_objects() -> None:
    """Make the collector run less often. Only reference cycles need it; other memory is freed without it."""
    gc.set_threshold(MANY_OBJECTS, *gc.get_threshold()[1:])
