"""Ranks with encoder and backbone layers: their time is that of the schedule they run, their memory that of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator import monolithic
from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.request import Request
from flowtrain.allocator.slices import Slices
from flowtrain.allocator.surrogate import Surrogate, calls_s
from flowtrain.allocator.whole import whole_candidates
from flowtrain.costs.cluster import Cluster, Links, data_sheet_device_type
from flowtrain.costs.roofline import Roofline
from flowtrain.pipeline.actions import Action, StageModule
from flowtrain.pipeline.dataflow import trace_dataflow
from flowtrain.pipeline.schedules.one_f_one_b import one_f_one_b
from flowtrain.pipeline.transfers import run_orders
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings, EncoderPlace
from tests.allocator.test_surrogate import ENDLESS, PERFECT
from tests.allocator.worlds import MODEL, SETUP, VISION, cluster, request, roofline_surrogate, with_memory, workload
from tests.pipeline.test_schedules import STEP

PLACES = st.sampled_from(monolithic.PLACES)


def world(chunks: int = 1, width: int = 1, **changes: object) -> tuple[Request, Surrogate]:
    """Links cost nothing; the encoder is ``width`` times as wide."""
    kind = replace(data_sheet_device_type("h200", 1024), links=ENDLESS)
    vision = replace(VISION, hidden_size=1024 * width, intermediate_size=4096 * width)
    model, data = replace(MODEL, encoders={"vision": vision}), workload(**changes)
    asked = replace(request(Cluster((kind,)), model, data), slices=Slices(chunks))
    times = {"h200": Roofline(kind, model, data, SETUP, PERFECT)}
    return asked, Surrogate(asked.cluster, model, data, SETUP, times, 1.0, slices=asked.slices)


def columns(dp: int = 1, pp: int = 1, tp: int = 1) -> CandidateColumns:
    return CandidateColumns("backbone", "h200", *(np.array([degree]) for degree in (dp, pp, tp)))


def simulated_s(asked: Request, found: Surrogate, one: CandidateColumns, place: EncoderPlace) -> float:
    """Seconds of the action lists that ranks run, without the optimizer."""
    partition, data = monolithic.monolithic_partition(asked, int(one.pp[0]), place), asked.workload
    count = int(data.num_microbatches(one.dp)[0])
    tokens, times = data.fullest_tokens(one.dp) / count, found.times["h200"]
    layer, connector, head = (float(each(tokens, 1)[0]) for each in (times.layer_s, times.connector_s, times.head_s))
    encoder = float(monolithic.images_of_rank_s(asked, found, one)[0]) / count
    last = len(partition.of_module(StageModule.BACKBONE)) - 1

    def seconds(action: Action) -> float:
        layers = len(partition.of_module(action.module)[action.stage].layers)
        if action.module is StageModule.ENCODER:
            return encoder * layers / VISION.num_layers
        whole = layers * layer + (action.stage == 0) * connector + (action.stage == last) * head
        return whole * (1 / 3 if STEP[action.kind] > 0 else 2 / 3)

    lists = one_f_one_b(partition, count)
    orders = [[action for action in actions if action.kind.is_compute] for actions in lists]
    flow = trace_dataflow(orders, training=True, num_microbatches=count, frozen=partition.frozen)
    return max(spans[-1][1] for spans in run_orders(orders, flow, seconds))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 2), PLACES, st.integers(1, 3), st.sampled_from([1, 2, 5]))
def test_a_step_takes_as_long_as_its_action_lists(
    pp: int, chunks: int, place: EncoderPlace, width: int, dp: int
) -> None:
    asked, found = world(chunks if pp > 1 else 1, width)
    one = columns(dp, pp)
    seconds = float(monolithic.step_s(asked, found, one, place)[0])
    loads = monolithic.rank_loads(asked, pp, place)
    update = float(found.optimizer_s(one, monolithic.held(asked, one, loads))[0])
    assert seconds - update == pytest.approx(simulated_s(asked, found, one, place), rel=0.06)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 16), st.sampled_from([1, 2, 4]), PLACES, st.integers(1, 3), st.integers(1, 64))
def test_no_partition_is_faster_than_the_bound(pp: int, tp: int, place: EncoderPlace, width: int, dp: int) -> None:
    """The search looks at the rest only while the bound is above what it has."""
    asked, found = world(width=width)
    one = columns(dp, pp, tp)
    parts = monolithic.PartTimes.of(asked, found, one)
    assert float(monolithic.least_step_s(asked, one, parts)[0]) <= float(
        monolithic.step_s(asked, found, one, place)[0]
    ) * (1 + 1e-9)


def test_one_rank_encodes_first_and_computes_then() -> None:
    asked, found = world()
    step = found.step_time(Candidate("backbone", "h200", Degrees()))
    images = 256 * float(found.times["h200"].images_s("vision", 1).mean())
    assert monolithic.step_s(asked, found, columns(), "first") == pytest.approx(step.total + images)


def test_a_replica_more_than_samples_allow_does_not_help() -> None:
    """8 samples on 5 replicas take as long as on 4: the fullest has two."""
    even = {
        "lengths": np.array([2048]),
        "vision_lengths": np.array([1024]),
        "target_lengths": np.array([256]),
        "images": {"vision": (np.array([2]), np.array([1024]))},
    }
    asked, found = world(global_batch_size=8, **even)
    four, five = (monolithic.images_of_rank_s(asked, found, columns(dp))[0] for dp in (4, 5))
    assert four == five


def test_a_trained_encoder_takes_four_times_as_long_if_it_is_recomputed() -> None:
    (_, frozen), (_, trained) = world(), world(freeze=())
    once, often = (each.times["h200"].images_s("vision", 1) for each in (frozen, trained))
    assert often[1] == 0.0 and 3.9 < often[0] / once[0] <= 4.0


def test_ranks_lease_no_batches_and_send_no_features() -> None:
    """The encoder's features take longer to leave the node than to compute here."""
    asked, _ = world()
    slow = Links(node=1e30, network=1.0, host=1e30, source="test")
    devices = Cluster(tuple(replace(each, links=slow) for each in asked.cluster.device_types))
    times = roofline_surrogate(replace(asked, cluster=devices)).times["h200"]
    free = roofline_surrogate(asked).times["h200"]
    in_ranks = times.images_s("vision", 1, together=1.0)[0]
    assert times.images_s("vision", 1)[0] > 1e3 * in_ranks
    assert in_ranks == free.images_s("vision", 1)[0]


