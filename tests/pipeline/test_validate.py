"""What the validator refuses, and the text of its errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowtrain.errors import ScheduleError
from flowtrain.pipeline.actions import Action, MemoryStrategy
from flowtrain.pipeline.schedules.one_f_one_b import forward_only, one_f_one_b
from flowtrain.pipeline.validate import validate
from tests.pipeline.partitions import even, parse_actions

Lists = list[list[Action]]


def read(*texts: str) -> Lists:
    return [list(parse_actions(text)) for text in texts]


def refusal(lists: Sequence[Sequence[Action]], num_microbatches: int = 1, training: bool = False, **limits) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(lists, training=training, num_microbatches=num_microbatches, **limits)
    return str(caught.value)


# --- one refusal each -----------------------------------------------------------------------------------------------

FIRST = "F s0 m0 keep\nisend s0 m0 activation ->1\nwait_isend s0 m0 activation ->1"
SECOND = "irecv s1 m0 activation <-0\nwait_irecv s1 m0 activation <-0\nF s1 m0 keep"


def test_the_smallest_lists_are_valid():
    validate(read(FIRST, SECOND), training=False, num_microbatches=1)
    validate(read("", ""), training=True, num_microbatches=0)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("F s0 m0 keep", SECOND, "F s0 m0 keep has no isend; the other end is on rank 1"),
        (FIRST.replace("wait_isend s0 m0 activation ->1", ""), SECOND, "has no wait_isend"),
        (FIRST, "irecv s1 m0 activation <-0\nF s1 m0 keep", "has no wait_irecv; the other end is on rank 0"),
        (FIRST, "wait_irecv s1 m0 activation <-0\nF s1 m0 keep", "has no irecv; the other end is on rank 0"),
        (FIRST, "F s1 m0 keep", "has no irecv"),
        (FIRST, "", "rank 0: isend s0 m0 activation ->1 is not needed by another rank"),
        (FIRST, SECOND.replace("F s1 m0 keep", ""), "stage 1 of the backbone does not run microbatch 0"),
        (FIRST, f"F s1 m0 keep\n{SECOND}", "F s1 m0 keep runs twice"),
        (FIRST, f"{SECOND}\nwait_irecv s1 m0 activation <-0", "has wait_irecv s1 m0 activation <-0 twice"),
        (FIRST, "irecv s1 m0 activation <-0\nF s1 m0 keep\nwait_irecv s1 m0 activation <-0", "must come in this order"),
        (
            "isend s0 m0 activation ->1\nF s0 m0 keep\nwait_isend s0 m0 activation ->1",
            SECOND,
            "must come in this order",
        ),
        (FIRST, SECOND.replace("<-0", "<-1"), "names the wrong peer; the other end is on rank 0"),
        (FIRST, SECOND.replace("s1", "s2"), r"stages [0, 2] of the backbone; none may be missing"),
        (FIRST, SECOND.replace("s1", "s1 c1", 1), "segment 1 on rank 1, and segment 0 on rank 1"),
        (FIRST, f"{SECOND}\nF s0 m1 keep", "segment 0 on rank 0, and segment 0 on rank 1"),
        (FIRST, f"{SECOND}\nB s1 m0 keep", "lists that only evaluate have no backward"),
        (FIRST.replace("m0", "m1"), SECOND.replace("m0", "m1"), "run 1 microbatches, [1], not the first 1"),
        (FIRST.replace("m0", "m0.0"), SECOND.replace("m0", "m0.1"), "runs parts 1 of microbatch 0"),
        (FIRST, SECOND.replace("m0", "m0.0"), "runs parts 0 of microbatch 0, and the stage before it the whole"),
    ],
)
def test_what_is_wrong_is_named(first, second, said):
    assert said in refusal(read(first, second))


def test_backwards_belong_to_training_lists():
    assert "F s0 m0 keep has no backward" in refusal(read("F s0 m0 keep"), training=True)
    assert "B s0 m1 keep has no forward" in refusal(read("F s0 m0 keep\nB s0 m0 keep\nB s0 m1 keep"), training=True)
    assert "runs B s0 m0 keep before F s0 m0 keep" in refusal(read("B s0 m0 keep\nF s0 m0 keep"), training=True)
    assert "differ in their memory strategy" in refusal(read("F s0 m0 keep\nB s0 m0 recompute"), training=True)


def test_parts_may_join_and_their_transfers_are_of_the_parts():
    first = "\n".join(FIRST.replace("m0", f"m0.{part}") for part in range(2))
    second = "\n".join(SECOND.replace("m0", f"m0.{part}").replace("F s1 m0.0 keep", "") for part in range(2))
    validate(read(first, second.replace("F s1 m0.1", "F s1 m0")), training=False, num_microbatches=1)
    early = second.replace("F s1 m0.1 keep", "").replace("wait_irecv s1 m0.0", "F s1 m0 keep\nwait_irecv s1 m0.0")
    assert "must come in this order" in refusal(read(first, early.replace("F s1 m0.0", "F s1 m0")))


def test_the_encoders_parts_join_into_the_backbones_microbatch():
    encoder = """
        F encoder s0 m0.0
        isend encoder s0 m0.0 activation ->1
        F encoder s0 m0.1
        isend encoder s0 m0.1 activation ->1
        wait_isend encoder s0 m0.0 activation ->1
        wait_isend encoder s0 m0.1 activation ->1
        irecv encoder s0 m0.0 gradient <-1
        irecv encoder s0 m0.1 gradient <-1
        wait_irecv encoder s0 m0.1 gradient <-1
        B encoder s0 m0.1
        wait_irecv encoder s0 m0.0 gradient <-1
        B encoder s0 m0.0
    """
    backbone = """
        irecv s0 m0.0 activation <-0
        irecv s0 m0.1 activation <-0
        wait_irecv s0 m0.0 activation <-0
        wait_irecv s0 m0.1 activation <-0
        F s0 m0
        B s0 m0
        isend s0 m0.0 gradient ->0
        isend s0 m0.1 gradient ->0
        wait_isend s0 m0.0 gradient ->0
        wait_isend s0 m0.1 gradient ->0
    """
    validate(read(encoder, backbone), training=True, num_microbatches=1)
    cut_again = backbone.replace("F s0 m0", "F s0 m0.0").replace("B s0 m0", "B s0 m0.0")
    said = refusal(read(encoder, cut_again), training=True)
    assert "stage 0 of the backbone runs parts 0 of microbatch 0, and the stage before it parts 0, 1" in said


# --- order of transfers, and circles --------------------------------------------------------------------------------


def test_receives_in_another_order_than_sends_are_refused():
    lists = [list(actions) for actions in forward_only(even(2), 2)]
    texts = [[str(action) for action in actions] for actions in lists]
    receives = [texts[1].index(f"irecv s1 m{k} activation <-0") for k in range(2)]
    lists[1].insert(0, lists[1].pop(receives[1]))
    said = refusal(lists, 2)
    assert "rank 0 launches isend s0 m0 activation ->1 where rank 1 launches irecv s1 m1 activation <-0" in said


EXCHANGE = (
    """
    F s0 m0
    isend s0 m0 activation ->1
    wait_isend s0 m0 activation ->1
    F s0 m1
    isend s0 m1 activation ->1
    irecv s0 m0 gradient <-1
    wait_isend s0 m1 activation ->1
    wait_irecv s0 m0 gradient <-1
    B s0 m0
    irecv s0 m1 gradient <-1
    wait_irecv s0 m1 gradient <-1
    B s0 m1
    """,
    """
    irecv s1 m0 activation <-0
    wait_irecv s1 m0 activation <-0
    F s1 m0
    B s1 m0
    isend s1 m0 gradient ->0
    irecv s1 m1 activation <-0
    wait_isend s1 m0 gradient ->0
    wait_irecv s1 m1 activation <-0
    F s1 m1
    B s1 m1
    isend s1 m1 gradient ->0
    wait_isend s1 m1 gradient ->0
    """,
)


def swapped(lists: Lists, rank: int, line: str) -> Lists:
    """With an action and the one before it exchanged."""
    place = [str(action) for action in lists[rank]].index(line)
    lists[rank][place - 1 : place + 1] = reversed(lists[rank][place - 1 : place + 1])
    return lists


def test_a_list_that_needs_buffers_is_refused_with_its_circle():
    """Two neighbours exchange in one group each; sending and waiting first on both sides hangs."""
    validate(read(*EXCHANGE), training=True, num_microbatches=2)
    one_side = swapped(read(*EXCHANGE), 0, "wait_isend s0 m1 activation ->1")
    validate(one_side, training=True, num_microbatches=2)
    said = refusal(swapped(one_side, 1, "wait_isend s1 m0 gradient ->0"), 2, training=True)
    assert "rank 0 at wait_isend s0 m1 activation ->1 needs irecv s1 m1 activation <-0 of rank 1, not launched" in said
    assert "rank 1 at wait_isend s1 m0 gradient ->0 needs irecv s0 m0 gradient <-1 of rank 0, not launched" in said
    assert "[wA1>1]" in said and "[wG0>0]" in said


def test_groups_that_queue_behind_each_other_are_refused():
    """Each rank's receive is launched before its send: neither send can start, though every launch is asynchronous."""
    lists = [list(actions) for actions in one_f_one_b(even(2), 2)]
    texts = [[str(action) for action in actions] for actions in lists]
    receive = lists[0].pop(texts[0].index("irecv s0 m0 gradient <-1"))
    lists[0].insert(texts[0].index("F s0 m1 keep"), receive)
    assert "circle" in refusal(lists, 2, training=True)


