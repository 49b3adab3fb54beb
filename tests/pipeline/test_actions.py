"""The schedule IR and its text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pipeline.actions import (
    Action,
    ActionKind,
    MemoryKind,
    MemoryStrategy,
    Payload,
    StageModule,
    parse_action,
    parse_memory,
)

INDEX = st.integers(0, 10_000)
PLACE = {
    "stage": INDEX,
    "microbatch": INDEX,
    "segment": INDEX,
    "module": st.sampled_from(StageModule),
    "sub_microbatch": st.none() | INDEX,
}
STRATEGY = st.builds(MemoryStrategy, st.sampled_from(MemoryKind)) | st.builds(
    MemoryStrategy, st.just(MemoryKind.RECOMPUTE), st.integers(1, 100)
)
COMPUTE = st.builds(
    Action,
    kind=st.sampled_from([ActionKind.FORWARD_STAGE, ActionKind.BACKWARD_STAGE]),
    memory=st.none() | STRATEGY,
    peer=st.none(),
    payload=st.none(),
    **PLACE,
)
TRANSFER = st.builds(
    Action,
    kind=st.sampled_from([kind for kind in ActionKind if not kind.is_compute]),
    memory=st.none(),
    peer=INDEX,
    payload=st.sampled_from(Payload),
    **PLACE,
)


@given(COMPUTE | TRANSFER)
def test_the_text_form_says_everything(action):
    line = str(action)
    assert len(line.splitlines()) == 1
    assert parse_action(line) == action


@given(COMPUTE | TRANSFER)
def test_an_action_has_one_text_form(action):
    line = str(action)
    for other in (line.replace(" ", "  ", 1), line.lower(), line.replace(" s", " s0"), f"{line} keep", f" {line}"):
        try:
            assert other == line or parse_action(other) != action
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (Action(ActionKind.FORWARD_STAGE, 1, 3, memory=MemoryStrategy.KEEP), "F s1 m3 keep"),
        (
            Action(ActionKind.BACKWARD_STAGE, 5, 3, 1, memory=parse_memory("recompute/2")),
            "B s5 c1 m3 recompute/2",
        ),
        (
            Action(ActionKind.FORWARD_STAGE, 0, 3, module=StageModule.ENCODER, sub_microbatch=2),
            "F encoder s0 m3.2",
        ),
        (Action(ActionKind.ISEND, 0, 12, peer=1, payload=Payload.ACTIVATION), "isend s0 m12 activation ->1"),
        (
            Action(ActionKind.WAIT_IRECV, 4, 0, 1, sub_microbatch=0, peer=3, payload=Payload.GRADIENT),
            "wait_irecv s4 c1 m0.0 gradient <-3",
        ),
    ],
)
def test_the_text_form_is_short(action, line):
    assert str(action) == line
    assert parse_action(line) == action


def test_impossible_actions_are_refused():
    with pytest.raises(ValueError, match=r"microbatch \(-1\)"):
        Action(ActionKind.FORWARD_STAGE, 0, -1)
    for kind, every in ((MemoryKind.RECOMPUTE, 0), (MemoryKind.KEEP, 2)):
        with pytest.raises(ValueError, match=rf"every \({every}\)"):
            MemoryStrategy(kind, every)
    with pytest.raises(ValueError, match="neither peer"):
        Action(ActionKind.FORWARD_STAGE, 0, 0, peer=1, payload=Payload.ACTIVATION)
    for incomplete in ({}, {"peer": 1}, {"peer": 1, "payload": Payload.ACTIVATION, "memory": MemoryStrategy.KEEP}):
        with pytest.raises(ValueError, match="a transfer needs peer"):
            Action(ActionKind.ISEND, 0, 0, **incomplete)


def test_a_wait_names_its_launch():
    wait = parse_action("wait_isend s0 c1 m3.1 activation ->1")
    assert str(wait.launch) == "isend s0 c1 m3.1 activation ->1"
    assert wait.launch.launch == wait.launch
