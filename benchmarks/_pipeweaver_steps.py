"""Steps of PipeWeaver's models in the simulator: packed sequences, monolithic pipelines, what they take and hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from flowtrain.allocator.model_file import ModelFile, read_model_file
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.cluster import data_sheet_device_type
from flowtrain.costs.flops import backbone_training_flops, sample_flops
from flowtrain.costs.memory import USABLE_SHARE
from flowtrain.costs.microbatches import MicrobatchColumns, MicrobatchWork
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.training_setup import ReductionName, TrainingSetup
from flowtrain.costs.workload import Workload
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition
from flowtrain.simulator.engine import Timeline
from flowtrain.simulator.memory import held_memory, rank_peaks
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
ENCODER = "vision"
TOKENS = 8192
TOKENS_AN_IMAGE = 169
WORDS = ("none", "selective", "full")
REDUCTIONS: tuple[ReductionName, ...] = ("step", "microbatch")
_OPEN = 16
"""Sequences that are filled at once."""


def model_file(name: str) -> ModelFile:
    return read_model_file(MODELS / f"{name}.yaml")


def sequences(workload: Workload, seed: int) -> Iterator[MicrobatchWork]:
    """Samples in a random order, each put into the fullest of some open sequences that has room for it."""
    rng, (num_images, num_patches) = np.random.default_rng(seed), workload.images[ENCODER]
    held: list[tuple[int, list[int]]] = []
    while True:
        for sample in rng.permutation(len(workload.lengths)).tolist():
            length = int(workload.lengths[sample])
            held.sort(key=lambda each: -each[0])
            at = next((at for at, (tokens, _) in enumerate(held) if tokens + length <= TOKENS), len(held))
            tokens, samples = held.pop(at) if at < len(held) else (0, [])
            held.append((tokens + length, [*samples, sample]))
            if len(held) > _OPEN:
                fullest = max(held, key=lambda each: each[0])
                held.remove(fullest)
                yield _joined(workload, fullest[1], num_images, num_patches)


def _joined(
    workload: Workload, samples: Sequence[int], num_images: np.ndarray, num_patches: np.ndarray
) -> MicrobatchWork:
    counts, patches = num_images[samples], num_patches[samples]
    images = np.repeat(patches // np.maximum(counts, 1), counts)
    return MicrobatchWork(
        tuple(workload.lengths[samples].tolist()),
        int(workload.vision_lengths[samples].sum()),
        int(workload.target_lengths[samples].sum()),
        tuple(images.tolist()),
    )


def even_sequence(num_images: int, patches: int, num_samples: int) -> MicrobatchWork:
    """A full sequence with so many images."""
    each = TOKENS // num_samples
    tokens = TOKENS_AN_IMAGE * num_images
    return MicrobatchWork((each,) * num_samples, tokens, each * num_samples, (patches,) * num_images)


def flops(model: ModelSpec, works: Sequence[MicrobatchWork]) -> np.ndarray:
    """Training FLOPs of each sequence."""
    columns = MicrobatchColumns.of(works)
    none = np.zeros(len(works), dtype=np.int64)
    patches = columns.of_images(columns.patches.astype(np.float64)).astype(np.int64)
    beside = sample_flops(
        model,
        positions=none,
        lengths=none,
        vision_lengths=columns.vision_tokens.astype(np.int64),
        target_lengths=none,
        images={ENCODER: (columns.num_images, patches)} if model.encoders else {},
        freeze=(),
    )
    backbone = [backbone_training_flops(model.backbone, each.lengths, (), each.target_tokens) for each in works]
    return np.array(backbone) + beside.connector + beside.encoders


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model with its encoder, all trained, on some devices by 1F1B.

    place: of the encoder's layers, as ``pipeline.encoder_layers``; ignored without an encoder. layer_cost: of an
    encoder layer over a decoder layer, by which ``mixed`` layers are balanced. words: memory strategy of all layers.
    reduction: when gradients are summed over replicas. sequence_parallel: split norms and residuals by tokens.
    """

    model: ModelSpec
    degrees: Degrees
    device: str = "h800"
    place: str = "mixed"
    layer_cost: float = 1.0
    words: str = "none"
    reduction: ReductionName = "step"
    sequence_parallel: bool = True

    @cached_property
    def partition(self) -> Partition:
        layers, pp = self.model.backbone.num_layers, self.degrees.pp
        if not self.model.encoders:
            return build_partition(layers, pp)
        spec = self.model.encoders[ENCODER]
        split = EncoderSplit(spec.num_layers, self.place, self.layer_cost, is_trained=True)  # type: ignore[arg-type]
        return build_partition(layers, pp, encoder=split)

    @cached_property
    def simulator(self) -> StepSimulator:
        degrees = self.degrees
        device = data_sheet_device_type(self.device, degrees.world_size)
        # As Megatron's distributed optimizer: parameters whole, gradients and optimizer state in shards.
        setup = TrainingSetup(
            sharding="gradients",
            gradient_reduction=self.reduction,
            sequence_parallel=self.sequence_parallel,
            activation_checkpointing=self.words,
            shard_size=degrees.dp,
        )
        times = ActionTimes(DeviceTimes(device, self.model, setup, ()), degrees, degrees.dp)
        return StepSimulator(self.partition, times, ENCODER if self.model.encoders else "", buffered=False)

    @property
    def peak_flops(self) -> float:
        return float(self.degrees.world_size * self.simulator.times.times.device.flops)

    def step(self, works: Sequence[MicrobatchWork]) -> Step:
        """Time a step. works: sequences of all replicas, one replica after another."""
        simulator, dp = self.simulator, self.degrees.dp
        program, columns = simulator.folded("1f1b", MicrobatchColumns.of(works), dp)
        timeline = Timeline(program, *simulator.durations(program, columns), buffered=False)
        peaks = rank_peaks([held_memory(simulator, program, columns)])
        seconds = timeline.makespan_s + simulator.optimizer_s()
        total = float(flops(self.model, works).sum())
        bubble = 1.0 - program.mean(timeline.busy_s) / seconds
        return Step(
            seconds, total, total / seconds / self.peak_flops, bubble, max(sum(each.values()) for each in peaks)
        )

    @property
    def usable_nbytes(self) -> int:
        return int(USABLE_SHARE * self.simulator.times.times.device.memory_nbytes)

    def fitting_step(self, works: Sequence[MicrobatchWork]) -> tuple[str, Step] | None:
        """The fastest step with a memory strategy and a reduction of gradients that fit; None if none does."""
        found = []
        for reduction in REDUCTIONS:
            for words in WORDS:
                step = replace(self, words=words, reduction=reduction).step(works)
                if step.peak_nbytes <= self.usable_nbytes:
                    found.append((f"{words}, {reduction}", step))
        return max(found, key=lambda each: each[1].mfu) if found else None


@dataclass(frozen=True)
class Step:
    """One simulated step."""

    seconds: float
    flops: float
    mfu: float
    bubble: float
    peak_nbytes: int
    """Of the fullest rank."""


def parameter_cost(model: ModelSpec) -> float:
    """Parameters of an encoder layer over those of a decoder layer: for partitions of even parameters."""
    return model.encoders[ENCODER].layer_parameters / model.backbone.layer_parameters


def with_patches(file: ModelFile, patches: int) -> ModelFile:
    """The same with so many patches an image inside the encoder; an image stays 169 tokens."""
    spec, (num_images, _) = file.model.encoders[ENCODER], file.workload.images[ENCODER]
    encoder = replace(spec, patches_per_row=patches // TOKENS_AN_IMAGE)
    connector = replace(file.model.connector, feature_dim=spec.hidden_size * encoder.patches_per_row)
    return replace(
        file,
        model=replace(file.model, encoders={ENCODER: encoder}, connector=connector),
        workload=replace(file.workload, images={ENCODER: (num_images, patches * num_images)}, freeze=()),
    )
