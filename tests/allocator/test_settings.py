"""Settings of the backbone as choices of a plan: what is tried fits, nothing better is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flowtrain.allocator import settings_search
from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.candidates import BoolArray, Candidate, PruneReason
from flowtrain.allocator.choices import backbone_choices
from flowtrain.allocator.program.flow import Choice, levels
from flowtrain.allocator.request import Request, enumerate_all, enumerate_module, flow_problem, fronts_of, memos_of
from flowtrain.allocator.run_memory import memory_of_run
from flowtrain.allocator.surrogate import BACKBONE
from flowtrain.config.run import RunConfig
from flowtrain.costs.flops import IntArray
from flowtrain.costs.model_spec import TrainedBackbone
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.errors import ConfigError
from flowtrain.types.plan import Degrees
from flowtrain.types.run_plan import BackboneSettings
from tests.allocator.worlds import MODEL, cluster, request, roofline_surrogate, with_memory, workload

SMALL = replace(MODEL, backbone=replace(MODEL.backbone, num_layers=6))
CHOICES = st.lists(
    st.builds(
        BackboneSettings,
        st.sampled_from([2048, 4096, 8192, 16384]),
        st.sampled_from(["none", "selective", "full", "offload"]),
        st.sampled_from([1, 2]),
        st.sampled_from(["full", "gradients", "hybrid"]),
    ),
    min_size=1,
    max_size=8,
    unique=True,
).map(tuple)


def configuration(**sections: Any) -> RunConfig:
    values = {
        "name": "settings",
        "mode": "auto",
        "model": {"dtype": "bfloat16"},
        "encoders": {"vision": {"path": "unused"}},
        "backbone": {"path": "unused"},
        "data": {"sources": [{"path": "unused"}], "max_seq_len": 2048},
        "training": {"max_steps": 1, "global_batch_size": 12},
        "scheduler": {"microbatch_tokens": 8192},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(values.get(name), dict) else section  # type: ignore[dict-item]
    return RunConfig.model_validate(values)


def asked(choices: Sequence[BackboneSettings], devices: int = 12, batch: int = 12, gibibytes: int = 40) -> Request:
    data = workload(global_batch_size=batch)
    found = request(cluster(h200=devices), SMALL, data, TrainingSetup(), max_batch_patches={"vision": 4096})
    return with_memory(replace(found, choices=tuple(choices), chooses_reduction=True), gibibytes << 30)


def candidates(of: Request) -> list[Candidate]:
    found = enumerate_module(of, BACKBONE, of.cluster["h200"])
    return [columns.candidate(at, 1.0) for columns in found.every for at in range(len(columns))]


# --- what may be chosen --------------------------------------------------------------------------------------------


def test_the_first_choice_is_the_configured_one_and_a_microbatch_holds_every_sample() -> None:
    found = backbone_choices(configuration(), SMALL.backbone, workload())
    assert found[0] == BackboneSettings(8192, "none", 1, "full") and len(set(found)) == len(found)
    assert {each.microbatch_tokens for each in found} == {2048, 4096, 8192, 16384, 32768}
    assert {each.chunks for each in found} == {1, 2}, "six layers make no pipeline of four chunks a rank and two ranks"
    assert "offload" not in {
        each.activation_checkpointing
        for each in backbone_choices(configuration(), SMALL.backbone, workload(), on_cpu=True)
    }


@pytest.mark.parametrize(
    ("sections", "field", "values"),
    [
        ({"backbone": {"activation_checkpointing": ["full"] * 6}}, "activation_checkpointing", {None}),
        (
            {"backbone": {"activation_checkpointing": "every_n"}},
            "activation_checkpointing",
            {None, "none", "selective", "full", "offload"},
        ),
        ({"backbone": {"sharding": "hybrid", "hybrid_shard_size": 2}}, "sharding", {None}),
        (
            {"mode": "decoupled", "pipeline": {"partition": [6]}, "allocator": {"choose": ["chunks", "sharding"]}},
            "chunks",
            {1},
        ),
        ({"allocator": {"choose": ["sharding"]}}, "microbatch_tokens", {8192}),
        ({"allocator": {"choose": ["sharding"]}}, "activation_checkpointing", {None}),
        ({"allocator": {"choose": ["chunks"]}}, "sharding", {None}),
    ],
)
def test_what_is_given_in_full_is_no_choice(sections: dict[str, Any], field: str, values: set[object]) -> None:
    found = backbone_choices(configuration(**sections), SMALL.backbone, workload())
    assert {getattr(each, field) for each in found} == values


def test_every_kind_of_offload_is_tried_where_nothing_else_fits() -> None:
    every = [BackboneSettings(32768, word, 1, how) for how in ("full", "gradients") for word in ("none", "offload")]

    def fitting(gibibytes: int) -> list[BackboneSettings | None]:
        of = asked(every, devices=2, gibibytes=gibibytes)
        return [each.settings for each in enumerate_module(of, BACKBONE, of.cluster["h200"]).every]

    assert fitting(40) == [every[0], every[2]]
    assert fitting(34) == [every[1], every[3]]


def test_without_a_freed_setting_there_is_no_choice() -> None:
    for choose in ([], ["gradient_reduction"]):
        config = configuration(allocator={"choose": choose})
        assert backbone_choices(config, SMALL.backbone, workload()) == ()
    assert backbone_choices(configuration(mode="decoupled"), SMALL.backbone, workload()) == ()


# --- what is tried fits --------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(choices=CHOICES, gibibytes=st.sampled_from([12, 24, 40]), index=st.integers(0, 10**6))
def test_every_configuration_passes_the_check_of_its_run(
    choices: tuple[BackboneSettings, ...], gibibytes: int, index: int
) -> None:
    of = asked(choices, gibibytes=gibibytes)
    found = candidates(of)
    assume(found)
    each = found[index % len(found)]
    assert each.settings is not None
    is_grouped = each.settings.sharding == "hybrid" and each.degrees.dp > 1
    config = configuration(
        mode="decoupled",
        backbone={
            "activation_checkpointing": each.settings.activation_checkpointing,
            "sharding": each.settings.sharding,
            "hybrid_shard_size": of.num_shards(each) if is_grouped else None,
            "gradient_reduction": each.gradient_reduction,
            "data_parallel_size": each.degrees.dp,
            "pipeline_parallel_size": each.degrees.pp,
            "tensor_parallel_size": each.degrees.tp,
        },
        pipeline={
            "chunks": each.settings.chunks,
            "schedule": "1f1b" if each.settings.chunks == 1 else "interleaved_1f1b",
        },
        scheduler={"microbatch_tokens": each.settings.microbatch_tokens},
    )
    memory = memory_of_run(config, SMALL, of.of(each).workload)
    assert memory.fullest.peak == of.peak_nbytes(each) <= gibibytes << 30


@settings(max_examples=25)
@given(choices=CHOICES, gibibytes=st.sampled_from([12, 24, 40]))
def test_what_is_left_out_is_never_faster(choices: tuple[BackboneSettings, ...], gibibytes: int) -> None:
    """Each setting alone keeps all that fits; over all of them no number of devices is slower."""
    of = asked(choices, gibibytes=gibibytes)
    every = fronts_of(of, enumerate_all(of), roofline_surrogate)[BACKBONE, "h200"]
    offloads = all(each.settings is not None and each.settings.activation_checkpointing == "offload" for each in every)
    for each in choices:
        if each.activation_checkpointing == "offload" and each != choices[0] and not offloads:
            continue
        alone = of.with_settings(each)
        for one in fronts_of(alone, enumerate_all(alone), roofline_surrogate)[BACKBONE, "h200"]:
            best = max((other.rate for other in every if other.devices <= one.devices), default=0.0)
            assert best >= one.rate * (1 - 1e-3), (one, each)


@settings(max_examples=15, deadline=None)
@given(choices=CHOICES, gibibytes=st.sampled_from([12, 24, 40]))
def test_a_choice_is_never_slower_than_what_is_configured(
    choices: tuple[BackboneSettings, ...], gibibytes: int
) -> None:
    of = asked(choices, gibibytes=gibibytes)
    try:
        configured = allocate(of.with_settings(choices[0]), roofline_surrogate)
    except ConfigError:
        return
    assert allocate(of, roofline_surrogate).rate >= configured.rate * (1 - 1e-6)


@settings(max_examples=15, deadline=None)
@given(choices=CHOICES, devices=st.integers(2, 6))
def test_the_program_finds_what_trying_all_finds(choices: tuple[BackboneSettings, ...], devices: int) -> None:
    of = asked(choices, devices)
    enumerations = enumerate_all(of)
    problem = flow_problem(of, fronts_of(of, enumerations, roofline_surrogate))
    best = 0.0
    for columns in enumerations[BACKBONE, "h200"].every:
        assert columns.settings is not None
        surrogate = roofline_surrogate(of.with_settings(columns.settings))
        rates = surrogate.rates(columns)
        encoders = enumerations["vision", "h200"].columns
        for at, rate in enumerate(rates.tolist()):
            for number, encoder_rate in enumerate(surrogate.rates(encoders).tolist()):
                pair = columns.candidate(at, rate), encoders.candidate(number, encoder_rate)
                if sum(each.devices for each in pair) <= devices:
                    best = max(best, levels(problem, Choice({"vision": pair[1]}, pair[0])).rate)
    if not best:
        with pytest.raises(ConfigError):
            allocate(of, roofline_surrogate)
        return
    assert allocate(of, roofline_surrogate).rate == pytest.approx(best, rel=1e-6)


NORMS_ALONE = TrainedBackbone(
    (2 * SMALL.backbone.hidden_size,) * 6, (0,) * 6, 0, SMALL.backbone.hidden_size, 0, reaches_layers=True
)
"""The sums of all gradients are smaller than what one layer's take on their way."""


