"""Rates of packed batches: those of the formula where all samples are alike, and what uneven samples cost each mode."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowtrain.allocator.drawn_batches as drawn_batches
from flowtrain.allocator import monolithic
from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.drawn import DrawnRate, drawn_rate, shared_encode_s
from flowtrain.allocator.drawn_batches import DrawnBatches, PackedBatches
from flowtrain.allocator.mode_candidate import ModeCandidate
from flowtrain.allocator.request import Request
from flowtrain.allocator.slices import Slices
from flowtrain.allocator.surrogate import BACKBONE, columns_of
from flowtrain.config.flow import SchedulerConfig
from flowtrain.costs.cluster import Cluster, Links
from flowtrain.costs.model_spec import VisionSpec
from flowtrain.costs.roofline import Roofline
from flowtrain.costs.workload import Workload
from flowtrain.simulator.encoders import EncodedStep
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import EncoderPlace, Mode
from tests.allocator.worlds import MODEL, VISION, cluster, request, roofline_surrogate, workload

DEVICES = 64


def even(batch: int = 256) -> Workload:
    """Samples that are all alike: four fill a microbatch."""
    patches = np.array([1024])
    images = {"vision": (np.array([1]), patches)}
    return workload(
        global_batch_size=batch,
        lengths=np.array([2048]),
        vision_lengths=patches,
        target_lengths=np.array([1024]),
        images=images,
        fill=1.0,
    )


def uneven(seed: int, batch: int = 64, count: int = 200) -> Workload:
    """Lognormal text, and up to four images."""
    rng = np.random.default_rng(seed)
    num_images = rng.integers(0, 5, count)
    num_images[0] = 1
    patches = num_images * 576
    text = np.clip(rng.lognormal(6.0, 0.8, count), 16, 4096).astype(np.int64)
    return workload(
        global_batch_size=batch,
        lengths=text + patches,
        vision_lengths=patches,
        target_lengths=text,
        images={"vision": (num_images, patches)},
    )


LARGE = replace(VISION, num_layers=48, hidden_size=3200, intermediate_size=12800, num_heads=25)
"""An encoder that takes a good share of the time."""


def asked_for(data: Workload, *, without_links: bool = False, encoder: VisionSpec = VISION) -> Request:
    """without_links: communication takes no time."""
    devices = cluster(h200=DEVICES)
    if without_links:
        links = Links(node=1e30, network=1e30, host=1e30, source="test")
        devices = Cluster(tuple(replace(each, links=links) for each in devices.device_types))
    return request(devices, replace(MODEL, encoders={"vision": encoder}), data)


def candidate(mode: Mode, backbone: Degrees, encoder: Degrees | None = None) -> ModeCandidate:
    encoders = {} if encoder is None else {"vision": Candidate("vision", "h200", encoder)}
    return ModeCandidate(mode, Candidate(BACKBONE, "h200", backbone), encoders)


def rate(
    asked: Request, found: ModeCandidate, lookahead: int = 2, count: int | None = None, seed: int = 0
) -> DrawnRate:
    batches = DrawnBatches.draw(asked.workload, count, seed, SchedulerConfig(lookahead_steps=lookahead))
    return drawn_rate(asked, roofline_surrogate(asked), found, batches)


@given(
    dp=st.sampled_from([1, 2, 4, 8, 16]),
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    encoders=st.integers(1, 6),
)
def test_equal_samples_give_the_rates_of_the_formula(dp: int, pp: int, tp: int, encoders: int) -> None:
    asked = asked_for(even())
    surrogate = roofline_surrogate(asked)
    found = candidate("decoupled", Degrees(dp, pp, tp), Degrees(encoders))
    formula = min(surrogate.rate(found.backbone), surrogate.rate(found.encoders["vision"]))
    drawn = rate(asked, found)
    assert drawn.rate == pytest.approx(formula, rel=0.01)
    assert drawn.imbalance == pytest.approx(0.0, abs=1e-9)


def test_equal_samples_are_as_slow_as_their_encoders() -> None:
    asked = asked_for(even())
    found = candidate("decoupled", Degrees(60), Degrees(1))
    found = replace(found, encoders={"vision": Candidate("vision", "h200", Degrees(1))})
    slow = replace(asked, workload=replace(asked.workload, images={"vision": (np.array([64]), np.array([65536]))}))
    surrogate = roofline_surrogate(slow)
    drawn = rate(slow, found)
    assert drawn.rate == pytest.approx(surrogate.rate(found.encoders["vision"]), rel=0.01)
    assert drawn.starved == pytest.approx(1.0 - drawn.rate / surrogate.rate(found.backbone), abs=0.1)


@given(
    seed=st.integers(0, 50),
    dp=st.integers(1, 12),
    encoders=st.integers(1, 6),
    lookahead=st.integers(1, 3),
    encoder=st.sampled_from([VISION, LARGE]),
)
def test_decoupled_is_never_slower_than_disaggregated(
    seed: int, dp: int, encoders: int, lookahead: int, encoder: VisionSpec
) -> None:
    asked = asked_for(uneven(seed), encoder=encoder)
    decoupled, disaggregated = (
        rate(asked, candidate(mode, Degrees(dp), Degrees(encoders)), lookahead)
        for mode in ("decoupled", "disaggregated")
    )
    assert decoupled.rate >= disaggregated.rate * (1.0 - 1e-6)


@given(seed=st.integers(0, 50), dp=st.sampled_from([1, 2, 3, 8, 16]), encoder=st.sampled_from([VISION, LARGE]))
def test_without_communication_monolithic_is_never_faster_than_colocated(
    seed: int, dp: int, encoder: VisionSpec
) -> None:
    asked = asked_for(uneven(seed), without_links=True, encoder=encoder)
    asked = replace(asked, max_batch_patches={"vision": 576})
    monolithic = rate(asked, candidate("monolithic", Degrees(dp)))
    colocated = rate(asked, candidate("colocated", Degrees(dp), Degrees(dp)))
    assert monolithic.rate <= colocated.rate * (1.0 + 1e-6)


@pytest.mark.parametrize("mode", ["decoupled", "disaggregated", "colocated"])
@pytest.mark.parametrize("seed", range(4))
def test_more_lookahead_is_never_slower(mode: Mode, seed: int) -> None:
    asked = asked_for(uneven(seed, batch=16), encoder=LARGE)
    rates = [rate(asked, candidate(mode, Degrees(4), Degrees(4)), lookahead).rate for lookahead in (1, 2, 4)]
    assert rates[0] <= rates[1] * (1.0 + 1e-6) and rates[1] <= rates[2] * (1.0 + 1e-6)


def test_the_order_of_the_samples_changes_only_the_draw() -> None:
    data = uneven(0, batch=128)
    order = np.random.default_rng(1).permutation(len(data.lengths))
    images = {"vision": tuple(column[order] for column in data.images["vision"])}
    columns = {key: getattr(data, key)[order] for key in ("lengths", "vision_lengths", "target_lengths")}
    shuffled = replace(data, images=images, **columns)
    for found in (candidate("decoupled", Degrees(8), Degrees(2)), candidate("monolithic", Degrees(8))):
        first, second = (rate(asked_for(each), found) for each in (data, shuffled))
        assert first.rate == pytest.approx(second.rate, rel=0.05)


@given(seed=st.integers(0, 10**6), batch=st.sampled_from([16, 64, 300]), count=st.integers(1, 10))
def test_batches_together_have_the_datas_mix(seed: int, batch: int, count: int) -> None:
    """A random draw of as many would be a few percent off, and with it all rates."""
    data = uneven(seed % 7, batch=batch)
    drawn = DrawnBatches.draw(data, count, seed).batches
    assert drawn.shape == (count, batch)
    size = drawn_batches.SIMULATED_BATCHES
    for first in range(0, count, size):
        group = data.lengths[drawn[first : first + size]]
        spread = float(np.ptp(data.lengths)) / group.size
        assert group.mean() == pytest.approx(data.tokens_per_sample, abs=2 * spread)
    if count > 1:
        assert not np.array_equal(np.sort(drawn[0]), np.sort(drawn[1])), "single batches differ as a run's do"


@pytest.mark.parametrize(("dp", "turns"), [(1, 5), (2, 2), (4, 1)])
def test_what_a_rank_has_beyond_so_many_samples_repeats_them(dp: int, turns: int) -> None:
    """Ten thousand samples of one rank are a fifth of them, five times."""
    asked = asked_for(uneven(0, batch=10_000))
    packed = DrawnBatches.draw(asked.workload, 1).packed(asked, dp)
    each = len(packed.samples) // turns
    assert len(packed.samples) == pytest.approx(10_000 * packed.share, abs=turns)
    assert packed.num_slots % turns == 0
    slots = packed.num_slots // turns
    for turn in range(turns):
        mine = slice(turn * each, (turn + 1) * each)
        assert np.array_equal(packed.samples[mine], packed.samples[:each])
        assert np.array_equal(packed.places[mine], packed.places[:each] + turn * slots * packed.dp)
    tokens = packed.sums(asked.workload.lengths)
    assert tokens.max() <= asked.workload.microbatch_tokens
    with patch.object(drawn_batches, "_PACKED", 10_000):
        whole = DrawnBatches.draw(asked.workload, 1).packed(asked, dp)
    assert packed.num_slots == pytest.approx(whole.num_slots, rel=0.01)
    assert tokens.sum() / packed.share == pytest.approx(
        whole.sums(asked.workload.lengths).sum() / whole.share, rel=2e-3
    )


def test_the_same_seed_gives_the_same_rate() -> None:
    asked, found = asked_for(uneven(3)), candidate("decoupled", Degrees(6), Degrees(2))
    assert rate(asked, found, seed=5) == rate(asked, found, seed=5)
    assert rate(asked, found, seed=5).rate != rate(asked, found, seed=6).rate


def test_few_samples_a_step_leave_replicas_idle() -> None:
    """The formula has means; a step of 8 samples on 8 replicas is as long as the longest of them."""
    shares = []
    for batch in (8, 512):
        asked = asked_for(uneven(0, batch=batch), without_links=True)
        found = candidate("llm_only", Degrees(8))
        drawn = rate(asked, found)
        shares.append(drawn.rate / roofline_surrogate(asked).rate(found.backbone))
        assert drawn.imbalance >= 0.0
    few, many = shares
    assert few < 0.75 < 0.95 < many


def test_images_on_their_own_replica_are_stragglers() -> None:
    """Microbatches are balanced by the backbone's cost, so images differ; shared among all, they do not."""
    asked = asked_for(uneven(0), without_links=True, encoder=LARGE)
    monolithic, backbone = (rate(asked, candidate(mode, Degrees(16))) for mode in ("monolithic", "llm_only"))
    assert monolithic.imbalance > backbone.imbalance + 0.005


