"""What an actor does now."""

from __future__ import annotations

from flowtrain.types.wire import message

WAIT_FOR_DATA = "a wait for data"
"""What a rank is in until its producers have made what it needs."""

START, LOAD, WAIT_FOR_MODEL = "the start", "the load of its model", "a wait for the model"
STARTS = frozenset({START, LOAD, WAIT_FOR_MODEL})
"""What a process is in before its work."""


@message
class Whereabouts:
    """What the working thread of a rank, encoder or feeder does at this moment. Producers count no units here."""

    unit: int
    """Index of the unit; -1: none yet."""
    step: int
    place: int
    """How many things it has begun in the unit. Ranks that wait for each other wait for the one with the fewest."""
    what: str
    """An action of its list, or another part of a unit."""
    for_s: float
    """Seconds since that began."""
    may_last: bool
    """It has another limit: a wait for producers or for the coordinator, a checkpoint, answers to held-out samples."""
    pid: int
    """Of its process."""
