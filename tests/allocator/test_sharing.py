"""One device for all modules: their times add up, and its memory must hold all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.request import Request
from flowtrain.allocator.sharing import shared_rate
from flowtrain.costs.cluster import Cluster
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster, request, roofline_surrogate, several, with_memory, workload

TINY = replace(MODEL, backbone=replace(MODEL.backbone, num_layers=2))
RATES = st.floats(0.01, 1e6)


def allocated(asked: Request) -> Allocation:
    return allocate(asked, roofline_surrogate)


@given(RATES, RATES)
def test_serial_times_add_up(encoder: float, backbone: float) -> None:
    assert 1.0 / shared_rate(encoder, backbone) == pytest.approx(1.0 / encoder + 1.0 / backbone)
    assert shared_rate(encoder, backbone) < min(encoder, backbone)


def test_a_shared_device_says_what_sharing_costs() -> None:
    alone, two = (allocated(request(cluster(h200=count), TINY)) for count in (1, 2))
    assert alone.shared and alone.devices == 1 and not two.shared and two.rate_apart is None
    encoder, backbone = alone.modules
    assert alone.rate == pytest.approx(shared_rate(encoder.production, backbone.production))
    assert alone.rate_apart == pytest.approx(two.rate)
    assert 1.0 < two.rate / alone.rate <= 2.0
    # Each waits while the other computes.
    assert encoder.waiting + backbone.waiting == pytest.approx(1.0)
    assert alone.to_dict()["shared"] is True and alone.starved == pytest.approx(backbone.waiting)


def test_several_encoders_share_with_the_backbone() -> None:
    model, data = several(("near", "wide"))
    found = allocated(request(cluster(h200=1), replace(model, backbone=TINY.backbone), data))
    assert found.shared and [module.name for module in found.modules] == ["near", "wide", "backbone"]
    assert found.rate == pytest.approx(shared_rate(*(module.production for module in found.modules)))


def test_what_fits_alone_but_not_together_is_refused() -> None:
    asked = request(cluster(h200=1), TINY)
    peaks = [asked.peak_nbytes(Candidate(name, "h200", Degrees())) for name in ("vision", "backbone")]
    assert allocated(with_memory(asked, sum(peaks))).shared
    asked = with_memory(asked, sum(peaks) - 1)
    message = r"\(1 h200\) holds each module alone but not all of them together \(vision .*: 1 h200 more$"
    with pytest.raises(ConfigError, match=message):
        allocated(asked)
    types = tuple(replace(each, count=2) for each in asked.cluster.device_types)
    assert allocated(replace(asked, cluster=Cluster(types))).devices == 2


def test_what_the_encoder_gives_to_the_pool_is_taken_off_the_shared_device() -> None:
    asked = request(cluster(h200=1), TINY)
    asked = with_memory(
        asked, sum(asked.peak_nbytes(Candidate(name, "h200", Degrees())) for name in ("vision", "backbone"))
    )
    assert allocated(asked).shared
    with pytest.raises(ConfigError, match="holds each module alone but not all of them together"):
        allocated(replace(asked, budget=MemoryBudget(usable=1.0, pool_nbytes=1)))


def test_what_makes_one_device_enough_is_suggested() -> None:
    asked = request(cluster(a100=1), TINY, workload(microbatch_tokens=1 << 16))
    kept = replace(asked, setup=replace(SETUP, activation_checkpointing="none"))
    short = with_memory(kept, kept.peak_nbytes(Candidate("backbone", "a100", Degrees())) - 1)
    with pytest.raises(ConfigError, match=r"backbone has no .* feasible with backbone.activation_checkpointing=full"):
        allocated(short)
    assert allocated(replace(short, setup=SETUP)).shared
