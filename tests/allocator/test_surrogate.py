"""Predicted rates: limits computed by hand, and the direction of change when one thing changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.candidates import Candidate, CandidateColumns
from flowtrain.allocator.memory import backbone_memory
from flowtrain.allocator.surrogate import Surrogate, blocked_share, starved_share
from flowtrain.costs.cluster import Cluster, Links, data_sheet_device_type
from flowtrain.costs.operators import Efficiency, OperatorRules
from flowtrain.costs.roofline import Roofline
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.pipeline.partition import split_layers
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster, request, roofline_surrogate, workload

PERFECT = OperatorRules(Efficiency.perfect())
ARITHMETIC = {"bandwidth": 1e30}
"""Memory costs no time, so matrix products and attention are all."""
ENDLESS = Links(1e30, 1e30, "no communication")


def surrogate(
    setup: TrainingSetup = SETUP, links: Links | None = None, device: dict[str, Any] | None = None, **changes: Any
) -> Surrogate:
    kind = replace(
        data_sheet_device_type("h200", 1024), **({} if links is None else {"links": links}), **(device or {})
    )
    data, devices = workload(**changes), Cluster((kind,))
    times = {"h200": Roofline(kind, MODEL, data, setup, PERFECT)}
    return Surrogate(devices, MODEL, data, setup, times, link_efficiency=1.0)


def backbone(dp: int = 1, pp: int = 1, tp: int = 1, rate: float = float("nan")) -> Candidate:
    return Candidate("backbone", "h200", Degrees(dp, pp, tp), rate)


def test_without_losses_one_device_reaches_its_peak() -> None:
    """The time is all FLOPs over the peak, except for what moves memory: norms, the optimizer."""
    setup = replace(SETUP, activation_checkpointing="none")
    arithmetic = surrogate(setup, ENDLESS, ARITHMETIC).step_time(backbone()).computing
    found = surrogate(setup, ENDLESS)
    step = found.step_time(backbone())
    flops = workload().flops(MODEL)
    assert arithmetic == pytest.approx(256 * (flops.backbone + flops.connector).mean() / 989.5e12)
    assert 1.02 * arithmetic < step.computing < 1.15 * arithmetic
    assert step.fill == step.transfers == step.gathering == step.reducing == 0.0
    parameters = MODEL.backbone.num_parameters + MODEL.connector.num_parameters
    assert step.optimizer == pytest.approx(28 * parameters / 4.8e12)
    rate = found.rate(backbone())
    assert found.mfu(backbone(rate=rate)) == pytest.approx(float((arithmetic / step.total)[0]))


def test_full_recomputation_costs_a_third_more() -> None:
    plain = surrogate(replace(SETUP, activation_checkpointing="none"), ENDLESS, ARITHMETIC)
    full, half = (
        surrogate(replace(SETUP, activation_checkpointing=kind, checkpoint_every=2), ENDLESS, ARITHMETIC)
        for kind in ("full", "every_n")
    )
    base, whole, part = (each.step_time(backbone()).computing[0] for each in (plain, full, half))
    head = 256 * (workload().head_flops(MODEL) + workload().flops(MODEL).connector.mean()) / 989.5e12
    assert whole - head == pytest.approx(4 / 3 * (base - head))
    assert part - head == pytest.approx(7 / 6 * (base - head))


def test_pipeline_fill_is_that_of_1f1b() -> None:
    """(pp - 1) slots of the other ranks, of which the ends have connector or head; FlowTrain's batch of 256."""
    step = surrogate(links=ENDLESS).step_time(backbone(dp=2, pp=4))
    m = int(step.num_microbatches[0])
    # 1,280 tokens per sample on average, 128 samples per replica, 8,192 * 0.97 per microbatch
    assert m == int(np.ceil(1280 * 128 / (8192 * 0.97)))
    columns, tokens = CandidateColumns.of(backbone(dp=2, pp=4)), workload().fullest_tokens(np.array([2])) / m
    mean = m * surrogate(links=ENDLESS).stages_s(columns, tokens)[1][0]
    assert step.fill[0] * m == pytest.approx(4 * mean - step.computing[0])
    assert step.fill[0] * m <= 3 * step.computing[0]


@pytest.mark.parametrize("pp", [2, 3, 5, 16, 17, 31, 32])
def test_the_slowest_stage_sets_the_pace(pp: int) -> None:
    """The ends have connector or head in addition to layers; uneven pipelines have one more layer in some stages."""
    step, data = surrogate(links=ENDLESS).step_time(backbone(pp=pp)), workload()
    times = Roofline(replace(data_sheet_device_type("h200", 1), links=ENDLESS), MODEL, data, SETUP, PERFECT)
    tokens = np.array([256 * 1280 / step.num_microbatches[0]])
    layers = [len(stage) * float(times.layer_s(tokens, 1)[0]) for stage in split_layers(32, pp)]
    layers[0] += float(times.connector_s(tokens, 1)[0])
    layers[-1] += float(times.head_s(tokens, 1)[0])
    assert step.computing[0] / step.num_microbatches[0] == pytest.approx(max(layers))


