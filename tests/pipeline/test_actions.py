"""The schedule IR and its text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pipeline.actions import (
    Action,
    ActionKind,
    MemoryStrategy,
    Payload,
    StageModule,
    format_actions,
    parse_action,
    parse_actions,
)

INDEX = st.integers(0, 10_000)
PLACE = {
    "stage": INDEX,
    "microbatch": INDEX,
    "segment": INDEX,
    "module": st.sampled_from(StageModule),
    "sub_microbatch": st.none() | INDEX,
}
COMPUTE = st.builds(
    Action,
    kind=st.sampled_from([ActionKind.FORWARD_STAGE, ActionKind.BACKWARD_STAGE]),
    memory=st.none() | st.sampled_from(MemoryStrategy),
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


@given(st.lists(COMPUTE | TRANSFER, max_size=8))
def test_text_round_trip(actions):
    text = format_actions(actions)
    assert len(text.splitlines()) == len(actions)
    assert parse_actions(f"# a comment\n\n{text}") == tuple(actions)


def test_the_text_form_is_readable():
    action = Action(ActionKind.FORWARD_STAGE, 1, 3, sub_microbatch=2, memory=MemoryStrategy.RECOMPUTE)
    assert str(action) == "forward_stage module=backbone stage=1 segment=0 microbatch=3.2 memory=recompute"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run module=backbone stage=0 segment=0 microbatch=0", "'run' is not a valid ActionKind"),
        ("forward_stage module=backbone segment=0 microbatch=0", "'stage' is missing"),
        ("forward_stage module=backbone stage=0 segment=0 microbatch=0 speed=1", "speed"),
        ("forward_stage module=backbone stage=0 stage=1 segment=0 microbatch=0", "repeated"),
        ("forward_stage module=backbone stage=-1 segment=0 microbatch=0", r"stage \(-1\) is negative"),
        ("forward_stage module=backbone stage=0 segment=0 microbatch=0 peer=1", "neither peer"),
        ("isend module=backbone stage=0 segment=0 microbatch=0", "a transfer needs peer"),
    ],
)
def test_malformed_lines_are_named(line, said):
    with pytest.raises(ValueError, match=said) as caught:
        parse_action(line)
    assert line in str(caught.value)
