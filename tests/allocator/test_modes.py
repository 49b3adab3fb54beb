"""All modes under one model: who wins, who cannot, and that nothing wins by less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.mode_rating import ModeComparison, ModeRating
from flowtrain.allocator.mode_reasons import AS_FAST, SIMPLER
from flowtrain.allocator.modes import compare_modes
from flowtrain.allocator.program.solvers import Solver
from flowtrain.allocator.request import Request
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.allocator.whole import Found, whole_candidates
from flowtrain.costs.cluster import Cluster
from flowtrain.costs.flops import FloatArray
from flowtrain.costs.profile_together import ASSUMED_INTERFERENCE
from flowtrain.costs.roofline import Roofline
from flowtrain.errors import ConfigError
from flowtrain.types.run_plan import BackboneSettings, Mode
from tests.allocator.worlds import MODEL, cluster, request, roofline_surrogate, several, with_memory, workload

MODES: tuple[Mode, ...] = (*SIMPLER, "llm_only")
TINY = replace(MODEL, backbone=replace(MODEL.backbone, num_layers=4))
DEVICES = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 40])
EVEN = {
    "lengths": np.array([2048]),
    "vision_lengths": np.array([1024]),
    "target_lengths": np.array([256]),
    "images": {"vision": (np.array([2]), np.array([1024]))},
}


def compare(asked: Request, modes: Sequence[Mode] = MODES) -> ModeComparison:
    return compare_modes(asked, roofline_surrogate, None, modes)


def by_mode(found: ModeComparison) -> dict[Mode, ModeRating]:
    return {each.mode: each for each in found.ratings}


class Interfering(Roofline):
    """Encoder and backbone at once take half as long again as one after the other."""

    def slowdown(self, encoder: str) -> float | None:
        return 1.5


class Busy(Roofline):
    """Feeding and planning take a second of a step from the devices."""

    def host_s(self, num_microbatches: FloatArray, replicas: FloatArray, *, has_encoders: bool) -> FloatArray:
        return np.ones_like(num_microbatches)


def surrogate_with(times_of: type[Roofline], asked: Request) -> Surrogate:
    times = {each.name: times_of(each, asked.model, asked.workload, asked.setup) for each in asked.cluster.device_types}
    return Surrogate(asked.cluster, asked.model, asked.workload, asked.setup, times, slices=asked.slices)


interfering, busy = partial(surrogate_with, Interfering), partial(surrogate_with, Busy)


def test_every_mode_has_a_plan_that_starts() -> None:
    found = compare(request(cluster(h200=16)))
    ratings = by_mode(found)
    assert set(ratings) == set(MODES) and found.allocation is not None
    for mode, rating in ratings.items():
        assert rating.rate is not None and rating.reason and rating.devices <= 16, mode
        assert rating.modules[-1].name == "backbone" and rating.modules[-1].memory is not None
        assert all(each.peak_nbytes <= each.memory_nbytes for each in rating.modules)
        assert (rating.encoder_layers is not None) == (mode == "monolithic")
        assert len(rating.modules) == (1 if mode in ("monolithic", "llm_only") else 2)
    encoder, backbone = ratings["colocated"].modules
    assert encoder.devices == backbone.devices == ratings["colocated"].devices
    assert "a bound" in ratings["llm_only"].reason


@settings(deadline=None, max_examples=8)
@given(DEVICES, st.sampled_from([64, 250, 256]), st.booleans())
def test_nothing_is_faster_than_the_winner_and_the_bound(devices: int, batch: int, is_even: bool) -> None:
    data = workload(global_batch_size=batch, **(EVEN if is_even else {}))
    found = compare(request(cluster(h200=devices), TINY, data))
    rates = [each.rate for each in found.ratings if each.rate is not None and each.mode != "llm_only"]
    winner, bound = found.winner, by_mode(found)["llm_only"].rate
    assert winner.rate is not None and bound is not None and winner.mode != "llm_only"
    assert winner.rate >= AS_FAST * max(rates)
    # Others are in order. Drawn batches may pack a little better for one number of replicas than for another.
    assert all(fast >= slow * 0.999 for fast, slow in pairwise(rates[1:]))
    assert max(rates) <= 1.01 * bound
    assert found.ratings == compare(request(cluster(h200=devices), TINY, data)).ratings


@settings(deadline=None, max_examples=20)
@given(DEVICES, st.sampled_from(["colocated", "monolithic", "llm_only"]))
def test_more_devices_never_lower_a_rate(devices: int, mode: Mode) -> None:
    def best(count: int) -> float:
        return whole_candidates(request(cluster(h200=count), TINY), roofline_surrogate, mode).candidates[0].rate_formula

    assert best(devices + 8) >= best(devices) * (1 - 1e-9)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([1, 2, 8, 16]), st.integers(0, 4))
def test_more_vision_never_makes_a_mode_faster(devices: int, more: int) -> None:
    """The sequences stay as long, the images have more patches."""
    rates: dict[str, list[float]] = {"colocated": [], "monolithic": []}
    for patches in (1024, 1024 * (1 + more)):
        data = workload(images={"vision": (np.array([2, 0]), np.array([patches, 0]))})
        for mode, found in rates.items():
            (best, *_) = whole_candidates(
                request(cluster(h200=devices), TINY, data), roofline_surrogate, mode
            ).candidates
            found.append(best.rate_formula)
    for mode, (less, much) in rates.items():
        assert much <= less * (1 + 1e-9), mode
    assert more == 0 or rates["monolithic"][1] < rates["monolithic"][0]


def test_colocated_pays_for_its_interference() -> None:
    encoder = replace(MODEL.encoders["vision"], num_layers=48, hidden_size=3200, intermediate_size=12800, num_heads=25)
    large = replace(TINY, encoders={"vision": encoder})
    asked = request(cluster(h200=8), large)  # such an encoder does not fit into the backbone's waits
    plain, slow = (
        whole_candidates(asked, surrogate_for, "colocated").candidates[0]
        for surrogate_for in (roofline_surrogate, interfering)
    )
    assert slow.rate_formula < plain.rate_formula
    assert "1.50 times as long as both alone (measured)" in next(
        each.reason for each in compare_modes(asked, interfering, None, MODES).ratings if each.mode == "colocated"
    )
    winner = compare_modes(asked, interfering, None, SIMPLER).winner
    assert winner.mode == "monolithic"


def test_the_runs_own_processes_take_time_from_encoders_first_and_from_ranks_that_wait_for_each_other() -> None:
    asked = request(cluster(h200=8), TINY)
    lost = {}
    for mode in SIMPLER:
        plain, slow = (compare_modes(asked, each, Solver(), [mode]).winner for each in (roofline_surrogate, busy))
        assert plain.rate is not None and slow.rate is not None
        lost[mode] = 256 / slow.rate - 256 / plain.rate
    assert lost["monolithic"] == pytest.approx(1.0, rel=0.05)
    assert lost["colocated"] == pytest.approx(1 / 8, rel=0.05)
    assert 0 <= lost["decoupled"] <= 1 / 8 + 1e-9


def test_encoders_that_need_the_same_devices_leave_less_memory() -> None:
    asked = request(cluster(h200=4), TINY)
    alone = whole_candidates(asked, roofline_surrogate, "llm_only").candidates[0]
    peak = asked.peak_nbytes(alone.backbone)
    tight = with_memory(asked, int(peak * 1.01))
    beside = whole_candidates(tight, roofline_surrogate, "colocated")
    for each in beside.candidates:
        parts = [tight.peak_nbytes(module) for module in (each.backbone, *each.encoders.values())]
        assert sum(parts) <= int(peak * 1.01)


def test_what_fits_nowhere_is_last_with_a_reason() -> None:
    asked = request(cluster(h200=2), TINY)
    peak = asked.peak_nbytes(whole_candidates(asked, roofline_surrogate, "llm_only").candidates[0].backbone)
    found = None
    # Somewhere between too little for all and enough for all, some modes fit.
    for nbytes in np.linspace(0.5 * peak, 1.2 * peak, 29).astype(int).tolist():
        try:
            found = compare(with_memory(asked, nbytes), SIMPLER)
        except ConfigError:
            continue
        if found.ratings[-1].rate is None:
            break
    assert found is not None and found.ratings[-1].rate is None
    assert found.ratings[-1].reason.startswith("does not fit: ")
    assert not found.ratings[-1].modules and found.winner.rate is not None


def test_nothing_fits() -> None:
    asked = with_memory(request(cluster(h200=2)), 2**30)
    with pytest.raises(ConfigError, match="backbone has no feasible configuration"):
        compare(asked, ["decoupled"])
    with pytest.raises(ConfigError, match="mode monolithic: does not fit: a h200 needs at least"):
        compare(asked)


def test_only_ranks_train_an_encoder() -> None:
    found = compare(request(cluster(h200=8), TINY, workload(freeze=())))
    assert found.winner.mode == "monolithic" and found.allocation is None
    rest = {each.mode: each.reason for each in found.ratings if each.rate is None}
    assert set(rest) == {"decoupled", "colocated", "disaggregated"}
    assert all("only monolithic trains an encoder" in each for each in rest.values())


def test_ranks_have_one_encoder() -> None:
    model, data = several(("near", "wide"))
    found = compare(request(cluster(h200=8), replace(model, backbone=TINY.backbone), data))
    assert found.ratings[-1].mode == "monolithic" and "there are 2" in found.ratings[-1].reason
    assert [each.name for each in by_mode(found)["colocated"].modules] == ["near", "wide", "backbone"]


def test_the_bound_never_wins() -> None:
    """Nothing trains one of two encoders, and a plan without images is none."""
    model, data = several(("near", "wide"))
    asked = request(cluster(h200=8), replace(model, backbone=TINY.backbone), replace(data, freeze=()))
    assert compare(asked, ["llm_only"]).winner.mode == "llm_only", "unless it is the only one"
    with pytest.raises(ConfigError, match=r"(?s)mode decoupled: cannot run.*mode monolithic: cannot run"):
        compare(asked)


def test_modes_on_shared_devices_take_the_best_type() -> None:
    both = Cluster((*cluster(l4=8).device_types, *cluster(h200=8).device_types))
    found = by_mode(compare(request(both, TINY)))
    assert {each.device_type for each in found["colocated"].modules} == {"h200"}
    assert {each.device_type for each in found["monolithic"].modules} == {"h200"}
    assert found["decoupled"].modules[0].name == "vision@l4", "the encoder has devices of its own then"


def test_one_device_is_shared_in_turns_or_at_once() -> None:
    found = compare(request(cluster(h200=1), TINY))
    assert found.allocation is not None and found.allocation.shared
    ratings = by_mode(found)
    assert {each.devices for each in found.ratings} == {1}
    assert ratings["decoupled"].modules == found.allocation.modules
    whole_s, backbone_s = (1.0 / ratings[mode].rate for mode in ("monolithic", "llm_only"))
    at_once_s = 2.0 * min(whole_s - backbone_s, backbone_s)  # the shorter side's time, of which it gets half
    slowed_s = (ASSUMED_INTERFERENCE - 1.0) * at_once_s
    assert slowed_s > 0.002 * whole_s
    assert 1.0 / ratings["decoupled"].rate == pytest.approx(whole_s + slowed_s, rel=0.001)
    assert ratings["decoupled"].rate == ratings["disaggregated"].rate == ratings["colocated"].rate, "the same there"


def test_a_mode_by_itself() -> None:
    for mode in MODES:
        found = compare(request(cluster(h200=8), TINY), [mode])
        assert [each.mode for each in found.ratings] == [mode]
        assert "the only mode" in found.winner.reason


def test_settings_are_chosen_with_the_mode() -> None:
    """Recomputing nothing is faster where it fits, and ``full`` is there where it does not."""
    choices = tuple(BackboneSettings(8192, word, 1, "full") for word in ("full", "none"))
    asked = replace(request(cluster(h200=8)), choices=choices)
    found = compare(asked)
    for rating in found.ratings:
        assert rating.settings is not None and rating.settings.activation_checkpointing == "none", rating.mode
    peak = asked.decided().peak_nbytes(
        whole_candidates(asked.decided(), roofline_surrogate, "llm_only").candidates[0].backbone
    )
    tight = compare(with_memory(asked, int(1.02 * peak)))
    assert any(each.settings is not None and each.settings.activation_checkpointing == "full" for each in tight.ratings)


def test_candidates_are_best_first_and_varied() -> None:
    found: Found = whole_candidates(request(cluster(h200=16), TINY), roofline_surrogate, "colocated")
    rates = [each.rate_formula for each in found.candidates]
    assert rates == sorted(rates, reverse=True) and 1 < len(rates) <= 20
    degrees: list[Any] = [each.backbone.degrees for each in found.candidates]
    assert max(degrees.count(each) for each in degrees) <= 3
