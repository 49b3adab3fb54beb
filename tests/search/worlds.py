"""Searches over small pipelines, and samples to arrange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from flowtrain.config.pipeline import PipeTuneConfig
from flowtrain.costs.action_times import ActionTimes, DeviceTimes
from flowtrain.costs.cluster import Links, data_sheet_device_type
from flowtrain.costs.model_spec import FROZEN_ENCODERS, ConnectorSpec, ModelSpec, TransformerSpec, VisionSpec
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.pipeline.partition import EncoderSplit, build_partition
from flowtrain.pipeline.schedules.build import ScheduleName
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

CAPACITY, PATCHES = 4096, 576
BACKBONE = TransformerSpec(24, 2560, 6912, 32, 32, 80, 32000)
VISION = VisionSpec(27, 1152, 4304, 16, 14, 3, 0, 10**6)
MODEL = ModelSpec({"vision": VISION}, ConnectorSpec(1152, 2560, 2560), BACKBONE)
NUM_BUCKETS = 4


def make_search(
    pp: int,
    dp: int = 1,
    *,
    parts: PipeTuneConfig | None = None,
    chunks: int = 1,
    has_encoder: bool = True,
    memory_nbytes: int = 80 << 30,
    instant_links: bool = False,
) -> PipeTune:
    """instant_links: transfers take no time, and sends are buffered."""
    degrees, setup = Degrees(dp, pp, 1), TrainingSetup(activation_checkpointing="full", sharding="gradients")
    device = replace(data_sheet_device_type("a100", degrees.world_size), memory_nbytes=memory_nbytes)
    if instant_links:
        device = replace(device, links=Links(1e30, 1e30, "none"))
    encoder = EncoderSplit(VISION.num_layers, "first", 0.02) if has_encoder else None
    partition = build_partition(BACKBONE.num_layers, pp, chunks, encoder=encoder)
    name, schedule = "vision" if has_encoder else "", "1f1b"
    named: ScheduleName = "interleaved_1f1b" if chunks > 1 else schedule
    times = ActionTimes(DeviceTimes(device, MODEL, setup, FROZEN_ENCODERS), degrees, dp)
    return PipeTune(
        StepSimulator(partition, times, name, buffered=instant_links),
        named,
        StepRoom(MODEL, partition, replace(setup, dp=dp), name, memory_nbytes),
        flops(BACKBONE),
        "lpt",
        NUM_BUCKETS,
        PipeTuneConfig() if parts is None else parts,
    )


def make_samples(texts_and_images: Sequence[tuple[int, int]]) -> list[SizedSample]:
    """Samples of so many text tokens and images."""
    samples = []
    for position, (text, images) in enumerate(texts_and_images):
        tokens, vision = text + PATCHES * images, PATCHES * images
        parts = [PartSize("text", 1, 0, tokens, 8 * tokens)]
        if images:
            parts.append(PartSize("vision", images, vision, vision, 64 * vision))
        samples.append(SizedSample(SampleRef(position, 0, position, 0), tokens, vision, text, tuple(parts)))
    return samples


def drawn(seed: int, count: int) -> list[SizedSample]:
    """Some with several images, many of text alone, of lengths that vary much."""
    random = Random(seed)
    rows = [(int(random.lognormvariate(4.5, 1.2)) + 1, random.choice([0, 0, 1, 1, 4])) for _ in range(count)]
    return make_samples([(min(text, CAPACITY - PATCHES * images), images) for text, images in rows])


def sizes_of(samples: Sequence[SizedSample]) -> SampleSizes:
    return SampleSizes.of(samples, ("vision",), 256)


def default_of(
    search: PipeTune, sizes: SampleSizes, packing: str = "sequential", capacity: int = CAPACITY
) -> tuple[PackingRules, Arrangement]:
    """What ``policy: none`` runs with this packing."""
    rules = PackingRules(capacity, search.packing_cost, search.simulator.times.degrees.dp)
    lengths = Lengths(sizes.tokens, sizes.vision_tokens)
    layout = lay_out(lengths, rules, packing, "lpt", NUM_BUCKETS)
    return rules, Arrangement(layout.bins, in_order_of_need(layout, NUM_BUCKETS))
