"""Allocation without matching: the devices are split as the method says, and never better than by the program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.fixed_split import split_devices
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.config.allocator import AllocationMethod
from flowtrain.errors import ConfigError
from tests.allocator.worlds import VISION, cluster, request, roofline_surrogate, several, with_memory

ABLATIONS: tuple[AllocationMethod, ...] = ("even", "flops")


@given(st.integers(2, 500), st.integers(1, 3))
def test_half_for_the_encoders_half_for_the_backbone(total: int, num_encoders: int) -> None:
    model, data = several(tuple(f"e{k}" for k in range(num_encoders)))
    total = max(total, num_encoders + 1)
    counts = split_devices(request(cluster(h200=total), model, data), "even")
    of_encoders = [count for name, count in counts.items() if name != BACKBONE]
    assert sum(counts.values()) == total and min(counts.values()) >= 1
    assert max(of_encoders) - min(of_encoders) <= 1
    if total >= 2 * num_encoders:
        assert sum(of_encoders) == total // 2


@given(st.integers(4, 500))
def test_in_proportion_to_flops(total: int) -> None:
    model, data = several(("one", "other"))
    model = replace(model, encoders={"one": VISION, "other": replace(VISION, num_layers=4)})
    asked = request(cluster(h200=total), model, data)
    counts = split_devices(asked, "flops")
    assert sum(counts.values()) == total and min(counts.values()) >= 1
    flops = data.flops(model)
    whole = float((flops.encoders + flops.connector + flops.backbone).mean())
    share = data.share("one") * data.encoder_flops(model, "one") / whole
    assert abs(counts["one"] - max(1.0, share * total)) <= 1.0


@pytest.mark.parametrize("method", ABLATIONS)
@pytest.mark.parametrize("total", [8, 24, 63, 64, 256])
def test_each_side_takes_its_best_degrees_and_the_program_is_never_slower(total: int, method: AllocationMethod) -> None:
    asked = request(cluster(h200=total))
    best, found = (allocate(asked, roofline_surrogate, method=each) for each in ("milp", method))
    counts = split_devices(asked, method)
    for module in found.modules:
        assert module.devices <= counts[module.name]
    assert best.method == "milp" and best.rate_milp is None
    assert found.method == method and found.rate_milp == pytest.approx(best.rate)
    assert found.rate <= best.rate * (1.0 + 1e-6)
    assert not found.alternatives, "they are why others lost, and here the choice did not win"


def test_an_even_split_is_slower_where_the_backbone_has_more_work() -> None:
    asked = request(cluster(h200=64))
    found = allocate(asked, roofline_surrogate, method="even")
    assert found.rate < 0.8 * (found.rate_milp or 0.0)


@pytest.mark.parametrize("method", ABLATIONS)
def test_what_cannot_be_split_is_refused(method: AllocationMethod) -> None:
    one = with_memory(request(cluster(h200=1)), 10**15)
    message = rf"allocator.method \('{method}'\) needs a device for each module: 2, and there are 1; raise --devices"
    with pytest.raises(ConfigError, match=message):
        allocate(one, roofline_surrogate, method=method)
    two = request(cluster(h200=8, a100=8))
    with pytest.raises(ConfigError, match=r"splits devices of one type, .* set allocator.method=milp"):
        allocate(two, roofline_surrogate, method=method)


def test_a_side_without_a_configuration_is_named_with_the_way_out() -> None:
    """The backbone fits on six devices of eight, not on half of them."""
    asked = with_memory(request(cluster(h200=8)), 28 << 30)
    assert allocate(asked, roofline_surrogate).modules[-1].devices == 6
    message = r"gives backbone 4 of 8 devices, .* needs 6; raise --devices, or set allocator.method=milp"
    with pytest.raises(ConfigError, match=message):
        allocate(asked, roofline_surrogate, method="even")