# --- memory ---------------------------------------------------------------------------------------------------------


def held_by_memory(action: Action) -> int:
    return {MemoryStrategy.KEEP: 10, MemoryStrategy.RECOMPUTE: 1}[action.memory]


def test_memory_counts_what_each_forward_holds_until_its_backward():
    for memory, size in ((MemoryStrategy.KEEP, 10), (MemoryStrategy.RECOMPUTE, 1)):
        lists = one_f_one_b(even(3), 5, memory=memory)
        limits = [3 * size, 2 * size, size]
        validate(lists, training=True, num_microbatches=5, held=held_by_memory, limits=limits)
        limits[1] -= 1
        said = refusal(lists, 5, training=True, held=held_by_memory, limits=limits)
        assert f"rank 1 holds {2 * size} after F s1 m1 {memory}, for 2 forwards without their backward" in said
        assert f"more than its limit of {limits[1]}" in said
    validate(forward_only(even(2), 4), training=False, num_microbatches=4, held=held_by_memory, limits=[0, 0])


# --- the grid -------------------------------------------------------------------------------------------------------


def test_the_grid_shows_the_lists_around_the_action():
    lists = [list(actions) for actions in one_f_one_b(even(2), 3)]
    del lists[0][[str(action) for action in lists[0]].index("wait_irecv s0 m1 gradient <-1")]
    why, *rows, legend = refusal(lists, 3, training=True).splitlines()
    assert why == "rank 0: irecv s0 m1 gradient <-1 has no wait_irecv; the other end is on rank 1"
    assert rows == [
        "  rank 0 ...  wA1>1   A2>1  [G1<1] [B1]     G2<1   wG2<1  ...",
        "  rank 1 ...  F1      A2<0   B1     wG0>0   G1>0   wA2<0   F2   B2   wG1>0  ...",
    ]
    assert "F, B: forward, backward" in legend


def test_the_grid_names_stages_where_a_rank_has_several_and_shows_marks_far_apart():
    lists = [list(actions) for actions in one_f_one_b(even(2, 2), 6)]
    first = next(action for action in lists[1] if action.kind.is_compute)
    lists[1].append(first)
    why, *rows, _ = refusal(lists, 6, training=True).splitlines()
    assert why == f"{first} runs twice"
    assert rows[1].count("[F0^1]") == 2 and rows[1].endswith("[F0^1]") and " ... " in rows[1]
    assert " F0^0 " in rows[0]


def test_an_error_without_a_place_still_shows_the_lists():
    assert "rank 1" in refusal(one_f_one_b(even(2), 3), 2, training=True)
    assert refusal([[], []], 2) == "the lists run 0 microbatches, [], not the first 2"
