"""Messages between the processes of a replica, and what the others notice when one of them fails or ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from flowtrain.actors.replica_channel import _FRAME_NBYTES, _MOST_NBYTES, Alone, GlooChannel, portable
from flowtrain.errors import DataError
from tests.models.ranks import run_ranks

NUM_RANKS = 3


class Unportable(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("has a lambda")
        self.held = lambda: None


def exchange() -> tuple[object, object, int, object, str]:
    assert dist.group.WORLD is not None
    channel = GlooChannel(dist.group.WORLD)
    rank = channel.rank
    shared = channel.share({"said by": rank, "texts": (b"a" * 70_000,)})
    led = channel.lead(lambda: f"only by {rank}")

    def fail() -> None:
        raise DataError(f"no rows at {rank}")

    error = ""
    try:
        channel.lead(fail)
    except DataError as raised:
        error = str(raised)
    return shared, channel.collect(rank * 10), channel.highest(rank % 2), led, error


@pytest.mark.processes
def test_the_leader_sends_collects_and_acts_for_all() -> None:
    for rank, (shared, collected, highest, led, error) in enumerate(run_ranks(NUM_RANKS, exchange)):
        assert shared == {"said by": 0, "texts": (b"a" * 70_000,)}
        assert collected == ([0, 10, 20] if rank == 0 else None)
        assert (highest, led, error) == (1, "only by 0", "no rows at 0")


def one_ends(noticed: Path) -> None:
    assert dist.group.WORLD is not None
    channel = GlooChannel(dist.group.WORLD)
    channel.highest(0)
    if channel.rank == 1:
        os._exit(1)
    try:
        channel.highest(0)
    except RuntimeError as error:
        noticed.write_text(str(error))


def shared_lengths(lengths: list[int]) -> bool:
    """Share texts of these lengths, one after another; returns whether each came whole."""
    assert dist.group.WORLD is not None
    channel = GlooChannel(dist.group.WORLD)
    texts = [bytes([length % 251]) * length for length in lengths]
    return [channel.share(text if channel.is_leader else None) for text in texts] == texts


@pytest.mark.processes
def test_messages_of_about_a_frame_come_whole() -> None:
    frames = (_FRAME_NBYTES, 2 * _FRAME_NBYTES, 8 * _FRAME_NBYTES, _MOST_NBYTES, 3 * _MOST_NBYTES)
    lengths = [frame + more for frame in frames for more in range(-48, 8)]
    assert run_ranks(2, shared_lengths, lengths) == [True, True]


@pytest.mark.processes
def test_the_end_of_a_rank_ends_the_waits_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(2, one_ends, tmp_path / "noticed")
    assert (tmp_path / "noticed").read_text(), "an error of the transport, which hides no other"


def test_alone_there_is_nobody_to_talk_to() -> None:
    channel = Alone()
    assert channel.is_leader and channel.share("x") == "x" and channel.collect(3) == [3] and channel.highest(2) == 2
    with pytest.raises(DataError, match="no rows"):
        channel.lead(lambda: (_ for _ in ()).throw(DataError("no rows")))


def test_an_error_that_cannot_travel_is_described() -> None:
    known = DataError("no rows")
    assert portable(known) is known
    assert str(portable(Unportable())) == "Unportable: has a lambda"
