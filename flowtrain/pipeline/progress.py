"""Runs the transfers of all ranks' lists without data or time, to check that every list reaches its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from flowtrain.pipeline.actions import Action
from flowtrain.pipeline.grid import refuse

_Lists = Sequence[Sequence[Action]]


class _End(NamedTuple):
    """One end of a transfer."""

    rank: int
    place: int
    """Index of its launch in the rank's list."""
    group: int
    """Index of the launch's group among the rank's groups."""


def check_progress(lists: _Lists) -> None:
    """Raise ScheduleError with the circle of waits if a rank cannot reach the end of its list.

    The rules: neighbouring launches form a group. A rank's groups start in order, each when the one before has ended. A
    transfer ends when the groups of both its ends have started; a group ends when all its transfers have ended. A wait
    passes when the group of its launch has ended. The lists must pair up: transfers between two ranks match in order of
    launch.
    """
    machine = _Machine(lists)
    machine.run()
    circle = machine.find_circle()
    if circle:
        steps = "".join(f"\n  {why}" for _, why in circle)
        refuse(lists, f"the ranks wait for each other in a circle:{steps}", [place for place, _ in circle])


class _Machine:
    """The state of all ranks: how far each list has run, and how many groups are launched, started and ended."""

    def __init__(self, lists: _Lists) -> None:
        self._lists = lists
        self._waits: list[dict[int, int]] = [{} for _ in lists]  # by rank: index of a wait -> group of its launch
        self._members: list[list[list[tuple[_End, _End]]]] = [[] for _ in lists]  # transfers of each rank's groups
        self._cursors, self._launched, self._started, self._ended = ([0] * len(lists) for _ in range(4))
        lanes: defaultdict[tuple[int, int], tuple[list[_End], list[_End]]] = defaultdict(lambda: ([], []))
        for rank, actions in enumerate(lists):
            self._read(rank, actions, lanes)
        for sends, receives in lanes.values():
            for send, receive in zip(sends, receives, strict=True):
                self._members[send.rank][send.group].append((send, receive))
                self._members[receive.rank][receive.group].append((receive, send))
        self._left = [[len(members) for members in groups] for groups in self._members]

    def _read(
        self, rank: int, actions: Sequence[Action], lanes: dict[tuple[int, int], tuple[list[_End], list[_End]]]
    ) -> None:
        groups: dict[tuple[object, ...], int] = {}
        was_launch = False
        for index, action in enumerate(actions):
            kind = action.kind
            is_launch = kind.is_launch
            if is_launch and not was_launch:
                self._members[rank].append([])
            was_launch = is_launch
            if kind.is_compute:
                continue
            peer = action.peer
            assert peer is not None
            is_sending = kind.is_sending
            transfer = (
                is_sending,
                action.payload,
                action.module,
                action.stage,
                action.microbatch,
                action.sub_microbatch,
            )
            if is_launch:
                group = len(self._members[rank]) - 1
                groups[transfer] = group
                sends, receives = lanes[(rank, peer) if is_sending else (peer, rank)]
                (sends if is_sending else receives).append(_End(rank, index, group))
            else:
                self._waits[rank][index] = groups[transfer]

    def run(self) -> None:
        """Run every rank until its end or until a wait that cannot pass."""
        ready = list(range(len(self._lists)))
        while ready:
            rank = ready.pop()
            actions, cursor = self._lists[rank], self._cursors[rank]
            while cursor < len(actions):
                kind = actions[cursor].kind
                if kind.is_wait and self._waits[rank][cursor] >= self._ended[rank]:
                    break
                cursor += 1
                if kind.is_launch and (cursor == len(actions) or not actions[cursor].kind.is_launch):
                    self._launched[rank] += 1
                    ready += self._start(rank)
            self._cursors[rank] = cursor

    def _start(self, rank: int) -> list[int]:
        """Start a rank's next group if it may start, and all groups that can start as a result.

        Returns the ranks whose groups ended.
        """
        ended: list[int] = []
        starting = [rank]
        while starting:
            rank = starting.pop()
            if not self._started[rank] == self._ended[rank] < self._launched[rank]:
                continue
            self._started[rank] += 1
            for own, other in self._members[rank][self._started[rank] - 1]:
                if other.group >= self._started[other.rank]:
                    continue
                for end in (own, other):
                    self._left[end.rank][end.group] -= 1
                    if self._left[end.rank][end.group] == 0:
                        self._ended[end.rank] += 1
                        starting.append(end.rank)
                        ended.append(end.rank)
        return ended

    def find_circle(self) -> list[tuple[tuple[int, int], str]]:
        """The waits that block each other, each with its reason; empty if every rank is at its end."""
        stuck = (rank for rank, actions in enumerate(self._lists) if self._cursors[rank] < len(actions))
        rank = next(stuck, None)
        seen: dict[int, tuple[tuple[int, int], str]] = {}
        while rank is not None and rank not in seen:
            wait = self._lists[rank][self._cursors[rank]]
            members = self._members[rank][self._ended[rank]]
            other = next(other for _, other in members if other.group >= self._started[other.rank])
            theirs = self._lists[other.rank][other.place]
            launched = other.group < self._launched[other.rank]
            why = f"rank {rank} at {wait!s} needs {theirs!s} of rank {other.rank}, " + (
                "launched, but waiting for earlier launches" if launched else "not launched yet"
            )
            seen[rank] = ((rank, self._cursors[rank]), why)
            rank = other.rank
        if rank is None:
            return []
        ranks = list(seen)
        return [seen[each] for each in ranks[ranks.index(rank) :]]
