"""What the flow adds to the trace: planning, occupancy, lookahead, restarts, and the steps that are asked for."""

from __future__ import annotations

import math
import time

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.flow.flow import Flow
from flowtrain.types.events import CheckpointFailed, Rejoined, SpansRecorded
from flowtrain.types.messages import EncoderReport, Span
from flowtrain.types.tracing import Counter, TraceSteps
from tests.flow.simulation import SimulatedEncoder, SimulatedFeeder, build_flow, located, report_of


def recorded(flow: Flow) -> tuple[list[Span], list[Counter]]:
    events = [event for event in flow.log.take() if isinstance(event, SpansRecorded)]
    return [span for event in events for span in event.spans], [each for event in events for each in event.counters]


def joined(flow: Flow) -> tuple[SimulatedFeeder, SimulatedEncoder]:
    feeder = SimulatedFeeder(flow.join("feeder-0", "node", 0).process_index)
    return feeder, SimulatedEncoder(flow.join("encoder-0", "node").process_index, 1 << 16)


def size(flow: Flow, feeder: SimulatedFeeder) -> None:
    order = flow.feed_order(feeder.index)
    assert order is not None and order.unit is not None
    flow.feed(feeder.index, feeder.make(order.unit, order.remake))


def encode_all(flow: Flow, encoder: SimulatedEncoder) -> None:
    while (order := flow.lease_order(encoder.index, "vision", encoder.arena.available_nbytes)) is not None:
        encoder.take(order)
        if not encoder.work:
            return
        encoder.free(flow.hand_in(encoder.index, encoder.encode()))


def run(flow: Flow, unit: int, dp_size: int = 1) -> None:
    plan = flow.steps.plan_of(unit)
    assert plan is not None
    for dp_rank in range(dp_size):
        flow.steps.begin(unit)
        for slot in range(plan.num_slots):
            assert located(flow, unit, slot, dp_rank) is not None
            flow.microbatches.release(unit, (slot,), dp_rank)
        flow.finish((report_of(plan.unit, dp_rank),), ())


@given(st.integers(1, 3), st.integers(0, 4), st.booleans())
def test_counters_are_finite_and_never_negative(lookahead: int, trace_steps: int, dies: bool) -> None:
    flow = build_flow(num_steps=4, lookahead=lookahead, trace_steps=trace_steps, dp_size=1)
    feeder, encoder = joined(flow)
    counters: list[Counter] = []
    for step in range(1, 5):
        while (order := flow.feed_order(feeder.index)) is not None and order.unit is not None:
            feeder.free(order.released)
            flow.feed(feeder.index, feeder.make(order.unit, order.remake))
        encode_all(flow, encoder)
        if dies and step == 2:
            flow.process_lost("encoder-0")
            encoder = SimulatedEncoder(flow.join("encoder-0", "node").process_index, 1 << 16)
            encode_all(flow, encoder)
        run(flow, step - 1)
        counters += recorded(flow)[1]
    assert bool(counters) == (trace_steps > 0)
    for counter in counters:
        assert counter.values and all(value >= 0 and math.isfinite(value) for value in counter.values.values())
    ahead = [each.values["units"] for each in counters if each.name.endswith("ahead")]
    assert all(number <= lookahead for number in ahead), "nobody is further ahead than the lookahead"


def test_occupancy_and_lookahead_follow_the_reports() -> None:
    flow = build_flow(num_steps=3, lookahead=2, trace_steps=3, dp_size=1)
    feeder, encoder = joined(flow)
    size(flow, feeder)
    _, counters = recorded(flow)
    names = {(each.actor, each.name) for each in counters}
    assert {("feeder-0", "pool dram"), ("coordinator", "units sized ahead")} <= names
    size(flow, feeder)
    encode_all(flow, encoder)
    _, counters = recorded(flow)
    last = {(each.actor, each.name): each.values for each in counters}
    assert last["coordinator", "units sized ahead"] == {"units": 1}
    assert last["coordinator", "units encoded ahead"] == {"units": 1}
    stats = encoder.stats
    assert last["encoder-0", "pool dram"]["used bytes"] == stats.used_nbytes
    assert sum(last["encoder-0", "pool dram"].values()) == stats.bound_nbytes


def test_a_restart_is_a_span_from_the_death_to_the_new_process() -> None:
    flow = build_flow(trace_steps=3, dp_size=1)
    joined(flow)
    flow.process_lost("encoder-0")
    flow.process_lost("encoder-0")
    before = recorded(flow)
    assert before[0] == [], "it is not back yet"
    assert [each.values for each in before[1] if each.actor == "encoder-0"] == [{"used bytes": 0.0, "free bytes": 0.0}]
    flow.join("encoder-0", "node")
    (span,), _ = recorded(flow)
    assert (span.actor, span.name) == ("encoder-0", "restart") and span.start_s <= span.end_s
    flow.join("encoder-1", "node")
    assert recorded(flow) == ([], []), "a first start is no restart"


