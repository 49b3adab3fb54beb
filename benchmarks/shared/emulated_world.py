"""Random profiles of emulated devices, with data and a configuration for each; everything follows from a seed.

No such device exists: its tables are random, and modules on it wait for the times in the tables.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from flowtrain.allocator.allocate import allocate
from flowtrain.allocator.allocation import Allocation
from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.request import Request
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.config.run import RunConfig
from flowtrain.controller.planning.planned_run import planned_run
from flowtrain.costs.cluster import Cluster, DeviceType, Links
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.profile import DeviceFacts, ImageCosts, ImageTable, LengthTable, Profile, StepCosts
from flowtrain.costs.profiled_times import ProfileTimes
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.costs.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
VISION = "vision"
DEVICE = "emulated"
BATCH = 48
PERIOD_STEPS = 2
"""Steps after which the data repeats: over a multiple of it, predicted and measured rates are of the same samples."""
STEP_S = 0.2
"""Seconds of a step if all devices shared all its work evenly."""
MIN_DEVICES, MAX_DEVICES = 8, 16
TENSOR_DEGREES = (1, 2, 4)
LEAST_RATIO, LARGEST_RATIO = 0.12, 4.0
PATCH_SIZE, MAX_PATCHES_PER_SIDE = 4, 12
DEVICES_PER_NODE = 8
_PLENTY = 1e15
_WORDS = ("red", "apple", "green", "tree", "house", "dog", "cat", "over", "the", "river", "bright", "moon", "boat")
_ROWS = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))),
    ]
)


@dataclass(frozen=True, eq=False)
class World:
    """One emulated profile with the data of its plan.

    ratio: seconds of a sample on one emulated encoder device over those on one emulated backbone device.
    """

    name: str
    num_devices: int
    ratio: float
    config: RunConfig
    model: ModelSpec
    workload: Workload
    profile: Profile

    @property
    def request(self) -> Request:
        """The allocator's request; memory and links of the emulated devices are never the limit."""
        device = DeviceType(
            DEVICE, self.num_devices, _PLENTY, int(_PLENTY), _PLENTY, Links(_PLENTY, _PLENTY, DEVICE), DEVICES_PER_NODE
        )
        limits = {VISION: self.config.encoders[VISION].max_batch_patches}
        return Request(Cluster((device,)), self.model, self.workload, TrainingSetup(), MemoryBudget(), limits)

    def surrogate(self, request: Request) -> Surrogate:
        """Predicted rates, interpolated in the emulated profile."""
        (device,) = request.cluster.device_types
        communication = TensorCommunication(device, request.model, request.workload, request.setup, 1.0)
        threads = {VISION: self.config.encoders[VISION].decode_threads}
        times = ProfileTimes(self.profile, request.workload, communication, request.max_batch_patches, threads)
        return Surrogate(request.cluster, request.model, request.workload, request.setup, {DEVICE: times}, 1.0)

    def allocation(self) -> Allocation:
        """The plan, as ``flowtrain plan --profile`` computes it."""
        request = self.request
        return allocate(request, self.surrogate)


def draw_ratios(count: int, seed: int) -> list[float]:
    """Return encoder to backbone cost ratios, one in each of ``count`` equal parts of their range, in random order."""
    draw = np.random.default_rng((seed, count))
    places = (draw.permutation(count) + draw.random(count)) / count
    low, high = math.log(LEAST_RATIO), math.log(LARGEST_RATIO)
    return [math.exp(low + (high - low) * place) for place in places]


def draw_world(name: str, ratio: float, seed: int, number: int, num_devices: int | None, directory: Path) -> World:
    """Draw one profile, and its data into ``directory``; num_devices: None to draw it too."""
    draw = np.random.default_rng((seed, number))
    count = int(draw.integers(MIN_DEVICES, MAX_DEVICES + 1)) if num_devices is None else num_devices
    source = _write_data(draw, directory / f"{name}.parquet")
    planned = planned_run(_config(name, source, directory, num_layers=int(draw.integers(12, 25))))
    config, workload = _sized(planned.config, planned.workload, draw)
    profile = draw_profile(draw, planned.model, workload, config, ratio, count)
    return World(name, count, ratio, config, planned.model, workload, profile)


