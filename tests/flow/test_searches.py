"""Plans that other processes make: taken unit by unit, the same ones as made here, and never waited for in vain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.flow.flow import Flow
from flowtrain.types.evaluation import EvalRounds
from flowtrain.types.plan import UnitKind
from tests.flow.searching import ByHand, backwards
from tests.flow.simulation import build_flow
from tests.flow.test_flow_trace import encode_all, joined, run, size

NUM_STEPS = 4


def planned(flow: Flow) -> list[int]:
    return [index for index in range(NUM_STEPS + 2) if flow.steps.plan_of(index) is not None]


@given(st.permutations(range(NUM_STEPS)), st.sets(st.integers(0, NUM_STEPS - 1)))
def test_plans_are_taken_in_order_and_are_those_made_here(order: list[int], lost: set[int]) -> None:
    elsewhere = ByHand()
    flow = build_flow(num_steps=NUM_STEPS, lookahead=NUM_STEPS, dp_size=1, arrange=backwards, elsewhere=elsewhere)
    here = build_flow(num_steps=NUM_STEPS, lookahead=NUM_STEPS, dp_size=1, arrange=backwards)
    feeder, encoder = joined(flow)
    other, _ = joined(here)
    for _ in range(NUM_STEPS):
        size(flow, feeder)
        size(here, other)
    assert planned(flow) == [] and planned(here) == list(range(NUM_STEPS))
    assert [search.unit_index for search in flow.steps.take_searches()] == list(range(NUM_STEPS))
    assert flow.steps.take_searches() == ()
    assert flow.lease_order(encoder.index, "vision", encoder.arena.available_nbytes) is None, "no batch is cut yet"
    ended: set[int] = set()
    for index in order:
        flow.search_ended((elsewhere.fail if index in lost else elsewhere.end)(index))
        ended.add(index)
        first_missing = min(set(range(NUM_STEPS + 1)) - ended)
        assert planned(flow) == list(range(first_missing)), "no plan overtakes another"
    for index in range(NUM_STEPS):
        assert flow.steps.plan_of(index) == here.steps.plan_of(index)
    for index in range(NUM_STEPS):
        encode_all(flow, encoder)
        run(flow, index)


def test_an_evaluation_waits_for_the_plan_of_the_step_before() -> None:
    elsewhere, evaluations = ByHand(), (EvalRounds(1, 4),)
    flow = build_flow(
        num_steps=1, lookahead=3, dp_size=1, evaluations=evaluations, arrange=backwards, elsewhere=elsewhere
    )
    feeder, _ = joined(flow)
    size(flow, feeder)
    size(flow, feeder)
    assert planned(flow) == [] and set(elsewhere.begun) == {0}, "an evaluation is not searched"
    flow.search_ended(elsewhere.end(0))
    assert planned(flow) == [0, 1]
    last = flow.steps.plan_of(1)
    assert last is not None and last.unit.kind is UnitKind.EVAL


def test_who_waits_for_a_search_is_told_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("flowtrain.flow.steps.time.monotonic", lambda: now[0])
    elsewhere = ByHand()
    flow = build_flow(num_steps=2, lookahead=2, dp_size=1, arrange=backwards, elsewhere=elsewhere)
    feeder, encoder = joined(flow)
    size(flow, feeder)
    size(flow, feeder)
    now[0] = 11.0
    assert flow.plan_of(0) is None and flow.plan_of(0) is None
    assert flow.describe_wait(0, None, 0) == "unit 0 is not planned yet: its arrangement is searched"
    now[0] = 13.5
    flow.search_ended(elsewhere.end(0))
    flow.search_ended(elsewhere.end(1))
    waits = []
    for index in range(2):
        assert flow.plan_of(index) is not None
        encode_all(flow, encoder)
        run(flow, index)
        waits += [event.plan_wait_s for event in flow.log.take() if hasattr(event, "plan_wait_s")]
    assert waits == [2.5, 0.0], "from the question to the plan; nobody had asked for the second"


def test_a_step_by_arrival_goes_on_without_its_search() -> None:
    elsewhere = ByHand(limit_s=0.0)
    flow = build_flow(num_steps=2, arrival=True, dp_size=1, arrange=backwards, elsewhere=elsewhere)
    feeder, encoder = joined(flow)
    size(flow, feeder)
    size(flow, feeder)
    encode_all(flow, encoder)
    assert flow.plan_of(0) is None
    (search,) = flow.steps.take_searches()
    flow.search_ended(search)
    found = flow.steps.plan_of(0)
    plain = build_flow(num_steps=2, arrival=True, dp_size=1)
    assert found is not None
    _, unit, sizes = elsewhere.begun[0]
    assert found == plain.steps._planner.plan(unit, sizes), "as without a search"
    flow.search_ended(elsewhere.end(0))
    assert flow.steps.plan_of(0) is found, "what comes later changes nothing"
