"""1F1B: complete, ordered, within its memory, and free of deadlock with unbuffered sends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.pipeline.actions import Action, ActionKind, Payload
from flowtrain.pipeline.schedules.one_f_one_b import forward_only, one_f_one_b

SHORT = {ActionKind.FORWARD_STAGE: "F", ActionKind.BACKWARD_STAGE: "B"}
LAUNCHES = (ActionKind.ISEND, ActionKind.IRECV)


def short(actions: Sequence[Action]) -> str:
    return " ".join(f"{SHORT[action.kind]}{action.microbatch}" for action in actions if action.kind.is_compute)


def test_one_stage_alternates():
    (actions,) = one_f_one_b(1, 3)
    assert all(action.kind.is_compute for action in actions)
    assert short(actions) == "F0 B0 F1 B1 F2 B2"
    assert short(forward_only(3)) == "F0 F1 F2"


def test_three_stages_warm_up_and_drain():
    ranks = one_f_one_b(3, 4)
    assert [short(actions) for actions in ranks] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@given(st.integers(1, 6), st.integers(0, 9))
@settings(deadline=None)
def test_every_schedule_runs_to_its_end(num_stages, num_microbatches):
    ranks = one_f_one_b(num_stages, num_microbatches)
    for stage, actions in enumerate(ranks):
        for kind in SHORT:
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(num_microbatches))
        in_flight = 0
        for action in actions:
            in_flight += {ActionKind.FORWARD_STAGE: 1, ActionKind.BACKWARD_STAGE: -1}.get(action.kind, 0)
            assert in_flight <= num_stages - stage
        launched = [(a.kind, a.payload, a.microbatch) for a in actions if a.kind in LAUNCHES]
        waited = [a for a in actions if not a.kind.is_compute and a.kind not in LAUNCHES]
        as_launches = [(ActionKind(a.kind.removeprefix("wait_")), a.payload, a.microbatch) for a in waited]
        assert sorted(launched) == sorted(as_launches)
    run_unbuffered(ranks)


def run_unbuffered(ranks: Sequence[Sequence[Action]]) -> None:
    """Run all lists with sends that hold until received; neighbouring launches start as one group.

    Transfers between two ranks complete in order of launch (first in, first out), as NCCL matches them.
    """
    cursors, groups = [0] * len(ranks), [0] * len(ranks)
    launched: list[list[tuple[int, Action]]] = [[] for _ in ranks]  # (group, launch), not completed yet
    done: set[tuple[int, ActionKind, Payload | None, int]] = set()
    forwards: set[tuple[int, int]] = set()
    progress = True
    while progress:
        progress = _complete_transfers(launched, done)
        for rank, actions in enumerate(ranks):
            while cursors[rank] < len(actions):
                action = actions[cursors[rank]]
                if action.kind in LAUNCHES:
                    previous = actions[cursors[rank] - 1] if cursors[rank] else None
                    groups[rank] += previous is None or previous.kind not in LAUNCHES
                    launched[rank].append((groups[rank], action))
                elif action.kind is ActionKind.FORWARD_STAGE:
                    forwards.add((rank, action.microbatch))
                elif action.kind is ActionKind.BACKWARD_STAGE:
                    assert all((stage, action.microbatch) in forwards for stage in range(len(ranks)))
                else:
                    launch = ActionKind(action.kind.removeprefix("wait_"))
                    if (rank, launch, action.payload, action.microbatch) not in done:
                        break
                cursors[rank] += 1
                progress = True
    assert cursors == [len(actions) for actions in ranks], f"stuck at {cursors}"
    assert not any(launched)


def _complete_transfers(launched: list[list[tuple[int, Action]]], done: set) -> bool:
    """Match what the first open groups of two ranks hold for each other; true when something completed."""
    for rank, open_launches in enumerate(launched):
        for group, send in open_launches:
            peer = send.peer
            if send.kind is not ActionKind.ISEND or group != _first_group(open_launches, peer):
                continue
            for other_group, receive in launched[peer]:
                if receive.kind is not ActionKind.IRECV or receive.peer != rank:
                    continue
                if other_group != _first_group(launched[peer], rank):
                    break
                assert (receive.payload, receive.microbatch) == (send.payload, send.microbatch)
                open_launches.remove((group, send))
                launched[peer].remove((other_group, receive))
                done.add((rank, ActionKind.ISEND, send.payload, send.microbatch))
                done.add((peer, ActionKind.IRECV, receive.payload, receive.microbatch))
                return True
    return False


def _first_group(open_launches: list[tuple[int, Action]], peer: int) -> int:
    return min(group for group, launch in open_launches if launch.peer == peer)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, -1)])
def test_impossible_sizes_are_refused(num_stages, num_microbatches):
    with pytest.raises(ValueError, match=rf"num_stages \({num_stages}\)"):
        one_f_one_b(num_stages, num_microbatches)
