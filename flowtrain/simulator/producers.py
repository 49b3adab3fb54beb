"""Processes of a simulated run that give memory to its pool, may be lost, and come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from flowtrain.mempool.gva import AddressSpace
from flowtrain.simulator.virtual import Occupancy, Segment, VirtualFlow
from flowtrain.types.memory import Tier

PER_NODE = 64
"""Processes of a simulated node; indices of a node are limited, and a restart takes a new one."""


@dataclass(slots=True)
class LostWork:
    """What losses of processes cost."""

    encode_s: float = 0.0
    """Seconds of forwards that a loss cut short, or that were done again."""
    num_remade: int = 0
    """Texts and images that feeders put again."""


class Producer(ABC):
    """A process with a segment, which may be lost and come back.

    name: of its actor. node: of its machine.
    """

    def __init__(self, run: VirtualFlow, name: str, node: str, space: AddressSpace) -> None:
        self._run = run
        self.name = name
        self._node = node
        self._space = space
        self._is_there = False
        self._life = 0  # processes that it had before; what a lost one was about to do does not happen
        self._index = -1
        self._down_s = 0.0
        self._lost_since_s: float | None = None

    @property
    def down_s(self) -> float:
        """Seconds between losses and returns so far."""
        since = self._lost_since_s
        return self._down_s + (self._run.now_s - since if since is not None else 0.0)

    @abstractmethod
    def start(self) -> None:
        """Join the flow, and ask for work."""

    def _join(self, nbytes: int | None, occupancy: Occupancy, feeder: int | None = None) -> None:
        self._is_there = True
        self._down_s, self._lost_since_s = self.down_s, None
        self._index = self._run.flow.join(self.name, self._node, feeder).process_index
        self._segment = Segment(self._space.gva(Tier.DRAM, self._index, 0), nbytes, occupancy)
        self._run.note_membership()

    def lose(self, down_s: float) -> None:
        """Lose the process now. down_s: seconds until it is back, with an empty segment."""
        if not self._is_there:
            return
        self._is_there = False
        self._lost_since_s = self._run.now_s
        self._life += 1
        self._segment.drop()
        self._run.flow.process_lost(self.name)
        self._run.note_membership()
        self._run.at(self._run.now_s + down_s, self.start)

    def _is_alive(self, life: int) -> bool:
        return self._is_there and self._life == life
