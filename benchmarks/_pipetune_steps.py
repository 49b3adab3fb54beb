"""Steps of PipeTune's models in the simulator: its mixtures, packed and arranged as each part of it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from _lengths import CORPORA, MIXTURES, TOKENS_PER_IMAGE, mixture

from flowtrain.allocator.model_file import ModelFile, read_model_file
from flowtrain.config.pipeline import PipeTuneConfig
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.cluster import data_sheet_device_type
from flowtrain.costs.memory import USABLE_SHARE, predict_step_memory
from flowtrain.costs.model_spec import FROZEN_ENCODERS
from flowtrain.costs.training_setup import MicrobatchSize, TrainingSetup
from flowtrain.pipeline.partition import EncoderSplit, Partition, build_partition
from flowtrain.pipeline.rank_chunks import rank_chunks
from flowtrain.scheduler.cost import flops
from flowtrain.scheduler.layout import Arrangement, lay_out
from flowtrain.scheduler.packing.base import Lengths, PackingRules
from flowtrain.scheduler.sample_sizes import SampleSizes
from flowtrain.scheduler.step_planner import in_order_of_need
from flowtrain.search.pipetune import PipeTune
from flowtrain.search.room import StepRoom
from flowtrain.simulator.step import StepSimulator
from flowtrain.types.plan import Degrees
from flowtrain.types.samples import PartSize, SampleRef, SizedSample

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
ENCODER, PP, BATCH = "vision", 4, 128
SIZES = (1, 2, 4, 8)
"""Sequences of a microbatch; PipeTune's figure 7 has these."""
_NUM_BUCKETS = 4
_MANY = 64
"""Microbatches of a step when it is asked what fits memory."""


@dataclass(frozen=True)
class Case:
    """A model on four pipeline stages. seq_len: tokens of a packed sequence."""

    model: str
    device: str
    tp: int
    seq_len: int

    @property
    def name(self) -> str:
        return f"{self.model}.{self.device}.tp{self.tp}"


LARGE = tuple(Case(f"pipetune_{size}", "a100", 4, 8192) for size in ("3b", "7b", "13b"))
SMALL = tuple(Case(f"pipetune_{size}", "h200", 1, 4096) for size in ("3b", "7b", "13b"))


class World:
    """What a case's steps take. dp: replicas beside each other."""

    def __init__(self, case: Case, dp: int = 1) -> None:
        self.case, self.dp = case, dp
        self._file: ModelFile = read_model_file(MODELS / f"{case.model}.yaml")
        self._degrees = Degrees(dp, PP, case.tp)
        self._setup = TrainingSetup(sharding="gradients", dp=dp, tp=case.tp)
        devices_per_node = 4 if case.device == "a100" else 1
        self._device = data_sheet_device_type(
            case.device, self._degrees.world_size, devices_per_node=devices_per_node, dtype="bfloat16"
        )

    @cached_property
    def partition(self) -> Partition:
        """As many decoder layers on each rank, and the tower before the first: the paper names no other cut."""
        model = self._file.model
        layers = model.backbone.num_layers
        encoder = EncoderSplit(model.encoders[ENCODER].num_layers, "first", 0.0)
        return build_partition(layers, PP, counts=(layers // PP,) * PP, encoder=encoder)

    @property
    def limit_nbytes(self) -> int:
        """Of a device."""
        return int(self._device.memory_nbytes * USABLE_SHARE)

    @cached_property
    def most(self) -> int:
        """The most sequences of a microbatch that fit memory, of ``SIZES``, as PipeTune's baselines have them."""
        return max((size for size in SIZES if self._fits(size)), default=SIZES[0])

    def _fits(self, size: int) -> bool:
        model, tokens = self._file.model, size * self.case.seq_len
        images = tokens // TOKENS_PER_IMAGE
        full = MicrobatchSize(tokens, tokens, images * TOKENS_PER_IMAGE, images * TOKENS_PER_IMAGE)
        for rank in range(PP):
            held = rank_chunks(self.partition, rank, _MANY)
            memory = predict_step_memory(model.backbone, model.connector, held.backbone, self._setup, full)
            if memory.peak > self.limit_nbytes:
                return False
        return True

    def search(self, **parts: bool) -> PipeTune:
        """A search with only these parts."""
        model = self._file.model
        times = DeviceTimes(self._device, model, self._setup, FROZEN_ENCODERS)
        return PipeTune(
            StepSimulator(self.partition, ActionTimes(times, self._degrees, self.dp), ENCODER, buffered=False),
            "1f1b",
            StepRoom(model, self.partition, self._setup, ENCODER, self.limit_nbytes),
            flops(model.backbone),
            "lpt",
            _NUM_BUCKETS,
            PipeTuneConfig(**{"size": False, "order": False, "precompute": False, **parts}),
        )

    def rules(self, size: int | None = None) -> PackingRules:
        """Microbatches of so many sequences; None: of the most."""
        capacity = (self.most if size is None else size) * self.case.seq_len
        return PackingRules(capacity, flops(self._file.model.backbone), self.dp)

    def packed(self, sizes: SampleSizes, packing: str, size: int | None = None, seed: int = 0) -> Arrangement:
        """A step's microbatches by one of the methods of ``scheduler.packing``."""
        lengths = Lengths(sizes.tokens, sizes.vision_tokens)
        layout = lay_out(lengths, replace(self.rules(size), seed=seed), packing, "lpt", _NUM_BUCKETS)
        return Arrangement(layout.bins, in_order_of_need(layout, _NUM_BUCKETS))


@dataclass(frozen=True)
class Draws:
    """Steps of the mixtures, drawn with one seed; the search's constants were chosen on seed 17."""

    num_steps: int
    seed: int

    def steps(self, mix: str, seq_len: int, batch: int = BATCH) -> Iterator[SampleSizes]:
        """Yield steps of a mixture; samples are cut at ``seq_len``."""
        drawn = mixture(mix, MIXTURES[mix], CORPORA, -(-self.num_steps * batch // 256), seq_len, self.seed).joined()
        for step in range(self.num_steps):
            rows = slice(step * batch, (step + 1) * batch)
            yield sizes_of(drawn.tokens[rows].tolist(), drawn.vision[rows].tolist())


def sizes_of(tokens: list[int], images: list[int]) -> SampleSizes:
    """Columns of samples with so many tokens and images."""
    samples = []
    for position, (count, number) in enumerate(zip(tokens, images, strict=True)):
        vision = TOKENS_PER_IMAGE * number
        parts = [PartSize("text", 1, 0, count, 8 * count)]
        if number:
            parts.append(PartSize(ENCODER, number, vision, vision, 64 * vision))
        ref = SampleRef(position, 0, position, 0)
        samples.append(SizedSample(ref, count, vision, count - vision, tuple(parts)))
    return SampleSizes.of(samples, (ENCODER,), 256)