def test_a_monolithic_step_of_equal_samples_adds_up_on_one_rank() -> None:
    asked = asked_for(even(), without_links=True)
    surrogate, found = roofline_surrogate(asked), candidate("monolithic", Degrees(8))
    images = 256 / 8 * float(surrogate.times["h200"].images_s("vision", 1)[0])
    step_s = float(surrogate.step_time(found.backbone).total[0]) + images
    assert rate(asked, found).rate == pytest.approx(256 / step_s)


def test_a_monolithic_pipeline_goes_at_the_pace_of_its_slowest_rank() -> None:
    asked = asked_for(even(), without_links=True, encoder=LARGE)
    rates = {
        place: rate(asked, replace(candidate("monolithic", Degrees(2, 4)), encoder_layers=place)).rate
        for place in ("first", "mixed", "own")
    }
    backbone = rate(asked, candidate("llm_only", Degrees(2, 4))).rate
    assert max(rates.values()) < backbone
    assert rates["first"] <= rates["mixed"] * 1.001, "an indivisible encoder cannot be balanced better"


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_hybrid_sharding_wait_for_their_own_replicas(seed: int) -> None:
    asked, found = asked_for(uneven(seed, batch=256), without_links=True), candidate("llm_only", Degrees(16))
    types = tuple(
        replace(each, bandwidth=1e30) for each in asked.cluster.device_types
    )  # so the optimizer takes no time
    asked = replace(asked, cluster=Cluster(types))
    hybrid = replace(asked, setup=replace(asked.setup, sharding="hybrid", shard_size=2))
    joined, apart = rate(asked, found), rate(hybrid, found)
    assert apart.imbalance == joined.imbalance, "the same microbatches"
    assert apart.rate > 1.001 * joined.rate


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("place", ["first", "mixed", "own"])
def test_equal_samples_give_a_monolithic_pipeline_the_formula(place: EncoderPlace, pp: int, chunks: int) -> None:
    asked = replace(asked_for(even(), encoder=LARGE), slices=Slices(chunks))
    found = replace(candidate("monolithic", Degrees(4, pp)), encoder_layers=place)
    step_s = monolithic.step_s(asked, roofline_surrogate(asked), columns_of(found.backbone), place)
    assert rate(asked, found).rate == pytest.approx(256 / float(step_s[0]), rel=0.002)


