"""Operators take the longest of arithmetic, memory and links; layers are the sums of theirs; rules may be a user's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flowtrain.config.costs import CostsConfig
from flowtrain.config.formula import Formula
from flowtrain.costs import layers
from flowtrain.costs.cluster import data_sheet_device_type
from flowtrain.costs.flops import backbone_training_flops
from flowtrain.costs.operators import OPERATOR_CLASSES, Efficiency, Operator, OperatorRules
from flowtrain.costs.roofline import Roofline
from tests.allocator.worlds import MODEL, SETUP, VISION, workload

DEVICE = data_sheet_device_type("h200", 8)
AMOUNTS = st.floats(0.0, 1e15)


def costs(**sections: Any) -> OperatorRules:
    return OperatorRules.of(CostsConfig(**sections))


@given(st.sampled_from(OPERATOR_CLASSES), AMOUNTS, AMOUNTS, AMOUNTS)
def test_an_operator_is_as_slow_as_its_slowest_resource(kind: Any, flops: float, nbytes: float, sent: float) -> None:
    rules, work = OperatorRules(), Operator(kind, flops, nbytes, sent)
    seconds = float(rules.seconds(work, DEVICE, 1e10))
    parts = [
        float(rules.seconds(Operator(kind, *each), DEVICE, 1e10))
        for each in ((flops, 0.0, 0.0), (0.0, nbytes, 0.0), (0.0, 0.0, sent))
    ]
    assert seconds == pytest.approx(max(parts)) and seconds >= 0.0
    faster = replace(DEVICE, flops=2 * DEVICE.flops, bandwidth=2 * DEVICE.bandwidth)
    assert float(rules.seconds(work, faster, 2e10)) == pytest.approx(seconds / 2)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=6), st.sampled_from([1, 2, 4, 8]))
def test_a_layers_operators_have_its_flops(lengths: list[int], tp: int) -> None:
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    layer = layers.decoder_layer(MODEL.backbone, SETUP, tp, tokens, squares)
    head = layers.head(MODEL.backbone, SETUP, tp, tokens)
    counted = 32 * sum(each.flops for each in (*layer.matrices, *layer.attention)) + head.matrices[0].flops
    assert 3 * tp * counted == pytest.approx(backbone_training_flops(MODEL.backbone, lengths))
    vision = layers.encoder_layer(VISION, SETUP, tp, tokens, squares, is_trained=False)
    assert sum(each.flops for each in vision.matrices) * tp == 2 * tokens * VISION.layer_matmul_parameters
    assert all(each.flops == 0.0 and each.nbytes > 0.0 for each in (*layer.moves, *vision.moves))


def test_short_products_wait_for_their_weights() -> None:
    """Fewer tokens than FLOPs per byte of the device cost as much as one."""
    times = Roofline(DEVICE, MODEL, workload(), SETUP)
    one, few, many = times.layer_s(np.array([1.0, 32.0, 8192.0]), 1).tolist()
    assert few < 1.2 * one and many > 10 * few


def test_more_recomputation_never_takes_less_time() -> None:
    tokens = np.array([4096.0])
    none, selective, full = (
        float(Roofline(DEVICE, MODEL, workload(), replace(SETUP, activation_checkpointing=word)).layer_s(tokens, 1)[0])
        for word in ("none", "selective", "full")
    )
    assert none < selective < full < 4 / 3 * none + 1e-12


def test_a_configuration_may_set_any_efficiency_and_any_rule() -> None:
    product = Operator("matmul", flops=np.array([1e12, 2e12]), nbytes=1.0)
    assumed, half = OperatorRules(), costs(efficiency={"matmul": 0.34})
    assert half.seconds(product, DEVICE) == pytest.approx(2 * assumed.seconds(product, DEVICE))
    own = costs(rules={"matmul": "1e-3 + max(flops / F, nbytes / B_mem) / efficiency"})
    assert own.seconds(product, DEVICE) == pytest.approx(1e-3 + assumed.seconds(product, DEVICE))
    assert costs(rules={"collective": "2 * sent_nbytes / B_net"}).link_share("collective") == 0.5
    assert assumed.link_share("point_to_point") == Efficiency().point_to_point


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops / G", "a formula cannot have 'G'"),
        ("__import__('os').system('true')", "a formula cannot have"),
        ("flops.real", "a formula cannot have 'flops.real'"),
        ("flops +", "is no formula"),
        ("max()", "a formula cannot have"),
        ("flops - 2", "a time must be above 0 and finite"),
        ("flops / (F - 1)", "has no value where all names are 1"),
        ("9**9**9**9", "has no value where all names are 1"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        CostsConfig.model_validate({"rules": {"norm": text}})


@pytest.mark.parametrize("text", ["-" * 100_000 + "1", "1" + "+1" * 50_000, "max(" * 2000 + "1" + ")" * 2000])
def test_a_formula_too_long_for_a_parser_is_refused_in_a_word(text: str) -> None:
    with pytest.raises(ValidationError, match="is longer than 400; shorten it"):
        CostsConfig.model_validate({"rules": {"norm": text}})
    assert Formula("-" * 398 + "1")({}) == 1.0


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6))
def test_a_formula_is_what_python_makes_of_it(flops: float, nbytes: float) -> None:
    text = "max(flops / 3, -nbytes + 2 ** 2, min(nbytes, 7)) * 2 - 1"
    values = {"flops": flops, "nbytes": nbytes}
    assert Formula(text)(values) == pytest.approx(eval(text, {"max": max, "min": min}, values))