@settings(max_examples=25, deadline=None)
@given(
    choices=CHOICES,
    gibibytes=st.lists(st.floats(3.0, 40.0), min_size=1, max_size=3),
    chooses=st.booleans(),
    trained=st.sampled_from([None, NORMS_ALONE]),
)
@example(
    choices=(BackboneSettings(16384, "full", 1, "full"),), gibibytes=[2.75, 5.0], chooses=False, trained=NORMS_ALONE
)
def test_predicting_the_memory_of_some_finds_what_predicting_all_finds(
    choices: tuple[BackboneSettings, ...], gibibytes: list[float], chooses: bool, trained: TrainedBackbone | None
) -> None:
    of = replace(asked(choices, devices=96, batch=200), chooses_reduction=chooses)
    of = replace(of, model=replace(of.model, backbone=replace(of.model.backbone, trained=trained)))
    device = of.cluster["h200"]
    memos = memos_of(of)
    for room in gibibytes:  # a later search knows the peaks of the earlier ones
        nbytes = int(room * 2**30)
        some = enumerate_module(of, BACKBONE, device, nbytes, memos)
        with patch.object(settings_search, "_pivots", all_of_them):
            every = enumerate_module(of, BACKBONE, device, nbytes)
        assert some.pruned == every.pruned and some.least_peak_nbytes == every.least_peak_nbytes
        assert len(some.every) == len(every.every)
        for one, other in zip(some.every, every.every, strict=True):
            assert one.settings == other.settings and one.reduces_each is not None and other.reduces_each is not None
            for name in ("dp", "pp", "tp", "reduces_each"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name


def all_of_them(alike: settings_search.Alike, index: IntArray) -> tuple[BoolArray, IntArray, IntArray]:
    at = np.arange(len(index))
    return np.ones(len(index), dtype=bool), at, at


# --- what is left out ----------------------------------------------------------------------------------------------


def test_recomputation_is_tried_only_where_less_of_it_does_not_fit() -> None:
    words = ("full", "none", "selective", "offload")
    of = asked([BackboneSettings(8192, word, 1, "full") for word in ("none", "selective", "full", "offload")])
    found = candidates(of)
    by_degrees: dict[Degrees, set[tuple[str, str | None]]] = {}
    for each in found:
        assert each.settings is not None
        word = each.settings.activation_checkpointing
        by_degrees.setdefault(each.degrees, set()).add((each.gradient_reduction, word))
    assert {word for each in by_degrees.values() for _, word in each} <= set(words) - {"offload"}
    for each in by_degrees.values():
        assert sum(reduction == "step" for reduction, _ in each) <= 1, each


def test_offloading_comes_last() -> None:
    choices = [BackboneSettings(8192, word, 1, "full") for word in ("full", "offload")]
    of = asked(choices, devices=1, batch=2, gibibytes=120)
    full, offload = (of.peak_nbytes(Candidate(BACKBONE, "h200", Degrees(), settings=settings)) for settings in choices)
    assert {each.settings for each in candidates(of)} == {choices[0]}
    if offload < full:
        assert {each.settings for each in candidates(with_memory(of, offload))} == {choices[1]}


def test_a_larger_microbatch_without_more_work_is_left_out() -> None:
    choices = [BackboneSettings(tokens, "full", 1, "full") for tokens in (8192, 16384)]
    of = asked(choices, devices=8, batch=8)
    found = candidates(of)
    larger = {each.degrees.dp for each in found if each.settings == choices[1]}
    counts = {
        dp: [of.with_settings(each).workload.num_microbatches(np.array([dp]))[0] for each in choices]
        for dp in range(1, 9)
    }
    assert larger == {dp for dp, (small, large) in counts.items() if large < small}
    enumeration = enumerate_module(of, BACKBONE, of.cluster["h200"])
    assert enumeration.pruned[PruneReason.SLOWER]


# --- ways out ------------------------------------------------------------------------------------------------------


def test_ways_out_name_nothing_that_was_tried() -> None:
    small = [BackboneSettings(tokens, word, 1, "full") for tokens in (8192, 2048) for word in ("none", "full")]
    of = with_memory(asked(small, devices=1, batch=2), 8 << 30)
    with pytest.raises(ConfigError) as caught:
        allocate(replace(of, max_batch_patches={"vision": 256}), roofline_surrogate)
    message = str(caught.value)
    assert "backbone has no feasible configuration" in message
    assert "activation_checkpointing" not in message and "microbatch_tokens" not in message
    assert "devices" in message


# --- whole samples -------------------------------------------------------------------------------------------------


def test_eight_long_samples_on_five_ranks_are_two_on_the_slowest() -> None:
    even = {"lengths": np.array([4096]), "vision_lengths": np.array([0]), "target_lengths": np.array([64])}
    images = {"vision": (np.array([1]), np.array([256]))}
    data = workload(global_batch_size=8, microbatch_tokens=4096, fill=1.0, images=images, **even)
    assert data.fullest_tokens(np.array([1, 4, 5, 8])).tolist() == [8 * 4096, 2 * 4096, 2 * 4096, 4096]
    assert data.num_microbatches(np.array([1, 4, 5, 8])).tolist() == [8, 2, 2, 1]
    of = request(cluster(h200=8), SMALL, data)
    five, four = (roofline_surrogate(of).rate(Candidate(BACKBONE, "h200", Degrees(dp))) for dp in (5, 4))
    assert five <= four * 1.05, "a fifth rank has nothing that the slowest could give away"


@given(st.integers(1, 400), st.integers(1, 400))
def test_the_fullest_rank_has_at_least_the_mean_and_at_most_whole_samples(batch: int, dp: int) -> None:
    data = workload(global_batch_size=batch)
    fullest = float(data.fullest_tokens(np.array([dp]))[0])
    assert data.tokens_per_step / dp <= fullest * (1 + 1e-9)
    assert fullest <= -(-batch // dp) * data.tokens_per_sample * (1 + 1e-9)
