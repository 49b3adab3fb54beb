"""Measures the parts of a backbone's step, with the real trainer and a few layers of the model."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from flowtrain.config.pipeline import PipelineConfig
from flowtrain.config.run import RunConfig
from flowtrain.costs.microbatches import ragged_squares
from flowtrain.costs.profile_layers import losses_s
from flowtrain.costs.profile_shapes import attention_mixes, target_counts, with_targets
from flowtrain.costs.profile_together import line_through
from flowtrain.models.backbone import Backbone
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy
from flowtrain.pipeline.executor import execute
from flowtrain.training.batch import IGNORED_LABEL, PackedBatch, SampleArrays, build_batch
from flowtrain.training.chunks import BackboneSource
from flowtrain.training.mesh import BackboneGroup
from flowtrain.training.profile_device import clock_of
from flowtrain.training.profile_steps import HeldStages, Step, TimedStages
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Microbatch, PlannedSample, StepPlan, Unit, UnitKind
from flowtrain.types.profile import BackboneTimes, LayerTimes, LossTimes, ReplicaSteps

WARMUP_STEPS, MEASURED_STEPS = 1, 6
MOST_STEPS, ENOUGH_S = 20, 60.0
"""Rounds that are measured, as long as they do not take longer than that."""
FEW_STEPS, SHORT_STEPS, PAIRED_STEPS = 3, 20, 40
"""Measured steps where one length alone is measured; where small differences between short ones are; and, as long as
they do not take longer than ``ENOUGH_S``, where they are between microbatches that differ in one thing alone."""
STRATEGIES = {
    "none": MemoryKind.KEEP,
    "selective": MemoryKind.SELECTIVE,
    "full": MemoryKind.RECOMPUTE,
    "offload": MemoryKind.OFFLOAD,
}
"""Kinds by the words of ``backbone.activation_checkpointing``."""
_LEAST_S = 1e-9
_MOST_SHARE = 0.9
"""Of a part's time in one of its passes, so that noise cannot take all of it."""
MOST_LAYERS = 5
"""A model of at most this many layers is measured whole, so its times include what memory and caches add with depth."""


class ShallowSource(BackboneSource, Protocol):
    """The part of a model family that the profiler needs; the model has ``num_layers_of`` layers."""

    image_token_id: int
    text_config: PreTrainedConfig

    def feature_dim(self, encoder: str) -> int:
        """Width of a feature row."""


def num_layers_of(config: RunConfig, num_layers: int) -> int:
    """Return how many layers to measure of a model's ``num_layers``: all if there are few, else 3.

    With ``every_n`` n + 1 layers: those after the first include one that is recomputed.
    """
    if config.backbone.activation_checkpointing == "every_n":
        return 1 + config.backbone.checkpoint_every
    return max(num_layers, 2) if num_layers <= MOST_LAYERS else 3