def test_tensor_parallel_communication_is_four_reductions_a_layer() -> None:
    setup = replace(SETUP, activation_checkpointing="none")
    slow = surrogate(setup, Links(1e11, 1e30, "test")).step_time(backbone(tp=4)).computing[0]
    free = surrogate(setup, ENDLESS).step_time(backbone(tp=4)).computing[0]
    tokens, data = 256 * 1280, workload()
    values = tokens * 4096 * (4 * 32 + data.target_share + 0.5)
    assert slow - free == pytest.approx(2 * (2 * 3 / 4) * values / 1e11), "half of one for the gather of the loss"
    whole = replace(setup, sequence_parallel=False)
    slow, free = (
        surrogate(whole, links).step_time(backbone(tp=4)).computing[0] for links in (Links(1e11, 1e30, ""), ENDLESS)
    )
    assert slow - free == pytest.approx(2 * (2 * 3 / 4) * tokens * 4096 * (4 * 32 + data.target_share) / 1e11)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]))
def test_more_devices_are_never_more_than_proportionally_faster(dp: int, pp: int, tp: int) -> None:
    found = surrogate(replace(SETUP, optimizer="sgd"))
    alone, many = found.rate(backbone()), found.rate(backbone(dp, pp, tp))
    # Fewer tokens per microbatch cost nothing here, so whole microbatches are compared with fuller ones.
    assert 0.0 < many <= alone * dp * pp * tp * 1.01


def test_columns_and_single_candidates_agree() -> None:
    found = surrogate()
    degrees = np.array([(1, 1, 1), (2, 3, 4), (8, 2, 2), (256, 1, 1)])
    columns = CandidateColumns("backbone", "h200", *degrees.T)
    single = [found.rate(backbone(*each)) for each in degrees.tolist()]
    assert found.rates(columns).tolist() == pytest.approx(single, rel=1e-12)


def test_an_encoders_rate_is_proportional_to_its_replicas_and_counts_samples_with_images() -> None:
    found = surrogate(links=ENDLESS, device=ARITHMETIC)
    one, nine = (found.rate(Candidate("vision", "h200", Degrees(dp=dp))) for dp in (1, 9))
    assert nine == pytest.approx(9 * one)
    # Only every other sample has images, 1,024 patches then.
    flops = workload().flops(MODEL).encoders
    assert flops[1] == 0.0 and one == pytest.approx(989.5e12 / flops[0])


def test_an_encoder_cannot_send_faster_than_its_link() -> None:
    found = surrogate(links=Links(1e30, 1e8, "slow network"))
    assert found.rate(Candidate("vision", "h200", Degrees())) == pytest.approx(1e8 / (1024 * 1024 * 2))


def test_a_slow_network_hurts_only_what_crosses_nodes() -> None:
    fast, slow = surrogate(links=Links(1e11, 1e11, "")), surrogate(links=Links(1e11, 1e8, ""))
    assert slow.rate(backbone(dp=2, pp=2, tp=2)) == pytest.approx(fast.rate(backbone(dp=2, pp=2, tp=2)))
    crossing = slow.step_time(backbone(dp=16))
    assert crossing.reducing[0] > 0.0 and crossing.gathering[0] > 0.0
    assert slow.step_time(backbone(pp=16)).transfers[0] > 100 * fast.step_time(backbone(pp=16)).transfers[0]


def test_memory_falls_with_dp_and_recomputation() -> None:
    """The search for the smallest dp that fits relies on this."""
    data = workload()
    for pp, tp in ((1, 1), (3, 2), (8, 8)):
        peaks = [backbone_memory(MODEL, data, SETUP, Degrees(dp, pp, tp)).peak for dp in (1, 2, 4, 8, 64, 256)]
        assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
    kept = backbone_memory(MODEL, data, replace(SETUP, activation_checkpointing="none"), Degrees(8))
    assert kept.peak > backbone_memory(MODEL, data, SETUP, Degrees(8)).peak


def test_waiting_shares() -> None:
    assert starved_share(5.0, 10.0) == 0.5 and starved_share(10.0, 5.0) == 0.0
    assert blocked_share(10.0, 5.0) == 0.5 and blocked_share(5.0, 10.0) == 0.0


def test_several_device_types_have_their_own_rates() -> None:
    asked = request(cluster(h200=8, a100=8))
    found = roofline_surrogate(asked)
    fast, slow = (found.rate(Candidate("vision", name, Degrees())) for name in ("h200", "a100"))
    assert 4.8 / 2.039 < fast / slow < 989.5 / 312, "some operators wait for memory, most for arithmetic"