def test_ranks_of_a_trained_encoder_hold_and_sum_its_parameters() -> None:
    asked, _ = world(freeze=())
    frozen, _ = world()
    one = columns(8, 2)
    more = {
        place: monolithic.held(asked, one, monolithic.rank_loads(asked, 2, place)).total
        - monolithic.held(frozen, one, monolithic.rank_loads(frozen, 2, place)).total
        for place in monolithic.PLACES
    }
    assert all(each[0] > 0.0 for each in more.values())


def test_memory_is_that_of_a_run() -> None:
    asked, _ = world()
    candidate = Candidate("backbone", "h200", Degrees(2, 2, 1))
    peaks = {place: monolithic.memory(asked, candidate, place) for place in monolithic.PLACES}
    assert all(each.frozen and each.encoding for each in peaks.values())
    assert peaks["own"].frozen < peaks["first"].frozen
    assert peaks["first"].peak <= asked.backbone_memory(candidate).peak + monolithic.added_nbytes(asked)


@pytest.mark.parametrize("freeze", [("encoders",), ()])
@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_stages_of_an_encoder_of_their_own_take_more_transfers(pp: int, chunks: int, freeze: tuple[str, ...]) -> None:
    """Each rank starts and waits for as many transfers of a microbatch as its action list has, none with less."""
    asked, _ = world(chunks, freeze=freeze)
    times = Mock(microbatch_s=lambda size: np.zeros(len(size)), launch_s=1.0, pass_s=0.0)
    for place in monolithic.places(asked, pp):
        partition, one = monolithic.monolithic_partition(asked, pp, place), columns(1, pp)
        schedule = one_f_one_b(partition, 4 * pp)
        ends = [sum(action.kind.is_launch for action in actions) for actions in schedule]
        seconds = calls_s(times, one, chunks) + monolithic.own_calls_s(asked, times, one, place)
        assert seconds[0] == max(ends) / (4 * pp), place


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("gib", [6.7, 14.4, 24.8, 28.0])
def test_the_search_finds_the_best_that_fits(is_trained: bool, gib: float) -> None:
    """What fits without the encoder may not with it, and then more recomputation or reductions may."""
    choices = tuple(BackboneSettings(8192, word, 1, "full") for word in ("none", "selective", "full"))
    model, data = replace(MODEL, backbone=replace(MODEL.backbone, num_layers=4)), workload()
    asked = request(cluster(h200=8), model, replace(data, freeze=()) if is_trained else data)
    asked = with_memory(replace(asked, choices=choices, chooses_reduction=True), int(gib * 2**30))

    def rates() -> Iterator[float]:
        for chosen, reduction in product(choices, ("step", "microbatch")):
            at = asked.with_settings(chosen)
            for dp, pp, tp in product(range(1, 9), (1, 2, 4), (1, 2, 4, 8)):
                one = Candidate("backbone", "h200", Degrees(dp, pp, tp), gradient_reduction=reduction)
                for place in monolithic.places(at, pp) if dp * pp * tp <= 8 else ():
                    if monolithic.memory(at, one, place).peak <= int(gib * 2**30):
                        step = monolithic.step_s(at, roofline_surrogate(at), CandidateColumns.of(one), place)
                        yield 256 / float(step[0])

    found = whole_candidates(asked, roofline_surrogate, "monolithic").candidates
    assert (found[0].rate_formula if found else 0.0) == pytest.approx(max(rates(), default=0.0))
    for each in found:
        assert each.encoder_layers is not None
        assert monolithic.memory(asked.of(each.backbone), each.backbone, each.encoder_layers).peak <= gib * 2**30


def test_where_layers_cannot_be_cut_so_is_no_place() -> None:
    asked, _ = world()
    assert monolithic.places(asked, 1) == ("first",)
    assert monolithic.places(asked, 24) == monolithic.PLACES
    assert monolithic.places(asked, 32) == ("first", "mixed"), "the encoder has 24 layers"


def test_the_search_passes_over_pipelines_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given partition may have none for some numbers of ranks."""
    places = monolithic.places
    monkeypatch.setattr(monolithic, "places", lambda asked, pp: places(asked, pp) if pp == 1 else ())
    found = whole_candidates(request(cluster(h200=8), MODEL, workload()), roofline_surrogate, "monolithic").candidates
    assert found and all(each.backbone.degrees.pp == 1 for each in found)