@given(
    dp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    slowdown=st.floats(0.9, 2.0),
    device=st.sampled_from(["h200", "cpu"]),
    encoder=st.sampled_from([VISION, LARGE]),
    saved_s=st.sampled_from([0.0, 1.0]),
)
def test_equal_samples_give_colocated_devices_the_formula(
    dp: int, pp: int, slowdown: float, device: str, encoder: VisionSpec, saved_s: float
) -> None:
    """saved_s: of a step's first backward, a parameter; no more than half of the backward."""
    with patch.object(Roofline, "first_backward_s", lambda self, trained: saved_s * trained):
        check_colocated(dp, pp, slowdown, device, encoder)


def check_colocated(dp: int, pp: int, slowdown: float, device: str, encoder: VisionSpec) -> None:
    asked = replace(asked_for(even(), encoder=encoder), max_batch_patches={"vision": 1024})
    devices = tuple(replace(each, name=device) for each in asked.cluster.device_types)
    asked = replace(asked, cluster=Cluster(devices))
    found = ModeCandidate(
        "colocated",
        Candidate(BACKBONE, device, Degrees(dp, pp)),
        {"vision": Candidate("vision", device, Degrees(dp * pp))},
    )
    surrogate, columns = roofline_surrogate(asked), columns_of(found.backbone)
    step = surrogate.step_times(columns)
    encoding = 256 * surrogate.times[device].sample_s("vision", 1) / (dp * pp)
    work = float(surrogate.busy_s(columns, step)[0])
    assert pp == 1 or work == step.total[0], "a pipeline's fill is not free"
    step_s = max(float(step.total[0]), work + encoding + 2.0 * (slowdown - 1.0) * min(encoding, work))
    drawn = drawn_rate(asked, surrogate, found, DrawnBatches.draw(asked.workload), slowdown)
    assert drawn.rate == pytest.approx(256 / step_s, rel=0.01)


