"""The profiler on a tiny model, without Ray: what it reports, not how long anything takes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flowtrain.actors import profiler as profiler_module
from flowtrain.actors.link import CoordinatorLink
from flowtrain.actors.profiler import Profiler
from flowtrain.actors.replica_channel import Alone
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned_run import planned_samples, workload_of
from flowtrain.controller.prepare import prepare
from flowtrain.controller.profiling import _refs, _tensor_degrees, modules_apart
from flowtrain.controller.profiling_means import mean_backbone, mean_encoder, slowest_facts
from flowtrain.costs.microbatches import ALIGNED_TOKENS
from flowtrain.costs.profile import model_facts
from flowtrain.costs.profile_shapes import packed_lengths, packed_mixes, target_counts
from flowtrain.errors import DataError
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import materialize
from flowtrain.training import profile_backbone, profile_pieces
from flowtrain.training.mesh import LOOPBACK
from flowtrain.training.profile_backbone import (
    STRATEGIES,
    BackboneProfiler,
    _more_losses_s,
    _with_one_word,
    _without_gradient,
    num_layers_of,
)
from flowtrain.training.profile_encoder import measure_encoder_layers
from flowtrain.training.profile_pieces import Pieces
from flowtrain.training.profile_steps import Step
from flowtrain.types.plan import Degrees, PlannedSample
from flowtrain.types.profile import BackboneTimes, DeviceReport, EncoderTimes, LossTimes
from tests.e2e.worlds import World, tiny_config
from tests.training.test_qwen3_vl import CONNECTOR, Case


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    world = World(seed=3)
    world.add_mixed(16)
    return tiny_config(tmp_path, world.write(tmp_path / "train.parquet"))


@pytest.fixture
def profiler(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Profiler]:
    monkeypatch.setattr(profile_backbone, "MEASURED_STEPS", 2)
    monkeypatch.setattr(profile_backbone, "MOST_STEPS", 3)
    monkeypatch.setattr(profile_backbone, "SHORT_STEPS", 2)
    monkeypatch.setattr(profile_backbone, "PAIRED_STEPS", 2)
    threads = torch.get_num_threads()
    found = Profiler(config, 0, Degrees())
    report = found.start(LOOPBACK, 0)
    assert report.name == "cpu" and report.flops > 0 and report.memory_nbytes > 0 and report.link is None
    yield found
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def test_every_module_is_measured_over_its_shapes(profiler: Profiler, config: RunConfig) -> None:
    samples = planned_samples(prepare(config, check_pool=False))
    refs = _refs(samples, "vision")
    assert refs and len({ref.position for ref in refs}) == len(refs)
    found = profiler.encoder("vision", refs)
    assert found.num_patches == (4,), "28 pixels in patches of 14"
    assert found.batch == (1, 3) and len(found.seconds[0]) == 2 and found.decode_s > 0, "at most 12 patches a batch"
    mixes = packed_mixes(workload_of(config, samples))
    times = profiler.backbone(mixes)
    lengths = packed_lengths(config.scheduler.microbatch_tokens)
    for seconds in (times.layers_s, times.heads_s, times.connectors_s):
        assert len(seconds) == len(lengths)
    assert all(0 < each < 60 for table in (times.layers_s, times.heads_s, times.connectors_s) for each in table)
    assert len(times.embeddings_s) == len(lengths) and all(0 < each < 60 for each in times.embeddings_s)
    assert 0.0 <= times.ends_forward_share <= 1.0
    for amount in (times.assembling_s, times.step_s, times.parameter_s, times.ends_s, times.ends_parameter_s):
        assert amount >= 0 and math.isfinite(amount)
    assert times.first_backward_parameter_s >= 0.0
    counts, seconds = times.losses.counts, times.losses.seconds
    assert len(counts) == len(seconds) > 2 and counts[-1] < lengths[-1] and len(times.targets) == len(lengths)
    assert seconds[0] == 0.0 and all(0.0 <= each < 60.0 for each in seconds)
    assert 0 < times.targets[0] <= times.targets[-1] < lengths[-1]
    assert 0 < times.vision_tokens[0] <= times.vision_tokens[-1] < lengths[-1]
    assert 0.0 < times.forward_share < 1.0 and 0.0 < times.head_forward_share < 1.0
    assert 0.0 <= times.losses.forward_share <= 1.0 and 0.0 <= times.pass_forward_share <= 1.0 and times.pass_s >= 0.0


def test_a_tensor_parallel_group_measures_only_what_the_split_changes(profiler: Profiler, config: RunConfig) -> None:
    measuring = BackboneProfiler(config, family_from_config(config).shallow(2), profiler._group)
    measuring._group = replace(profiler._group, degrees=Degrees(tp=2))  # one rank that does not know that it is alone
    mixes = packed_mixes(workload_of(config, planned_samples(prepare(config, check_pool=False))))
    times = measuring.measure(mixes)
    for seconds in (times.layers_s, times.heads_s, times.connectors_s, times.embeddings_s):
        assert len(seconds) == len(mixes[0]) and all(0 < each < 60 for each in seconds)
    assert not times.strategies and times.assembling_s == times.step_s == times.parameter_s == times.pass_s == 0.0


def test_an_encoders_layer_keeps_the_less_the_more_it_computes_again(config: RunConfig) -> None:
    # Of 64 patches: the random state that a recomputed part keeps, 5 kB, outweighs what 4 patches leave.
    sizes = ("config.image_size=112", "config.num_hidden_layers=3", "max_batch_patches=64")
    family = family_from_config(override_config(config, [f"encoders.vision.{size}" for size in sizes]))
    stage, cpu = family.encoder_skeleton("vision"), torch.device("cpu")
    materialize(stage, cpu, family.encoder_weights("vision"), from_checkpoint=False)
    found = measure_encoder_layers(stage, [np.ones((3, 112, 112), dtype=np.float32)], STRATEGIES, cpu)
    assert {each.num_tokens for each in found.values()} == {64}
    kept = {word: each.kept_nbytes for word, each in found.items()}
    assert kept["full"] < kept["selective"] < kept["none"]


def test_samples_without_images_cannot_measure_an_encoder(profiler: Profiler) -> None:
    with pytest.raises(DataError, match=r"encoders.vision: none of 0 samples has an image"):
        profiler.encoder("vision", [])


def test_replicas_are_measured_as_they_reduce_once_a_step(config: RunConfig) -> None:
    """A simulator has what a reduction takes with each microbatch, where that is configured."""
    each = config.backbone.model_copy(update={"gradient_reduction": "microbatch"})
    measured: list[RunConfig] = []

    def backbone(config: RunConfig, now_s: object) -> Any:
        measured.append(config)
        return SimpleNamespace(replica_steps=lambda mixes: mixes)

    profiler: Any = SimpleNamespace(_config=config.model_copy(update={"backbone": each}), _backbone=backbone)
    assert Profiler.replica_steps(profiler, ["mix"], "gradients") == ["mix"]
    assert (measured[0].backbone.gradient_reduction, measured[0].backbone.sharding) == ("step", "gradients")


def test_groups_are_measured_that_can_split_the_backbone(config: RunConfig) -> None:
    run_spec = prepare(config)
    assert _tensor_degrees(run_spec, family_from_config(config), 7) == [2], "4 does not divide the heads"
    text = {key: value for key, value in config.backbone.config.items() if key != "head_dim"}
    text["model_type"] = "olmo2"  # transformers' plan of it asks for styles that FlowTrain does not have
    other = config.model_copy(update={"backbone": config.backbone.model_copy(update={"config": text})})
    assert _tensor_degrees(run_spec, family_from_config(other), 7) == []


def test_modules_of_a_run_without_encoder_actors_are_measured_too(config: RunConfig) -> None:
    inside = override_config(
        config,
        [
            "mode=monolithic",
            "backbone.pipeline_parallel_size=2",
            "pipeline={encoder_layers: mixed, partition: [1, 2]}",
            "encoders.vision.tensor_parallel_size=3",
        ],
    )
    assert prepare(inside).partition.text == "encoder 0 @0, backbone 0-1 @1"
    apart = prepare(modules_apart(inside), check_pool=False)
    assert apart.partition.text == "backbone 0 @0, backbone 1 @1" and set(apart.plan.encoders) == {"vision"}
    assert model_facts(apart.config, apart.model_spec) == model_facts(inside, prepare(inside).model_spec)
    several = override_config(config, ["mode=disaggregated", "encoders.vision.tensor_parallel_size=2"])
    assert modules_apart(several).encoders == several.encoders


@pytest.mark.parametrize("trained", [False, True])
def test_a_profile_is_of_the_same_model_wherever_a_frozen_connector_runs(trained: bool) -> None:
    inside = Case("monolithic", trained, freeze=CONNECTOR).config
    specs = {config.mode: family_from_config(config).model_spec for config in (inside, modules_apart(inside))}
    assert specs["monolithic"].connector != specs["decoupled"].connector, "it runs with the encoder"
    assert specs["monolithic"].num_parameters == specs["decoupled"].num_parameters
    facts = [model_facts(inside, spec) for spec in specs.values()]
    assert facts[0] == facts[1]
    other = replace(specs["monolithic"].connector, out_dim=1)
    assert model_facts(inside, replace(specs["monolithic"], connector=other)) != facts[0]


def test_all_layers_or_one_compute_and_the_model_stays_whole(profiler: Profiler, config: RunConfig) -> None:
    source = family_from_config(config).shallow(3)
    measuring = BackboneProfiler(config, source, profiler._group)
    layers = measuring._layers
    assert len(layers) == 3
    ran: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    mixes = packed_mixes(workload_of(config, planned_samples(prepare(config, check_pool=False))))
    batches = [measuring._batch(mix) for mix in mixes[0]]
    measuring._step(1, batches)
    assert set(ran) == {0} and len(ran) == len(batches) + 2
    ran.clear()
    measuring._step(3, batches)
    assert ran == [0, 1, 2] * (len(batches) + 2)
    assert measuring._module.decoder_layers == layers
    whole = sum(each.numel() for each in measuring._module.parameters())
    assert measuring._num_parameters(3) == whole > measuring._num_parameters(1)


def test_a_further_stage_is_measured_by_running_one(profiler: Profiler, config: RunConfig) -> None:
    reads = itertools.count()  # each pass of a stage reads the clock twice, a second apart
    source = family_from_config(config).shallow(3)
    measuring = BackboneProfiler(config, source, profiler._group, lambda: float(next(reads)))
    mixes = packed_mixes(workload_of(config, planned_samples(prepare(config, check_pool=False))))
    assert measuring._pass_s([by_length[0] for by_length in mixes]) == (2.0, 0.5), "both passes, half of it forward"
    single = BackboneProfiler(config, family_from_config(config).shallow(1), profiler._group)
    assert single._pass_s([by_length[0] for by_length in mixes]) == (0.0, 0.5), "one layer is one stage"


def test_costs_of_attention_and_of_the_loss_are_told_by_microbatches_that_differ_in_them() -> None:
    """A step here takes what a microbatch's tokens, squares and targets cost, so the costs must come back."""
    square_s, ragged_s, few_s, further_s, forward_share = 3e-6, 1e-6, 2e-4, 1e-4, 0.75
    fake: Any = SimpleNamespace(_layers=range(3), _batch=lambda mix: mix, _rounds=lambda most: range(min(most, 4)))

    def step(num_layers: int, mixes: list[list[PlannedSample]]) -> Step:
        seconds, forwards = [], []
        for mix in mixes:
            lengths = np.array([each.num_tokens for each in mix])
            ragged = (lengths**2 * (lengths % ALIGNED_TOKENS > 0)).sum()
            targets = sum(each.num_target_tokens for each in mix)
            assert (lengths > [each.num_target_tokens for each in mix]).all(), "the last token predicts none"
            head_s = loss_s(targets)
            layer_s = 0.01 + square_s * (lengths**2).sum() + ragged_s * ragged
            seconds.append(0.1 + num_layers * layer_s + head_s)
            forwards.append(0.1 + num_layers * layer_s / 3.0 + forward_share * head_s)
        return Step(seconds, forwards, 0.0, 0.0, 0.0, 0.0)

    def loss_s(targets: int) -> float:
        return few_s * min(targets, 12) + further_s * max(targets - 12, 0)

    fake._step = step
    for lengths in ([500], [90, 300, 60], [20] * 25):
        mix = [PlannedSample(number, length, 0, length // 3) for number, length in enumerate(lengths)]
        assert BackboneProfiler._squares_s(fake, [mix, mix[:1]]) == pytest.approx((square_s, ragged_s))
    assert BackboneProfiler._squares_s(fake, [[PlannedSample(0, 40, 0, 1)]]) == (0.0, 0.0), "too short to differ"
    mix = [PlannedSample(number, 101, 0, 10) for number in range(5)]
    losses = BackboneProfiler._losses(fake, mix)
    assert losses.counts == target_counts(500) and losses.forward_share == pytest.approx(forward_share)
    assert losses.seconds == pytest.approx([loss_s(count) - loss_s(1) for count in losses.counts])
    few_s = further_s = 0.0
    assert BackboneProfiler._losses(fake, mix).forward_share == 0.0, "nothing has no share"


def test_the_losses_of_a_rounds_mix_count_as_those_of_the_mean_mix() -> None:
    """Otherwise a table would have the middle one of three jumps, and not their mean."""
    losses = LossTimes((1, 4, 5, 9), (0.0, 0.0, 8.0, 8.0), 1.0)
    mixes = [[[PlannedSample(0, 20, 0, targets), PlannedSample(1, 20, 0, 1)]] for targets in (2, 3, 7)]
    assert _more_losses_s(losses, mixes).tolist() == [[-8.0], [-8.0], [0.0]], "of 3, 4 and 8; 5 in the middle"


def test_a_steps_ends_are_told_from_the_same_microbatch_in_the_middle() -> None:
    forwards, backwards = {0: 3.0, 1: 2.0, 2: 1.0, 3: 1.5}, {0: 3.0, 1: 5.0, 2: 4.0, 3: 6.0}
    clock = iter([0.0, 30.0])
    fake: Any = SimpleNamespace(
        _module=None,
        _layers=[],
        _now_s=lambda: next(clock),
        _run=lambda *_: SimpleNamespace(forward_s=forwards, backward_s=backwards),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_backbone, "_only_layers", lambda *_: nullcontext())
        found = BackboneProfiler._step(fake, 1, ["first", "second"])
    assert (found.microbatches_s, found.forwards_s) == ([7.0, 5.0], [2.0, 1.0])
    assert (found.first_s, found.last_s, found.first_backward_s) == (2.0, 2.0, 1.0)
    passes_s = sum(forwards.values()) + sum(backwards.values())
    assert found.beside_s == 30.0 - passes_s + 0.5 - 1.0, "the last forward and the first backward as in the middle"


@pytest.mark.parametrize("less_s", [1.0, -1.0])
def test_a_first_backward_that_takes_longer_stays_in_the_step(less_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_backbone, "SHORT_STEPS", 2)
    fake: Any = SimpleNamespace(
        _layers=range(3),
        _batch=lambda mix: mix,
        _step=lambda depth, batches: Step([9.0], [3.0], 2.0 * depth - less_s, 0.0, 0.0, less_s),
        _num_parameters=lambda depth: depth,
    )
    found = BackboneProfiler.replica_steps(fake, [[]])
    saved_s = max(less_s, 0.0)
    assert found.first_backward_s == (saved_s, saved_s)
    assert found.beside_s == (2.0 - less_s + saved_s, 6.0 - less_s + saved_s)


def test_each_round_is_corrected_by_its_own_mix(
    profiler: Profiler, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_backbone, "MOST_STEPS", 2)
    more_s = np.array([[0.0], [-1000.0], [-2000.0]])
    monkeypatch.setattr(profile_backbone, "_more_losses_s", lambda losses, mixes: more_s * np.ones(len(mixes[0])))
    mixes = packed_mixes(workload_of(config, planned_samples(prepare(config, check_pool=False))))
    times = profiler.backbone(mixes)
    assert all(1500.0 < each < 1560.0 for each in times.heads_s), "the second mix and the third, after one to warm up"
    assert all(each < 60.0 for each in times.layers_s), "of each kind, so that no difference has it"


def test_an_embedding_without_a_gradient_hands_one_to_nobody() -> None:
    embedding = torch.nn.Embedding(5, 2)
    with _without_gradient(embedding):
        output = embedding(torch.tensor([1, 3]))
        output.sum().backward()
    assert embedding.weight.grad is None and output.grad is not None, "what follows computes its own"
    embedding(torch.tensor([1])).sum().backward()
    assert embedding.weight.grad is not None


def test_devices_side_by_side_count_as_the_slowest_and_their_times_as_means() -> None:
    devices = [DeviceReport("cpu", flops, 100, 10.0, None) for flops in (3e9, 2e9)]
    facts = slowest_facts(devices, devices_per_node=3)
    assert (facts.flops, facts.memory_nbytes, facts.link, facts.devices_per_node) == (2e9, 100, None, 3)
    encoders = [EncoderTimes((4, 8), (1,), ((each,), (2 * each,)), each) for each in (1.0, 3.0)]
    assert mean_encoder(encoders) == EncoderTimes((4, 8), (1,), ((2.0,), (4.0,)), 2.0)
    backbones = [
        BackboneTimes((each,), (1.0, each), (0.5,), 0.1, each, 0.0, (each,), each, forward_share=each / 4.0)
        for each in (1.0, 2.0)
    ]
    mean = BackboneTimes((1.5,), (1.0, 1.5), (0.5,), 0.1, 1.5, 0.0, (1.5,), 1.5, forward_share=0.375)
    assert mean_backbone(backbones) == mean


def test_a_shallow_model_is_the_runs_own_but_for_its_depth(config: RunConfig) -> None:
    family = family_from_config(config)
    shallow = family.shallow(5)
    assert shallow.text_config.num_hidden_layers == 5 and family.text_config.num_hidden_layers == 2
    assert len(shallow.load_backbone().decoder_layers) == 5
    assert shallow.text_config.hidden_size == family.text_config.hidden_size


def test_few_layers_are_measured_whole_and_many_by_their_kinds(config: RunConfig) -> None:
    assert [num_layers_of(config, depth) for depth in (1, 2, 5, 6, 80)] == [2, 2, 5, 3, 3]
    section = {"activation_checkpointing": "every_n", "checkpoint_every": 3}
    every = config.model_copy(update={"backbone": config.backbone.model_copy(update=section)})
    assert num_layers_of(every, 80) == 4


def test_of_a_list_of_memory_strategies_the_commonest_is_measured(config: RunConfig) -> None:
    section = {"activation_checkpointing": ("none", "full", "offload", "full")}
    listed = config.model_copy(update={"backbone": config.backbone.model_copy(update=section)})
    assert _with_one_word(listed).backbone.activation_checkpointing == "full"
    assert _with_one_word(config) is config


def test_calls_are_timed_through_the_link() -> None:
    calls: list[str] = []

    class Link(CoordinatorLink):
        @property
        def node_id(self) -> str:
            return "here"

        def ask(self, question: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(question.__name__)
            return float(len(calls))  # each call takes a second of the other process

    times = Profiler.calls(Profiler.__new__(Profiler), Link())
    assert times.wall_s >= 0 and times.asking_s >= 0
    assert calls.count("processor_s") == 2 and set(calls) == {"ping", "processor_s"}
    assert times.answering_s == pytest.approx(1.0, rel=0.1)


def test_the_ranks_messages_are_timed(profiler: Profiler, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiler.messages_s() > 0
    orders: list[bytes] = []

    class Recording(Alone):
        def share(self, message: Any = None) -> Any:
            orders.append(message)
            return message

    monkeypatch.setattr(profiler_module, "channel_of", lambda group: Recording())
    monkeypatch.setattr(time, "process_time", lambda: float(len(orders)))  # each order takes a second
    assert profiler.messages_s() == 1.0, "the first, which connects, does not count"
    assert set(map(len, orders)) == {8 * config.scheduler.microbatch_tokens}, "as long as a full microbatch's texts"


def test_samples_are_fed_as_by_a_feeder(profiler: Profiler) -> None:
    assert 0 < profiler.feeding_s() < 60


def test_work_is_repeated_until_the_end_and_its_last_piece_does_not_count(
    profiler: Profiler, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "pin_to", lambda num_cores: None)
    samples = planned_samples(prepare(config, check_pool=False))
    mix = packed_mixes(workload_of(config, samples))[0][-1]
    for held_s in (profiler.hold_backbone(mix), profiler.hold_encoder("vision", _refs(samples, "vision"))):
        assert 0 < held_s < 60
        assert profiler.repeat(0.0, 0.0) > 0, "one piece, however late it ends"
    ran: list[int] = []
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(profile_pieces, "clock_of", lambda device: lambda: float(len(ran)))
    pieces = Pieces(lambda: ran.append(len(ran)), torch.device("cpu"))
    assert pieces.repeat(0.0, 5.0) == 1.0
    assert len(ran) == 6, "the sixth ends too late"


def test_replicas_run_the_same_steps_as_one_rank(profiler: Profiler, config: RunConfig) -> None:
    mixes = packed_mixes(workload_of(config, planned_samples(prepare(config, check_pool=False))))
    steps = profiler.replica_steps([by_length[0] for by_length in mixes], "gradients")
    few, many = steps.num_parameters
    assert 0 < few < many and all(seconds > 0 for seconds in steps.microbatch_s)


def test_a_backbone_through_which_gradients_only_pass_is_measured(profiler: Profiler, config: RunConfig) -> None:
    model = config.model.model_copy(update={"freeze": ("connector", "backbone")})
    encoders = {name: each.model_copy(update={"trainable": True}) for name, each in config.encoders.items()}
    config = config.model_copy(update={"mode": "monolithic", "model": model, "encoders": encoders})
    measuring = BackboneProfiler(config, family_from_config(config).shallow(2), profiler._group)
    mixes = packed_mixes(workload_of(config, planned_samples(prepare(config, check_pool=False))))
    assert all(seconds > 0 for seconds in measuring.measure(mixes).layers_s)