class BackboneProfiler:
    """Runs steps of a shallow model in four kinds: with all its layers; with one layer; without images, too; and, in
    addition, without a gradient of the embedding.

    The differences of each kind and the next are the times of layers, of the connector and of the embedding's gradient;
    the head's is the rest. Each step runs all lengths in the middle, and one more microbatch before and after them:
    FSDP gathers with the first microbatch and reduces with the last, and these costs belong to the step.
    """

    def __init__(
        self, config: RunConfig, source: ShallowSource, group: BackboneGroup, now_s: Callable[[], float] | None = None
    ) -> None:
        """now_s: the clock; None: ``clock_of`` the device."""
        config = _with_one_word(config).model_copy(update={"mode": "decoupled", "pipeline": PipelineConfig()})
        self._config, self._source, self._group = config, source, group
        self._trainer = Trainer(config, source, group, num_steps=10**6)
        self._module = self._trainer.model.backbone[0]
        self._layers = self._module.decoder_layers
        self._now_s = now_s if now_s is not None else clock_of(group.device, is_alone=group.world_size == 1)
        self._steps = 0

    def measure(self, mixes: Sequence[Sequence[Sequence[PlannedSample]]]) -> BackboneTimes:
        """Return the medians over steps that run ``mixes[mix][length]`` in turn; collective over a tensor group.

        Of such a group assembling, memory strategies and what a step or a stage takes are 0, or absent, since one rank
        alone tells them.
        """
        is_alone = self._group.degrees.tp == 1
        losses, found = self._losses(self._configured(mixes[0])), self._steps_by_kind(mixes)
        more_s = _more_losses_s(losses, mixes)[[(WARMUP_STEPS + at) % len(mixes) for at in range(len(found["deep"]))]]
        seconds = {kind: np.array([step.microbatches_s for step in steps]) - more_s for kind, steps in found.items()}
        # Differences within a round come before the median: a round has the same mix.
        connectors = np.median(seconds["one"] - seconds["blind"], axis=0).clip(0.0)
        embeddings = np.zeros_like(connectors)
        if "cut" in seconds:
            embeddings = np.median(seconds["blind"] - seconds["cut"], axis=0).clip(0.0)
        depth, deep = len(self._layers), np.median(seconds["deep"], axis=0)
        layers = np.median(seconds["deep"] - seconds["one"], axis=0) / (depth - 1)
        # The parts must add up to the measured whole, also if noise would make the head's time negative.
        layers = np.minimum(layers, (deep - connectors) / depth)
        embeddings = np.minimum(embeddings, _MOST_SHARE * (deep - depth * layers - connectors))
        heads = deep - depth * layers - connectors - embeddings
        longest = [by_length[-1] for by_length in mixes]
        squares, ragged, targets, vision = np.mean([list(map(_amounts, each)) for each in mixes], axis=0).T.tolist()
        forwards = {kind: np.array([step.forwards_s[-1] for step in steps]) for kind, steps in found.items()}
        forward_s = float(np.median(forwards["deep"] - forwards["one"])) / (depth - 1)
        forwards["blind"] -= losses.forward_share * more_s[:, -1]
        head_forward_share = _share(float(np.median(forwards["blind"])) - forward_s, float(heads[-1]))
        square_s, ragged_s = self._squares_s([self._configured(each) for each in mixes])
        times = BackboneTimes(
            layers_s=_positive(layers),
            heads_s=_positive(heads),
            connectors_s=_positive(connectors),
            assembling_s=self._assembling_s(longest) if is_alone else 0.0,
            step_s=0.0,
            parameter_s=0.0,
            embeddings_s=_positive(embeddings),
            square_s=square_s,
            squares=tuple(squares),
            ragged_s=ragged_s,
            ragged=tuple(ragged),
            losses=losses,
            targets=tuple(targets),
            vision_tokens=tuple(vision),
            strategies={word: self._strategy(kind, longest[0]) for word, kind in STRATEGIES.items() if is_alone},
            forward_share=_share(forward_s, float(layers[-1])),
            head_forward_share=head_forward_share,
        )
        return self._with_steps(times, [by_length[0] for by_length in mixes]) if is_alone else times

    def _with_steps(self, times: BackboneTimes, mixes: Sequence[Sequence[PlannedSample]]) -> BackboneTimes:
        """Add what a step and a pipeline stage take beside layers and head; ``mixes`` in turn."""
        steps = self.replica_steps(mixes)
        step_s, parameter_s = line_through(steps.num_parameters, steps.beside_s)
        ends_s, ends_parameter_s = line_through(steps.num_parameters, steps.ends_s)
        trained = steps.num_parameters[1]
        pass_s, pass_forward_share = self._pass_s(mixes)
        return replace(
            times,
            step_s=step_s,
            parameter_s=parameter_s,
            ends_s=ends_s,
            ends_parameter_s=ends_parameter_s,
            ends_forward_share=min(max(steps.first_s[1] / max(steps.ends_s[1], _LEAST_S), 0.0), 1.0),
            first_backward_parameter_s=steps.first_backward_s[1] / trained if trained else 0.0,
            pass_s=pass_s,
            pass_forward_share=pass_forward_share,
        )

    def _steps_by_kind(self, mixes: Sequence[Sequence[Sequence[PlannedSample]]]) -> dict[str, list[Step]]:
        """Return the measured steps of each kind, in turn; ``cut`` only where the embedding has a gradient."""
        kinds = {"deep": (len(self._layers), True, True), "one": (1, True, True), "blind": (1, False, True)}
        if any(each.requires_grad for each in self._embedding.parameters()):
            kinds["cut"] = (1, False, False)
        batches = {
            sees: [[self._batch(mix, sees) for mix in by_length] for by_length in mixes] for sees in (True, False)
        }
        found: dict[str, list[Step]] = {kind: [] for kind in kinds}
        for number in self._rounds(MOST_STEPS):
            for kind, (num_layers, sees, embeds) in kinds.items():
                with nullcontext() if embeds else _without_gradient(self._embedding):
                    step = self._step(num_layers, batches[sees][number % len(mixes)])
                if number >= WARMUP_STEPS:
                    found[kind].append(step)
        return found

    def _rounds(self, most: int) -> Iterator[int]:
        """Number rounds, the first ones to warm up; collective, since ranks' clocks differ."""
        started_s = self._now_s()
        for number in range(WARMUP_STEPS + most):
            if number >= WARMUP_STEPS + MEASURED_STEPS:
                seconds = torch.tensor([self._now_s() - started_s], dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._group.process_group)
                if seconds.item() > ENOUGH_S:
                    return
            yield number

    def _squares_s(self, mixes: Sequence[Sequence[PlannedSample]]) -> tuple[float, float]:
        """Seconds of a layer's attention per squared token, and how many more in sequences of ragged lengths.

        By sequences as long as the longest of the mixes against more of a quarter, and by some of the mixes' mean
        length against some that are slightly longer and shorter: in far longer ones each squared token takes less, and
        in far shorter ones ragged lengths cost more. The microbatches of a pair have as many tokens with loss, and each
        follows one like it, so that they differ in attention alone.
        """
        pairs = attention_mixes(mixes)
        if not pairs:
            return 0.0, 0.0
        batches = [batch for each in pairs for batch in [self._batch(each)] * 2]
        found = []
        for number in self._rounds(PAIRED_STEPS):
            step = self._step(len(self._layers), batches)
            if number >= WARMUP_STEPS:
                found.append(np.diff(step.microbatches_s[1::2])[::2] / len(self._layers))
        longer_s, uneven_s = np.median(found, axis=0).tolist()
        (few, _), (many, _), (fewer, _), (more, ragged) = map(_squares, pairs)
        square_s = max(0.0, longer_s) / (many - few)
        return square_s, max(0.0, uneven_s - square_s * (more - fewer)) / ragged

    def _configured(self, by_length: Sequence[Sequence[PlannedSample]]) -> Sequence[PlannedSample]:
        """Return the mix whose length is nearest to the run's microbatches."""
        configured = self._config.scheduler.microbatch_tokens
        return min(by_length, key=lambda mix: abs(sum(each.num_tokens for each in mix) - configured))

    def _losses(self, mix: Sequence[PlannedSample]) -> LossTimes:
        """Times of a microbatch's head by its number of tokens with loss.

        Each microbatch follows one like it, as most of a run's do: after a larger one it would take longer.
        """
        counts = target_counts(max(1, sum(each.num_tokens - 1 for each in mix)))
        batches = [batch for count in counts for batch in [self._batch(with_targets(mix, count))] * 2]
        found = []
        for number in self._rounds(MOST_STEPS):
            step = self._step(1, batches)
            if number >= WARMUP_STEPS:
                seconds = np.array([step.microbatches_s[1::2], step.forwards_s[1::2]])
                found.append(seconds - seconds[:, :1])
        both, forward = np.median(found, axis=0).clip(0.0).tolist()
        return LossTimes(counts, tuple(both), min(forward[-1] / both[-1], 1.0) if both[-1] > 0.0 else 0.0)

    def _pass_s(self, mixes: Sequence[Sequence[PlannedSample]]) -> tuple[float, float]:
        """Seconds of forward and backward that a further pipeline stage adds to a microbatch, and the forward's share.

        Steps of the whole model in one stage and in two take turns; the shorter the microbatches, the less does their
        noise hide it. 0 for a model whose measured layers must lie in one stage, and on an accelerator, whose host
        starts a stage's kernels while those of the one before run.
        """
        spec = self._source.model_spec.backbone
        if spec.num_layers <= spec.first_layers or self._group.device.type != "cpu":
            return 0.0, 0.5
        pipeline = PipelineConfig(schedule="interleaved_1f1b", chunks=2)
        cut = Trainer(self._config.model_copy(update={"pipeline": pipeline}), self._source, self._group, 10**6)
        found = []
        for number in range(WARMUP_STEPS + SHORT_STEPS):
            batches = [self._batch(mixes[number % len(mixes)])] * FEW_STEPS
            one, two = (self._step(len(self._layers), batches, trainer=each) for each in (self._trainer, cut))
            if number >= WARMUP_STEPS:
                found.append(
                    [sum(two.microbatches_s) - sum(one.microbatches_s), sum(two.forwards_s) - sum(one.forwards_s)]
                )
        del cut
        gc.collect()  # a trainer's stages refer to it
        both, forward = (np.median(found, axis=0) / FEW_STEPS).clip(0.0).tolist()
        return both, min(forward / both, 1.0) if both > 0.0 else 0.5

    def _strategy(self, kind: MemoryKind, mix: Sequence[PlannedSample]) -> LayerTimes:
        """Times of a layer that follows a memory strategy, over a full microbatch."""
        batch, memory = [self._batch(mix)], MemoryStrategy(kind)
        seconds, kept = [], []
        for number in range(WARMUP_STEPS + FEW_STEPS):
            deep, one = (self._step(depth, batch, memory).microbatches_s[0] for depth in (len(self._layers), 1))
            if number >= WARMUP_STEPS:
                seconds.append(deep - one)
        for depth in (len(self._layers), 1):
            with _only_layers(self._module, self._layers[:depth]):
                kept.append(self._kept_nbytes(batch * 3, memory))
        more = len(self._layers) - 1
        num_tokens = sum(each.num_tokens for each in mix)
        layer_s = max(statistics.median(seconds) / more, _LEAST_S)
        return LayerTimes(num_tokens, layer_s, max(kept[0] - kept[1], 0) / more)

    def _kept_nbytes(self, batches: Sequence[PackedBatch], memory: MemoryStrategy) -> int:
        """Bytes that the forward of a microbatch in the middle leaves for its backward."""
        runtime = HeldStages(self._trainer.stages, self._now_s, self._group.device)
        self._execute(self._trainer, batches, runtime, memory)
        return runtime.kept_nbytes

    def replica_steps(self, mixes: Sequence[Sequence[PlannedSample]]) -> ReplicaSteps:
        """Return the medians over steps of one microbatch each; ``mixes`` in turn; collective.

        The shorter the microbatches, the less does their noise hide what is beside them.
        """
        batches = [self._batch(mix) for mix in mixes]
        depths = (1, len(self._layers))
        found: dict[int, list[Step]] = {depth: [] for depth in depths}
        for number in range(WARMUP_STEPS + SHORT_STEPS):
            for depth in depths:
                step = self._step(depth, [batches[number % len(mixes)]])
                if number >= WARMUP_STEPS:
                    found[depth].append(step)

        def medians(of: Callable[[Step], float]) -> tuple[float, float]:
            shallow, deep = (statistics.median(map(of, found[depth])) for depth in depths)
            return shallow, deep

        numbers = (self._num_parameters(1), self._num_parameters(len(self._layers)))
        shallow, deep = (max(each, 0.0) for each in medians(lambda step: step.first_backward_s))
        beside_shallow, beside_deep = medians(lambda step: step.beside_s)
        return ReplicaSteps(
            numbers,
            medians(lambda step: step.microbatches_s[0]),
            (beside_shallow + shallow, beside_deep + deep),
            medians(lambda step: step.first_s),
            medians(lambda step: step.last_s),
            (shallow, deep),
        )

    def piece(self, mix: Sequence[PlannedSample]) -> Callable[[], object]:
        """Return a call that runs a whole step of two equal microbatches."""
        batches = [self._batch(mix)] * 2
        return lambda: self._run(batches)

    def _step(
        self,
        num_layers: int,
        batches: Sequence[PackedBatch],
        memory: MemoryStrategy | None = None,
        trainer: Trainer | None = None,
    ) -> Step:
        """Run a step. trainer: None: of the model in one stage, which any number of layers can be left out of."""
        ends = [batches[-1], *batches, batches[-1]]
        with _only_layers(self._module, self._layers[:num_layers]):
            started_s = self._now_s()
            runtime = self._run(ends, memory, trainer)
            total_s = self._now_s() - started_s
        forwards_s, backwards_s = (
            [each[number] for number in range(1, len(ends) - 1)] for each in (runtime.forward_s, runtime.backward_s)
        )
        microbatches_s = [sum(passes) for passes in zip(forwards_s, backwards_s, strict=True)]
        # The last one in the middle is the same microbatch as those at the ends.
        first_s, last_s = runtime.forward_s[0] - forwards_s[-1], runtime.backward_s[len(ends) - 1] - backwards_s[-1]
        beside_s = total_s - sum(microbatches_s) - 2.0 * microbatches_s[-1] - first_s - last_s
        first_backward_s = backwards_s[-1] - runtime.backward_s[0]
        return Step(microbatches_s, forwards_s, beside_s, first_s, last_s, first_backward_s)

    def _run(
        self, batches: Sequence[PackedBatch], memory: MemoryStrategy | None = None, trainer: Trainer | None = None
    ) -> TimedStages:
        """Run a step; returns what timed it. memory: of all layers; None: as configured."""
        trainer = self._trainer if trainer is None else trainer
        runtime = TimedStages(trainer.stages, self._now_s)
        self._execute(trainer, batches, runtime, memory)
        return runtime

    def _execute(
        self, trainer: Trainer, batches: Sequence[PackedBatch], runtime: TimedStages, memory: MemoryStrategy | None
    ) -> None:
        self._steps += 1
        actions = trainer.begin_unit(_plan_of(batches, self._steps, self._group.degrees.dp))
        if memory is not None:
            actions = tuple(each if each.memory is None else replace(each, memory=memory) for each in actions)
        execute(actions, runtime, batches.__getitem__)
        trainer.finish_unit()

    def _num_parameters(self, num_layers: int) -> int:
        """Trainable parameters of this rank with ``num_layers`` layers."""
        idle = {parameter for layer in self._layers[num_layers:] for parameter in layer.parameters()}
        shares = self._group.degrees.tp
        used = [each for each in self._module.parameters() if each.requires_grad and each not in idle]
        return sum(each.numel() for each in used) // shares

    def _batch(self, samples: Sequence[PlannedSample], sees: bool = True) -> PackedBatch:
        batch = self._assembled([self._arrays(sample, sees) for sample in samples])
        if self._config.trains_encoders:
            batch.features.requires_grad_()  # the backward goes on to the encoder
        return batch

    def _assembled(self, arrays: list[SampleArrays]) -> PackedBatch:
        return build_batch(
            arrays,
            image_token_id=self._source.image_token_id,
            feature_dim=self._feature_dim,
            dtype=getattr(torch, self._config.model.dtype),
            loss_normalization="token",
            device=self._group.device,
        )

    @property
    def _embedding(self) -> nn.Module:
        embedding: nn.Module = self._module.language_model.get_input_embeddings()
        return embedding

    @property
    def _feature_dim(self) -> int:
        return self._source.feature_dim(next(iter(self._config.encoders)))

    def _arrays(self, sample: PlannedSample, sees: bool) -> SampleArrays:
        """Random arrays of a sample's sizes: image tokens first, loss on the last tokens."""
        generator = np.random.default_rng(sample.position)
        ids = generator.integers(0, self._source.text_config.vocab_size - 1, sample.num_tokens)
        ids += ids >= self._source.image_token_id  # any token but the image's
        num_rows = sample.num_vision_tokens if sees else 0
        ids[:num_rows] = self._source.image_token_id
        labels = np.full(sample.num_tokens, IGNORED_LABEL)
        labels[sample.num_tokens - sample.num_target_tokens :] = ids[sample.num_tokens - sample.num_target_tokens :]
        features = torch.from_numpy(generator.standard_normal((num_rows, self._feature_dim), dtype=np.float32))
        return SampleArrays(sample.position, np.stack([ids, labels]).astype(np.int32), features if num_rows else None)

    def _assembling_s(self, mixes: Sequence[Sequence[PlannedSample]]) -> float:
        """Seconds that the prefetch thread takes to assemble a microbatch, with the caches that computing leaves."""
        seconds = []
        for number in range(MEASURED_STEPS):
            mix = mixes[number % len(mixes)]
            arrays = [self._arrays(sample, sees=True) for sample in mix]
            self._run([self._batch(mix)])
            started_s = self._now_s()
            self._assembled(arrays)
            seconds.append(self._now_s() - started_s)
        return statistics.median(seconds)