def test_a_step_waits_for_the_shared_device_that_encodes_most() -> None:
    devices = {"vision": Candidate("vision", "h200", Degrees(4))}
    found = ModeCandidate("colocated", Candidate(BACKBONE, "h200", Degrees(4)), devices)
    nothing = np.zeros(0, dtype=np.int64)
    packed = PackedBatches(4, 1.0, nothing, nothing, np.array([1]))

    def shared_s(*seconds: float, work_s: float = 10.0) -> float:
        encoded = EncodedStep(np.array(seconds), np.array([len(seconds)]))
        return shared_encode_s(found, (encoded,), packed, work_s, slowdown=1.0)

    assert shared_s(1.0, 1.0, 1.0, 1.0) == 1.0
    assert shared_s(1.0, 1.0, 4.0, 1.0) == 4.0, "three devices wait for the one with the long batch"
    assert shared_s(1.0, 1.0, 4.0, 1.0, work_s=3.0) == 3.0, "the rest of it runs beside the next step"
    assert shared_s(8.0, 8.0, 8.0, 8.0, work_s=3.0) == 8.0, "but not of what all devices have to do"


@pytest.mark.parametrize("packing", ["sequential", "random"])
def test_worse_packing_is_slower(packing: str) -> None:
    asked, found = asked_for(uneven(0), without_links=True), candidate("llm_only", Degrees(4))
    scheduler = SchedulerConfig.model_validate({"packing": packing})
    batches = DrawnBatches.draw(asked.workload, 8, 0, scheduler)
    assert drawn_rate(asked, roofline_surrogate(asked), found, batches).rate < rate(asked, found, count=8).rate


@given(seed=st.integers(0, 30), dp=st.integers(1, 40), batch=st.integers(1, 80))
def test_every_drawn_sample_is_in_one_microbatch(seed: int, dp: int, batch: int) -> None:
    asked = asked_for(uneven(seed, batch=batch))
    batches = DrawnBatches.draw(asked.workload, 3, seed)
    packed = batches.packed(asked, dp)
    assert (packed.dp, packed.share) == (dp, 1.0)
    assert sorted(packed.samples.tolist()) == sorted(batches.batches.reshape(-1).tolist())
    assert packed.sums(asked.workload.lengths).max() <= asked.workload.microbatch_tokens
    assert (np.diff(packed.places) >= 0).all() and len(packed.slot_ends) == 3


@pytest.mark.parametrize("dp", [1, 7, 48, 512])
def test_parts_of_a_large_batch_stand_for_the_whole(dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_for(uneven(0, batch=3000))
    whole_or_parts = []
    for most in (10**6, 1024):
        monkeypatch.setattr(drawn_batches, "_WHOLE", most)
        batches = DrawnBatches.draw(asked.workload, 1)
        packed = batches.packed(asked, dp)
        tokens = packed.sums(asked.workload.lengths)
        whole_or_parts.append((len(tokens), tokens.max(axis=1).sum(), tokens.sum() / packed.share))
    (slots, longest, total), (part_slots, part_longest, part_total) = whole_or_parts
    assert part_slots == pytest.approx(slots, rel=0.02)
    assert part_longest == pytest.approx(longest, rel=0.03)
    assert part_total == pytest.approx(total, rel=0.02)
