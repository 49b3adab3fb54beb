"""Units that several feeders size: each takes unit after unit, and a unit is planned when all have reported."""

from __future__ import annotations

import itertools

import pytest

from flowtrain.flow.flow import ASK_AGAIN, Flow
from flowtrain.types.events import Rejected
from flowtrain.types.messages import EncoderReport, FeedReport
from flowtrain.types.samples import SamplerState
from tests.flow.simulation import (
    BATCH,
    VISION,
    SimulatedFeeder,
    build_flow,
    feeder_of,
    is_found_bad_early,
    planner_of,
    sample_of,
)

NUM_FEEDERS = 3


def joined(flow: Flow) -> list[SimulatedFeeder]:
    return [join(flow, number) for number in range(NUM_FEEDERS)]


def join(flow: Flow, number: int) -> SimulatedFeeder:
    index = flow.join(f"feeder-{number}", "node", number).process_index
    return SimulatedFeeder(index, number=number, num_feeders=NUM_FEEDERS)


def rejected(flow: Flow) -> list[Rejected]:
    return [event for event in flow.log.take() if isinstance(event, Rejected)]


def feed(flow: Flow, feeder: SimulatedFeeder) -> FeedReport:
    """Let a feeder carry out its order, and return its report."""
    order = flow.feed_order(feeder.index)
    assert order is not None
    report = feeder.make(order.unit, order.remake, order.consumed)
    flow.feed(feeder.index, report)
    return report


@pytest.mark.parametrize("order", list(itertools.permutations(range(NUM_FEEDERS))))
def test_a_unit_is_planned_with_the_last_share_and_whoever_comes_last(order: tuple[int, ...]) -> None:
    flow = build_flow(num_feeders=NUM_FEEDERS, dp_size=1)
    feeders = joined(flow)
    for number in order:
        assert flow.plan_of(0) is None
        feed(flow, feeders[number])
    plan = flow.plan_of(0)
    assert plan is not None
    samples = [sample_of(position) for position in range(BATCH) if not is_found_bad_early(position)]
    assert plan == planner_of(1).plan(plan.unit, samples)


def test_samples_come_in_the_order_of_their_positions() -> None:
    flow = build_flow(num_feeders=2, dp_size=1)
    unit = flow.steps.upcoming()
    assert unit is not None
    for number in (1, 0):
        flow.feeding.join(number, number)
        mine = tuple(sample_of(position) for position in range(BATCH) if position % 2 == number)
        sized = flow.feeding.report(number, FeedReport(unit, mine, sampler_state=SamplerState(BATCH)))
        assert (sized is None) == (number == 1)
    assert sized is not None
    assert [sample.position for sample in sized.samples] == list(range(BATCH))
    assert sized.sampler_state == SamplerState(BATCH)


def test_rejections_are_counted_by_whole_units() -> None:
    """Else a feeder that is ahead, with bad rows, could end a run that has few of them."""
    flow = build_flow(num_feeders=NUM_FEEDERS, lookahead=2, dp_size=1)
    feeders = joined(flow)
    ahead, *others = sorted(feeders, key=lambda feeder: feeder.number != feeder_of(7, NUM_FEEDERS))
    reports = [feed(flow, ahead) for _ in range(2)]
    assert any(report.rejections for report in reports) and not rejected(flow)
    for feeder in others:
        reports += [feed(flow, feeder) for _ in range(2)]
    events = rejected(flow)
    assert [r for event in events for r in event.rejections] == sorted(
        (r for report in reports for r in report.rejections), key=lambda r: r.ref.position
    )
    assert all(event.num_seen % BATCH == 0 for event in events)


def test_a_feeder_runs_ahead_of_others_as_far_as_the_lookahead() -> None:
    flow = build_flow(num_steps=9, lookahead=2, num_feeders=NUM_FEEDERS)
    fast, slow, _ = joined(flow)
    units = [feed(flow, fast).unit for _ in range(3)]
    assert [unit.index for unit in units if unit is not None] == [0, 1, 2]
    assert flow.feed_order(fast.index) is None
    order = flow.feed_order(slow.index)
    assert order is not None and order.unit is not None and order.unit.index == 0


def test_each_successor_continues_where_its_own_predecessor_was() -> None:
    flow = build_flow(num_steps=9, lookahead=2, num_feeders=NUM_FEEDERS)
    fast, slow, _ = joined(flow)
    for _ in range(2):
        feed(flow, fast)
    states = [flow.join(f"feeder-{number}", "node", number).sampler_state for number in range(NUM_FEEDERS)]
    assert states == [SamplerState(2 * BATCH), SamplerState(0), SamplerState(0)]
    flow.feed(slow.index, slow.make(flow.steps.upcoming(), ()))
    assert flow.feeding.next_unit(slow.index) == flow.steps.upcoming(), "the dead one's report counts for nothing"


def test_a_feeder_lost_before_its_unit_is_complete_is_replaced_in_that_unit() -> None:
    """Its share stays; the parts of the share are produced again before the unit can be encoded."""
    flow = build_flow(num_feeders=NUM_FEEDERS, dp_size=1)
    feeders = joined(flow)
    share = feed(flow, feeders[0])
    again = join(flow, 0)
    for feeder in feeders[1:]:
        feed(flow, feeder)
    assert flow.plan_of(0) is not None
    encoder = flow.join("encoder-0", "node").process_index
    assert flow.lease_order(encoder, VISION, 1 << 16) is None, "images are lost"
    remade = feed(flow, again).remade
    assert len(remade) == len(share.texts) + len(share.images)
    assert {ready.position for ready in remade} == {p for p in range(BATCH) if feeder_of(p, NUM_FEEDERS) == 0}
    order = flow.lease_order(encoder, VISION, 1 << 16)
    assert order is not None and order.lease is not None


def test_an_encoder_that_returned_a_lease_is_asked_again_for_its_room() -> None:
    """Its next question came before it gave back the room of the lease."""
    flow = build_flow(num_feeders=NUM_FEEDERS, dp_size=1)
    for feeder in joined(flow):
        feed(flow, feeder)
    encoder = flow.join("encoder-0", "node").process_index
    order = flow.lease_order(encoder, VISION, 1 << 16)
    assert order is not None and order.lease is not None
    assert flow.lease_order(encoder, VISION, 0) is None
    flow.hand_in(encoder, EncoderReport(returned=order.lease.lease_id))
    assert flow.lease_order(encoder, VISION, 0, is_fresh=False) == ASK_AGAIN
    again = flow.lease_order(encoder, VISION, 1 << 16)
    assert again is not None and again.lease is not None
    assert (again.lease.batch, again.lease.needed) == (order.lease.batch, order.lease.needed)