def rejoined(flow: Flow) -> list[str]:
    return [event.name for event in flow.log.take() if isinstance(event, Rejoined)]


def test_a_process_that_was_lost_before_it_joined_is_back_when_it_joins() -> None:
    flow = build_flow(dp_size=1)
    flow.process_lost("encoder-0")
    assert rejoined(flow) == []
    flow.join("encoder-0", "node")
    assert rejoined(flow) == ["encoder-0"]
    flow.process_lost("encoder-0")
    flow.process_lost("encoder-0")  # its successor, which has not joined
    flow.join("encoder-0", "node")
    assert rejoined(flow) == ["encoder-0"], "once, after the last loss"
    flow.process_lost("encoder-1", for_good=True)
    flow.join("encoder-1", "node")
    assert rejoined(flow) == []


def test_a_process_that_is_given_up_is_shown() -> None:
    flow = build_flow(trace_steps=3, dp_size=1)
    joined(flow)
    flow.process_lost("encoder-0", for_good=True)
    (span,), _ = recorded(flow)
    assert (span.actor, span.name) == ("encoder-0", "given_up")


def test_planning_is_on_the_runs_clock() -> None:
    flow = build_flow(trace_steps=3, dp_size=1)
    feeder, _ = joined(flow)
    before_s = time.monotonic() + flow.log.epoch_s
    size(flow, feeder)
    spans, _ = recorded(flow)
    pack = next(span for span in spans if span.name == "pack")
    assert before_s <= pack.start_s <= pack.end_s <= time.monotonic() + flow.log.epoch_s
    assert (pack.actor, pack.args) == ("coordinator", {"step": 1})


def test_steps_that_are_asked_for_are_traced_and_no_more() -> None:
    flow = build_flow(num_steps=5, dp_size=1)
    feeder, encoder = joined(flow)
    names = []
    for step in range(1, 6):
        if step == 3:
            flow.steps.begin(step - 1)  # it is running already
            assert flow.trace.ask_for(1) == TraceSteps(4, 4)
        flow.trace.record((Span("x", f"step {step}", 0.0, 1.0),))
        while (order := flow.feed_order(feeder.index)) is not None and order.unit is not None:
            feeder.free(order.released)
            flow.feed(feeder.index, feeder.make(order.unit, order.remake))
        encode_all(flow, encoder)
        run(flow, step - 1)
        names += [span.name for span in recorded(flow)[0] if span.actor == "x"]
    assert names == ["step 3", "step 4"], "also what is left of the step that runs"


def test_more_steps_do_not_shorten_what_is_traced() -> None:
    flow = build_flow(num_steps=5, trace_steps=4, dp_size=1)
    assert flow.trace.ask_for(1) == TraceSteps(1, 1)
    assert flow.trace.is_on
    joined(flow)
    assert flow.log.is_tracing(3) and not flow.log.is_tracing(4)


def test_reports_of_a_lost_process_are_no_counters() -> None:
    flow = build_flow(trace_steps=3, dp_size=1)
    _, encoder = joined(flow)
    flow.process_lost("encoder-0")
    recorded(flow)
    flow.hand_in(encoder.index, EncoderReport(stats=encoder.stats))
    assert [each for each in recorded(flow)[1] if each.actor == "encoder-0"] == []


def test_the_driver_hears_for_how_long_a_process_was_gone() -> None:
    flow = build_flow(dp_size=1)
    joined(flow)
    flow.process_lost("encoder-0")
    assert flow.log.take() == () and not flow.log.has_news, "it is not back yet"
    flow.join("encoder-0", "node")
    assert flow.log.has_news, "also where nothing is traced"
    (event,) = flow.log.take()
    assert isinstance(event, Rejoined) and event.name == "encoder-0" and event.down_s >= 0.0


def test_what_the_trace_gets_between_two_other_events_is_one_event_before_the_second() -> None:
    flow = build_flow(trace_steps=3, dp_size=1)
    for number in range(2):
        flow.trace.record((Span("x", f"work {number}", 0.0, 1.0),))
        flow.trace.ahead()
    flow.log.checkpoint_failed(1, "no room")
    flow.trace.record((Span("x", "more work", 1.0, 2.0),))
    first, failed, second = flow.log.take()
    assert isinstance(first, SpansRecorded) and [span.name for span in first.spans] == ["work 0", "work 1"]
    assert len(first.counters) == 4 and isinstance(failed, CheckpointFailed)
    assert isinstance(second, SpansRecorded) and len(second.spans) == 1 and second.counters == ()
    assert flow.log.take() == ()
