"""Meetings and transfers of emulated ranks, in one process and through a file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flowtrain.emulation.meetings import Meeting, Meetings, create_memory
from flowtrain.errors import StallError
from flowtrain.types.plan import Degrees

LIMIT_S = 20.0


def _run(*targets: object) -> None:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_leave_a_meeting_at_the_moment_of_the_last() -> None:
    degrees = Degrees(3, 1, 1)
    meetings, left = Meetings(degrees, LIMIT_S), {}

    def rank(number: int) -> None:
        left[number] = [
            meetings.meet(Meeting.WORLD, number, range(3), 10.0 * turn + (number + turn) % 3) for turn in range(50)
        ]

    _run(*(lambda number=number: rank(number) for number in range(3)))
    assert left[0] == left[1] == left[2] == [10.0 * turn + 2 for turn in range(50)]


def test_transfers_arrive_in_order_at_a_rank_of_another_process(tmp_path: Path) -> None:
    degrees, path = Degrees(1, 2, 1), tmp_path / "memory"
    create_memory(path, degrees)
    sender, receiver = (Meetings(degrees, LIMIT_S, path) for _ in range(2))
    moments = [float(number) for number in range(1000)]
    found: list[float] = []
    _run(
        lambda: [sender.send(0, 1, at) for at in moments],
        lambda: found.extend(receiver.receive(1, 0, number) for number in range(len(moments))),
    )
    assert found == moments


def test_a_failed_rank_ends_the_waits_of_all(tmp_path: Path) -> None:
    degrees, path = Degrees(2, 1, 1), tmp_path / "memory"
    create_memory(path, degrees)
    Meetings(degrees, LIMIT_S, path).fail()
    with pytest.raises(RuntimeError, match="another emulated rank failed"):
        Meetings(degrees, LIMIT_S, path).meet(Meeting.WORLD, 0, range(2), 0.0)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(StallError, match=r"ranks \[0, 1\] met rank 1"):
        Meetings(Degrees(2, 1, 1), 0.01).meet(Meeting.SHARDS, 1, range(2), 0.0)