def _with_one_word(config: RunConfig) -> RunConfig:
    """Of a list of memory strategies, measure the one that most layers have; of ``adaptive`` full recomputation."""
    words = config.backbone.activation_checkpointing
    if words == "adaptive":
        words = ("full",)
    if isinstance(words, str):
        return config
    return config.model_copy(
        update={"backbone": config.backbone.model_copy(update={"activation_checkpointing": statistics.mode(words)})}
    )


@contextmanager
def _only_layers(module: Backbone, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let the model run these layers alone; the others keep their weights and get no gradient."""
    base = module.language_model.base_model
    whole = base.layers
    base.layers = nn.ModuleList(layers)
    try:
        yield
    finally:
        base.layers = whole


@contextmanager
def _without_gradient(module: nn.Module) -> Iterator[None]:
    """Let no gradient reach a module, while what comes after it computes one for its output."""

    def cut(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        return output.detach().requires_grad_()

    handle = module.register_forward_hook(cut)
    try:
        yield
    finally:
        handle.remove()


def _plan_of(batches: Sequence[PackedBatch], step: int, dp: int) -> StepPlan:
    """A plan with one slot for each batch, the same on each replica, with their numbers of tokens and target tokens."""
    slots = [
        [
            Microbatch(slot, rank, (PlannedSample(slot, batch.num_tokens, 0, batch.num_target_tokens),), 1.0)
            for rank in range(dp)
        ]
        for slot, batch in enumerate(batches)
    ]
    most = max(batch.num_tokens for batch in batches)
    return StepPlan.of_slots(Unit(step, UnitKind.TRAIN, step, 0, dp * len(slots)), most, slots, ())


def _squares(mix: Sequence[PlannedSample]) -> tuple[int, int]:
    """Squared tokens of all sequences, and of those of ragged lengths alone."""
    lengths = np.array([each.num_tokens for each in mix])
    return int(np.square(lengths).sum()), int(ragged_squares(lengths).sum())


def _amounts(mix: Sequence[PlannedSample]) -> tuple[int, int, int, int]:
    """``_squares``, the tokens with loss and the vision tokens."""
    return *_squares(mix), _num_targets(mix), sum(each.num_vision_tokens for each in mix)


def _more_losses_s(losses: LossTimes, mixes: Sequence[Sequence[Sequence[PlannedSample]]]) -> np.ndarray:
    """Seconds that losses take more in each mix than with the mixes' mean number of tokens, ``[mix, length]``."""
    targets = np.array([[_num_targets(mix) for mix in by_length] for by_length in mixes], dtype=np.float64)
    every, mean = (losses_s(losses.counts, losses.seconds, each) for each in (targets, targets.mean(axis=0)))
    return every - mean


def _num_targets(mix: Sequence[PlannedSample]) -> int:
    return sum(each.num_target_tokens for each in mix)


def _share(forward_s: float, seconds: float) -> float:
    return min(max(forward_s / max(seconds, _LEAST_S), 1.0 - _MOST_SHARE), _MOST_SHARE)


def _positive(seconds: np.ndarray) -> tuple[float, ...]:
    return tuple(max(float(each), _LEAST_S) for each in seconds)
