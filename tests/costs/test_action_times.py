"""Times of actions: the sum over a step's action lists is the surrogate's step where nothing varies."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.config.load import load_config
from flowtrain.costs.action_times import ActionTimes, DeviceTimes, StageWork
from flowtrain.costs.calibration import Calibration
from flowtrain.costs.microbatches import MicrobatchWork
from flowtrain.costs.model_spec import FROZEN_ENCODERS, ModelSpec, TrainedBackbone
from flowtrain.costs.profile import LengthTable
from flowtrain.costs.roofline import Roofline
from flowtrain.costs.trained import with_frozen_modules
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster, request, roofline_surrogate, workload
from tests.costs.test_profile import PROFILE
from tests.profiles import cpu_profile

REPOSITORY = Path(__file__).parents[2]
LENGTH, VISION, TARGETS, PATCHES = 2048, 1024, 256, 1024


def _times(
    dp: int,
    tp: int,
    sharding: Literal["full", "gradients"],
    reduction: Literal["microbatch", "step"],
    model: ModelSpec = MODEL,
) -> ActionTimes:
    setup = replace(SETUP, sharding=sharding, gradient_reduction=reduction)
    (device,) = cluster(h200=dp * tp).device_types
    return ActionTimes(DeviceTimes(device, model, setup, FROZEN_ENCODERS), Degrees(dp, 1, tp), dp)


@given(
    dp=st.sampled_from([1, 2, 8, 32]),
    tp=st.sampled_from([1, 4]),
    sharding=st.sampled_from(["full", "gradients"]),
    reduction=st.sampled_from(["microbatch", "step"]),
    samples=st.integers(1, 4),
    microbatches=st.integers(1, 5),
    freeze=st.sampled_from([(), ("connector",), ("backbone",)]),
)
def test_equal_microbatches_take_the_surrogates_step(
    dp: int,
    tp: int,
    sharding: Literal["full", "gradients"],
    reduction: Literal["microbatch", "step"],
    samples: int,
    microbatches: int,
    freeze: tuple[str, ...],
) -> None:
    model = with_frozen_modules(MODEL, freeze, trains_encoders=False)
    times = _times(dp, tp, sharding, reduction, model)
    data = workload(
        global_batch_size=dp * samples * microbatches,
        microbatch_tokens=LENGTH * samples,
        fill=1.0,
        lengths=np.array([LENGTH]),
        vision_lengths=np.array([VISION]),
        target_lengths=np.array([TARGETS]),
        images={"vision": (np.array([1]), np.array([PATCHES]))},
    )
    surrogate = roofline_surrogate(request(cluster(h200=dp * tp), model, data, times.times.setup))
    expected = surrogate.step_time(Candidate(BACKBONE, "h200", Degrees(dp, 1, tp), 0.0, gradient_reduction=reduction))
    stage = StageWork(MODEL.backbone.num_layers, is_first=True, is_last=True)
    work = MicrobatchWork((LENGTH,) * samples, VISION * samples, TARGETS * samples)
    forward, backward = times.forward_s(stage, work), times.backward_s(stage, work)
    total = times.optimizer_s([stage])
    for number in range(microbatches):
        total += forward + backward
        if times.gathers and (sharding == "full" or number == 0):
            total += times.gather_s(stage, forward)
        if times.gathers and sharding == "full":
            total += times.gather_s(stage, backward, of_backward=True)
        is_last = number == microbatches - 1
        if dp > 1 and (is_last or reduction == "microbatch"):
            total += times.reduce_s(stage, backward, is_last=is_last)
    assert expected.num_microbatches == microbatches
    assert total == pytest.approx(float(expected.total[0]), rel=1e-6)


def test_a_profile_tells_how_much_of_layers_and_head_is_forward() -> None:
    (device,) = cluster(h200=1).device_types
    measured = replace(PROFILE, forward_share=0.4, head_forward_share=0.9)
    work = MicrobatchWork((700, 40), 300, 100)
    passes = []
    for profile in (PROFILE, measured):
        times = ActionTimes(DeviceTimes(device, MODEL, SETUP, FROZEN_ENCODERS, profile), Degrees(), 1)
        for stage in (StageWork(3, is_first=False, is_last=False), StageWork(0, is_first=False, is_last=True)):
            passes.append((times.forward_s(stage, work), times.backward_s(stage, work)))
    (layers, head), (measured_layers, measured_head) = (tuple(map(sum, each)) for each in (passes[:2], passes[2:]))
    assert layers == pytest.approx(measured_layers) and head == pytest.approx(measured_head)
    shares = [forward / (forward + backward) for forward, backward in passes]
    assert shares == pytest.approx([1.0 / 3.0, 1.0 / 3.0, 0.4, 0.9])


@given(cuts=st.sets(st.integers(1, 31)), recomputed=st.one_of(st.none(), st.integers(0, 2)))
def test_each_further_stage_takes_the_time_of_a_pass(cuts: set[int], recomputed: int | None) -> None:
    (device,) = cluster(h200=1).device_types
    steps = replace(PROFILE.steps, pass_s=1e-3, pass_forward_share=0.6)
    heads = {1: LengthTable((1024,), (0.5,))}
    times = ActionTimes(
        DeviceTimes(device, MODEL, SETUP, FROZEN_ENCODERS, replace(PROFILE, steps=steps, heads=heads)), Degrees(), 1
    )
    work, ends = MicrobatchWork((700, 40), 300, 100), [0, *sorted(cuts), 32]
    stages = [
        StageWork(stop - start, start == 0, stop == 32, recomputed=recomputed and min(recomputed, stop - start))
        for start, stop in pairwise(ends)
    ]
    again = None if recomputed is None else sum(each.recomputed or 0 for each in stages)
    whole = StageWork(32, is_first=True, is_last=True, recomputed=again)
    for of, share in ((times.forward_s, 0.6), (times.backward_s, 0.4)):
        assert sum(of(each, work) for each in stages) == pytest.approx(of(whole, work) + share * 1e-3 * len(cuts))


def test_the_embeddings_gradient_is_in_the_first_stages_backward() -> None:
    (device,) = cluster(h200=1).device_types
    table = LengthTable((1024,), (0.5,))
    work = MicrobatchWork((1024,), 300, 100)
    known, apart = (
        ActionTimes(DeviceTimes(device, MODEL, SETUP, FROZEN_ENCODERS, profile), Degrees(), 1)
        for profile in (PROFILE, replace(PROFILE, embeddings={1: table}))
    )
    for is_first, is_last in product((False, True), repeat=2):
        stage = StageWork(2, is_first, is_last)
        assert apart.forward_s(stage, work) == known.forward_s(stage, work)
        more = apart.backward_s(stage, work) - known.backward_s(stage, work)
        assert more == pytest.approx(0.5 * is_first)
    spec = MODEL.backbone
    each = (spec.layer_parameters,) * spec.num_layers
    trained = TrainedBackbone(each, each, embedding=0, norm=0, head=spec.head_parameters, reaches_layers=True)
    frozen = replace(apart.times, model=replace(MODEL, backbone=replace(MODEL.backbone, trained=trained)))
    stage = StageWork(2, is_first=True, is_last=False)
    without = replace(frozen, profile=PROFILE)
    seconds = [replace(apart, times=each).backward_s(stage, work) for each in (frozen, without)]
    assert seconds[0] == seconds[1], "a frozen one has none"
    data = workload()
    connectors = [each.times.of(data).connector_s(np.array([1024.0]), 1)[0] for each in (known, apart)]
    assert connectors[1] - connectors[0] == pytest.approx(0.5), "plans count it with the connector"


@given(layers=st.integers(1, 8), share=st.floats(0.0, 1.0), dp=st.sampled_from([1, 2]))
def test_a_replica_alone_copies_in_a_steps_first_forward_and_last_backward(layers: int, share: float, dp: int) -> None:
    (device,) = cluster(h200=dp).device_types
    steps = replace(PROFILE.steps, ends_s=0.25, ends_parameter_s=1e-9, ends_forward_share=share)
    measured = DeviceTimes(device, MODEL, SETUP, FROZEN_ENCODERS, replace(PROFILE, steps=steps))
    times, stage = ActionTimes(measured, Degrees(dp, 1, 1), dp), StageWork(layers, is_first=False, is_last=False)
    forward, backward = times.ends_s(stage)
    if dp > 1:
        assert (forward, backward) == (0.0, 0.0), "the collectives are there"
        return
    whole = 0.25 + 1e-9 * layers * MODEL.backbone.layer_parameters
    assert forward + backward == pytest.approx(whole) and forward == pytest.approx(share * whole)
    assert times.ends_s(replace(stage, has_backward=False)) == (forward, 0.0)
    assert times.ends_s(StageWork(1, False, False, has_backward=False, encoder="vision")) == (0.0, 0.0)
    calibrated = replace(
        measured, profile=replace(measured.profile, calibration=Calibration("run", 1.0, 1.0, ends=2.0))
    )
    assert replace(times, times=calibrated).ends_s(stage) == pytest.approx((2 * forward, 2 * backward))


@given(
    layers=st.integers(1, 8),
    dp=st.sampled_from([1, 2]),
    reduction=st.sampled_from(["microbatch", "step"]),
)
def test_a_steps_first_backward_adds_its_gradients_to_none(layers: int, dp: int, reduction: str) -> None:
    (device,) = cluster(h200=dp).device_types
    steps = replace(PROFILE.steps, first_backward_parameter_s=1e-12)
    setup, profile = replace(SETUP, gradient_reduction=reduction), replace(PROFILE, steps=steps)
    measured = DeviceTimes(device, MODEL, setup, FROZEN_ENCODERS, profile)
    times, stage = ActionTimes(measured, Degrees(dp, 1, 1), dp), StageWork(layers, is_first=False, is_last=False)
    held = layers * MODEL.backbone.layer_parameters / (dp if reduction == "microbatch" else 1)
    less = 1e-12 * held
    assert times.first_backward_s(stage, 1.0) == pytest.approx(less), "where each is reduced, shards are summed"
    assert times.first_backward_s(stage, np.array([1.0, less])).tolist() == pytest.approx([less, less / 2])
    assert times.first_backward_s(replace(stage, has_backward=False), 1.0) == 0.0
    assert times.first_backward_s(StageWork(1, False, False, has_backward=False, encoder="vision"), 1.0) == 0.0
    slower = replace(measured, profile=replace(profile, calibration=Calibration("run", 2.0, 1.0)))
    assert replace(times, times=slower).first_backward_s(stage, 1.0) == pytest.approx(2 * less)


def test_ends_of_a_pipeline_exchange_the_gradients_of_a_tied_table() -> None:
    tied = replace(MODEL, backbone=replace(MODEL.backbone, tied_embeddings=True))
    first, last = StageWork(2, is_first=True, is_last=False), StageWork(2, is_first=False, is_last=True)
    between = StageWork(2, is_first=False, is_last=False)
    seconds = {}
    for name, model in (("apart", MODEL), ("tied", tied)):
        times = _times(1, 2, "full", "step", model)
        seconds[name] = [times.optimizer_s(stages) for stages in ([first], [last], [between], [first, last])]
    added = np.array(seconds["tied"]) - np.array(seconds["apart"])
    links = 4.0 * MODEL.backbone.head_parameters / 2 / times.times.device.links.node
    assert added == pytest.approx([links / times.times.sending_efficiency] * 2 + [0.0, 0.0], abs=1e-9)
    frozen = _times(1, 2, "full", "step", tied)
    frozen = replace(frozen, times=replace(frozen.times, freeze=("backbone",)))
    assert frozen.optimizer_s([first]) == _times(1, 2, "full", "step").optimizer_s([first])


def test_stages_take_as_long_as_the_whole() -> None:
    times, work = _times(1, 1, "full", "step"), MicrobatchWork((700, 40), 300, 100)
    depth = MODEL.backbone.num_layers
    whole = times.forward_s(StageWork(depth, is_first=True, is_last=True), work)
    first = times.forward_s(StageWork(10, is_first=True, is_last=False), work)
    last = times.forward_s(StageWork(depth - 10, is_first=False, is_last=True), work)
    assert first + last == pytest.approx(whole)


def test_long_sequences_take_longer_than_short_ones_of_as_many_tokens() -> None:
    times, stage = _times(1, 1, "full", "step"), StageWork(8, is_first=False, is_last=False)
    long, short = MicrobatchWork((8192,), 0, 0), MicrobatchWork((512,) * 16, 0, 0)
    assert times.forward_s(stage, long) > times.forward_s(stage, short)


def test_images_take_what_a_plan_counts_for_them() -> None:
    times, patches = _times(1, 1, "full", "step").times, [1024, 256]
    (device,) = cluster(h200=1).device_types
    data = workload(
        lengths=np.array([1, 1]),
        vision_lengths=np.array([0, 0]),
        target_lengths=np.array([0, 0]),
        images={"vision": (np.array([1, 1]), np.array(patches))},
    )
    planned = float(Roofline(device, MODEL, data, SETUP).images_s("vision", 1).sum())
    assert times.images_s("vision", patches, 1) == pytest.approx(planned)
    assert times.images_s("vision", [], 1) == 0.0


def test_a_frozen_encoders_stage_has_no_backward_in_its_time() -> None:
    times, work = _times(1, 1, "full", "step"), MicrobatchWork((2048,), 1024, 10, (1024,))
    layers = MODEL.encoders["vision"].num_layers
    stage = StageWork(layers, is_first=True, is_last=True, has_backward=False, encoder="vision")
    images = times.times.each_image_s("vision", np.array([1024]), 1, together=1.0)
    assert times.forward_s(stage, work) == pytest.approx(float(images.sum()))
    assert times.reduce_s(stage, 0.0, is_last=True) == 0.0


@pytest.mark.parametrize("encoder", [None, "vision"])
def test_a_stage_recomputes_as_many_of_its_layers_as_it_names(encoder: str | None) -> None:
    times = _times(1, 1, "full", "step")
    times = replace(times, times=replace(times.times, freeze=()))  # with a trained encoder
    keeping = replace(times, times=replace(times.times, setup=replace(SETUP, activation_checkpointing="none")))
    stage = StageWork(8, is_first=False, is_last=False, encoder=encoder)
    work = MicrobatchWork((2048,), 1024, 10, (1024, 512))
    forward, backward = keeping.forward_s(stage, work), keeping.backward_s(stage, work)
    for count in (0, 3, 8):
        counted = replace(stage, recomputed=count)
        assert times.forward_s(counted, work) == keeping.forward_s(counted, work) == pytest.approx(forward)
        assert times.backward_s(counted, work) == pytest.approx(backward + count / 8 * forward)
    whole = times.forward_s(stage, work) + times.backward_s(stage, work)
    assert whole == pytest.approx(forward + times.backward_s(replace(stage, recomputed=8), work))


def test_a_profiles_links_are_measured_so_they_are_reached_in_full() -> None:
    times, work = _times(1, 1, "full", "step"), MicrobatchWork((2048,), 1024, 10)
    config = load_config(REPOSITORY / "configs" / "quickstart.yaml")
    measured = replace(times, times=replace(times.times, profile=cpu_profile(config)))
    assert measured.transfer_s(work) == pytest.approx(
        times.times.rules.efficiency.point_to_point * times.transfer_s(work)
    )