def draw_profile(
    draw: np.random.Generator, model: ModelSpec, workload: Workload, config: RunConfig, ratio: float, num_devices: int
) -> Profile:
    """Draw tables whose total work takes ``STEP_S`` a step on that many emulated devices, split by ``ratio``."""
    total_s = STEP_S * num_devices / BATCH
    backbone_s = total_s / (1.0 + ratio)
    tokens = workload.tokens_per_sample
    grid = np.unique(np.geomspace(16, workload.microbatch_tokens, 10).astype(int))
    head_share, connector_share = draw.uniform(0.02, 0.1), draw.uniform(0.01, 0.04)
    per_layer = backbone_s * (1.0 - head_share - connector_share) / model.backbone.num_layers / tokens
    scaling = _tensor_scaling(draw)

    def lengths(per_token: float) -> dict[int, LengthTable]:
        launch, bend = draw.uniform(0.02, 0.1), draw.uniform(0.0, 0.2)
        capacity = workload.microbatch_tokens
        seconds = per_token * (launch * capacity + grid * (1.0 - launch) * (1.0 - bend + bend * grid / capacity))
        return {tp: _length_table(grid, seconds * factor) for tp, factor in scaling.items()}

    return Profile(
        device=DEVICE,
        facts=DeviceFacts(_PLENTY, int(_PLENTY), _PLENTY, None, DEVICES_PER_NODE),
        model={},
        versions={},
        layers=lengths(per_layer),
        heads=lengths(backbone_s * head_share / tokens),
        connectors=lengths(backbone_s * connector_share / tokens),
        encoders={VISION: _image_tables(draw, workload, config, ratio * backbone_s)},
        images={VISION: ImageCosts(decode_s=0.0, batch_s=float(draw.uniform(0.0, 0.02)) * STEP_S)},
        steps=StepCosts(
            step_s=float(draw.uniform(0.0, 0.03)) * STEP_S,
            microbatch_s=float(draw.uniform(0.0, 0.01)) * STEP_S,
            parameter_s=0.0,
        ),
        source=f"emulated profile {config.name}",
    )


def _tensor_scaling(draw: np.random.Generator) -> dict[int, float]:
    """Time at each tensor parallel degree, as a share of one device's time; always above 1 / degree."""
    serial = draw.uniform(0.03, 0.25)
    return {tp: float(1.0 / tp + serial * (1.0 - 1.0 / tp)) for tp in TENSOR_DEGREES}


