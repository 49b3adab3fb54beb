"""The partition that a word of ``pipeline.partition`` chooses."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.layer_costs import layer_costs
from flowtrain.costs.microbatches import MicrobatchWork
from flowtrain.costs.profile import ImageTable
from flowtrain.errors import ConfigError
from flowtrain.models.families.registry import family_from_config
from flowtrain.pipeline.configured import configured_partition
from flowtrain.pipeline.cuts import stage_sums
from flowtrain.pipeline.partition import EncoderSplit, build_partition
from flowtrain.search.partition import searched_partitions, simulated_step_s, with_chosen_partition
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster
from tests.e2e.worlds import tiny_config
from tests.profiles import cpu_profile

WORK = MicrobatchWork((2048, 2048), 2048, 1024, (1024, 1024))
VISION, DEPTH = MODEL.encoders["vision"], MODEL.backbone.num_layers
WORDS = ("uniform", "parameters", "profile", "balanced")


def times_of(pp: int, trains: bool) -> ActionTimes:
    (device,) = cluster(h200=pp).device_types
    freeze = () if trains else ("encoders",)
    return ActionTimes(DeviceTimes(device, MODEL, SETUP, freeze), Degrees(1, pp, 1), 1)


def config_of(*overrides: str) -> RunConfig:
    values = {
        "name": "cut",
        "encoders": {"vision": {"config": {}}},
        "backbone": {"config": {}, "pipeline_parallel_size": 4},
        "data": {"sources": [{"path": "unused"}]},
        "mode": "monolithic",
        "pipeline": {"encoder_layers": "mixed"},
    }
    return override_config(RunConfig.model_validate(values), overrides, check_paths=False)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_layers_cost_together_what_the_whole_model_costs(trains: bool, is_cut: bool) -> None:
    times = times_of(4, trains)
    costs = layer_costs(times, WORK, encoder="vision", is_cut=is_cut, trains=trains)
    split = EncoderSplit(VISION.num_layers, "mixed" if is_cut else "first", 1.0, trains)
    one = simulated_step_s(build_partition(DEPTH, 1, encoder=split), times_of(1, trains), [WORK], encoder="vision")
    assert costs.seconds.sum() == pytest.approx(one)
    assert costs.sizes.sum() == DEPTH + (VISION.num_layers if is_cut else 0)


def test_first_layers_of_deepstack_are_one_unit() -> None:
    plain = times_of(4, trains=False)
    deep = replace(MODEL, backbone=replace(MODEL.backbone, deepstack_layers=3))
    stacked = replace(plain, times=replace(plain.times, model=deep))
    first = deep.backbone.first_layers
    assert first > 1
    one, other = (layer_costs(times, WORK, encoder=None, is_cut=False, trains=False) for times in (plain, stacked))
    assert list(one.sizes) == [1] * DEPTH and list(other.sizes) == [first] + [1] * (DEPTH - first)
    assert other.seconds.sum() == pytest.approx(one.seconds.sum())
    assert other.parameters.sum() == pytest.approx(one.parameters.sum()) and len(other.sent_s) == len(other.sizes)
    assert other.counts((1, len(other.sizes) - 1)) == (first, DEPTH - first)


@pytest.mark.parametrize("trains", [False, True])
def test_the_chosen_partition_is_the_fastest_candidate_and_no_slower_than_the_named_ones(trains: bool) -> None:
    times, works = times_of(4, trains), [WORK] * 16
    costs = layer_costs(times, WORK, encoder="vision", is_cut=True, trains=trains)

    def step_s(counts: tuple[int, ...]) -> float:
        split = EncoderSplit(VISION.num_layers, "mixed", 1.0, trains)
        partition = build_partition(DEPTH, 4, counts=counts, encoder=split)
        return simulated_step_s(partition, times, works, encoder="vision")

    found = searched_partitions(costs, 4, step_s)
    assert [each.step_s for each in found] == sorted(step_s(each.counts) for each in found)
    even = build_partition(DEPTH, 4, encoder=EncoderSplit(VISION.num_layers, "mixed", 1.0, trains))
    assert found[0].step_s <= simulated_step_s(even, times, works, encoder="vision") * (1 + 1e-9)
    spread = stage_sums(costs.seconds, found[0].counts)
    assert spread.max() < 1.1 * spread.mean()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("keys", [(), ("encoders.vision.trainable=true",), ("pipeline.encoder_layers=first",)])
def test_a_word_becomes_numbers_that_the_run_can_have(word: str, keys: tuple[str, ...]) -> None:
    config = with_chosen_partition(config_of(f"pipeline.partition={word}", *keys), MODEL)
    counts = config.pipeline.counts
    assert counts is not None and len(counts) == 4
    partition = configured_partition(config, MODEL, 4)
    assert [sum(len(stage.layers) for stage in partition.of_rank(rank)) for rank in range(4)] == [
        count + (VISION.num_layers if "first" in "".join(keys) and rank == 0 else 0)
        for rank, count in enumerate(counts)
    ]
    assert with_chosen_partition(config, MODEL) is config
    again = with_chosen_partition(config_of(f"pipeline.partition={word}", *keys), MODEL)
    assert again.pipeline == config.pipeline, "the same wherever it is asked"


@pytest.mark.parametrize("word", ["profile", "balanced"])
def test_images_are_no_larger_than_those_of_the_profile(word: str, tmp_path: Path) -> None:
    (tmp_path / "unused.parquet").touch()
    config = tiny_config(tmp_path, tmp_path / "unused.parquet")
    profile = cpu_profile(config)
    small = {"vision": {1: ImageTable((1, 4), (1,), ((1e-3,), (1e-3,)))}}
    (tmp_path / "profile.json").write_text(replace(profile, encoders=small).to_json())
    keys = ["backbone.pipeline_parallel_size=2", "mode=monolithic", "pipeline.encoder_layers=mixed"]
    keys += [f"pipeline.partition={word}", f"allocator.profile={tmp_path / 'profile.json'}"]
    config = override_config(config, [*keys, "scheduler.microbatch_tokens=512"])
    model = family_from_config(config).model_spec
    counts = with_chosen_partition(config, model).pipeline.counts
    assert counts is not None and sum(counts) == 3, "one layer of the tower, two of the backbone"


@pytest.mark.parametrize("mode", ["decoupled", "llm_only"])
@pytest.mark.parametrize("word", WORDS)
def test_without_an_encoder_decoder_layers_alone_are_cut(mode: str, word: str) -> None:
    keys = ("pipeline.encoder_layers=first", f"mode={mode}", f"pipeline.partition={word}")
    chunks = ("pipeline.chunks=2", "pipeline.schedule=interleaved_1f1b")
    config = with_chosen_partition(config_of(*keys, *chunks), MODEL)
    counts = config.pipeline.counts
    assert counts is not None and len(counts) == 8 and sum(counts) == DEPTH
    assert list(accumulate(counts))[-1] == DEPTH and np.ptp(counts) <= 6


def test_one_stage_needs_no_numbers() -> None:
    config = config_of("pipeline.partition=balanced", "backbone.pipeline_parallel_size=1")
    assert with_chosen_partition(config, MODEL).pipeline.partition is None


def test_other_words_and_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline.partition = 'fair': must be one of uniform, parameters, profile"):
        config_of("pipeline.partition=fair")
    with pytest.raises(ConfigError, match=r"pipeline.partition.1 = -2: must be a number of layers"):
        config_of("pipeline.partition=[4,-2,3,4]")
    with pytest.raises(ConfigError, match="is more than the 56 layers that the stages share"):
        with_chosen_partition(config_of("pipeline.partition=balanced", "backbone.pipeline_parallel_size=64"), MODEL)