def _image_tables(
    draw: np.random.Generator, workload: Workload, config: RunConfig, sample_s: float
) -> dict[int, ImageTable]:
    """Tables in which the workload's mean sample takes ``sample_s`` on one emulated device."""
    num_images, num_patches = workload.images[VISION]
    patches = np.unique(np.geomspace(4, MAX_PATCHES_PER_SIDE**2, 8).astype(int))
    batches = np.array([1, 2, 4, 8, 16, 32])
    launch, bend = draw.uniform(0.05, 0.3), draw.uniform(0.0, 0.3)
    mean = num_patches.sum() / num_images.sum()
    work = batches[None, :] * patches[:, None] * (1.0 - bend + bend * patches[:, None] / mean)
    table = ImageTable(*_plain(patches, batches, work + launch * mean))
    each = num_patches[num_images > 0] / num_images[num_images > 0]
    batch = np.maximum(config.encoders[VISION].max_batch_patches // each, 1.0)
    unscaled = (num_images[num_images > 0] * table.image_s(each, batch)).sum() / len(num_images)
    seconds = np.array(table.seconds) * (sample_s / unscaled)
    scaling = _tensor_scaling(draw)
    return {tp: ImageTable(*_plain(patches, batches, seconds * factor)) for tp, factor in scaling.items()}


def _length_table(num_tokens: Any, seconds: Any) -> LengthTable:
    return LengthTable(tuple(num_tokens.tolist()), tuple(seconds.tolist()))


def _plain(patches: Any, batches: Any, seconds: Any) -> tuple[Any, Any, Any]:
    return tuple(patches.tolist()), tuple(batches.tolist()), tuple(map(tuple, seconds.tolist()))


def _sized(config: RunConfig, workload: Workload, draw: np.random.Generator) -> tuple[RunConfig, Workload]:
    """Set sizes such that a step has a dozen or two microbatches and encode batches."""
    num_microbatches, num_batches = draw.integers(12, 25), draw.integers(16, 29)
    longest = int(workload.lengths.max())
    capacity = max(longest, math.ceil(workload.tokens_per_step / num_microbatches / 16) * 16)
    patches = math.ceil(workload.images[VISION][1].mean() * BATCH / num_batches)
    encoder = config.encoders[VISION].model_copy(update={"max_batch_patches": patches})
    data = config.data.model_copy(update={"max_seq_len": longest})
    scheduler = config.scheduler.model_copy(update={"microbatch_tokens": capacity})
    sized = config.model_copy(update={"encoders": {VISION: encoder}, "scheduler": scheduler, "data": data})
    return sized, replace(workload, microbatch_tokens=capacity)


def _write_data(draw: np.random.Generator, path: Path) -> Path:
    """Write samples of a random mixture: words and images of random numbers and sizes."""
    mean_words, spread, share = draw.uniform(10, 60), draw.uniform(0.2, 0.7), draw.uniform(0.6, 0.95)
    largest = int(draw.integers(8, MAX_PATCHES_PER_SIDE + 1))
    rows = []
    for _ in range(BATCH * PERIOD_STEPS):
        words = int(np.clip(draw.lognormal(math.log(mean_words), spread), 2, 200))
        text = " ".join(draw.choice(_WORDS) for _ in range(words))
        sides = [draw.integers(3, largest + 1, 2) * PATCH_SIZE for _ in range(int(draw.random() < share))]
        images = [{"bytes": _png(draw, *map(int, side)), "path": None} for side in sides]
        rows.append({"images": images, "texts": [{"user": "what", "assistant": text}]})
    pq.write_table(pa.Table.from_pylist(rows, _ROWS), path, row_group_size=len(rows))
    return path


def _png(draw: np.random.Generator, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(draw.integers(0, 255, (height, width, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _config(name: str, source: Path, directory: Path, num_layers: int) -> RunConfig:
    """A run of a model whose modules compute nothing here; only one tiny layer of the tower is loaded."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": PATCH_SIZE * MAX_PATCHES_PER_SIDE,
        "patch_size": PATCH_SIZE,
    }
    text = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 4096,
    }
    values = {
        "name": name,
        "runs_dir": str(directory / "runs"),
        "model": {"family": "variable_llava", "tokenizer": str(ROOT / "assets" / "tokenizer"), "device": "emulated"},
        "encoders": {VISION: {"config": vision, "feature_layer": -1, "segment_nbytes": 4 << 20}},
        "backbone": {"config": text, "sharding": "full", "gradient_reduction": "step"},
        "data": {"sources": [{"path": str(source)}], "max_seq_len": 1024, "shuffle": False},
        "training": {"global_batch_size": BATCH, "max_steps": 8 * PERIOD_STEPS},
        "scheduler": {"microbatch_tokens": 1024},
        "checkpoint": {"every_steps": 1_000_000},
        "limits": {"stall_timeout_s": 60.0, "stop_timeout_s": 10.0},
        "observability": {"progress": "off", "dashboard": False, "trace": {"steps": 0}},
    }
    return RunConfig.model_validate(values)
