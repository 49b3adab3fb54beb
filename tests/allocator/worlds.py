"""Small models, data and clusters for the allocator's tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain.allocator.memory import MemoryBudget
from flowtrain.allocator.request import Request
from flowtrain.allocator.surrogate import Surrogate
from flowtrain.costs.cluster import Cluster, data_sheet_device_type
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec, TransformerSpec, VisionSpec
from flowtrain.costs.roofline import Roofline
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.costs.workload import Workload

MODELS = Path(__file__).parents[2] / "configs" / "models"

VISION = VisionSpec(24, 1024, 4096, 16, 14, 3, 0, 10**6)
BACKBONE = TransformerSpec(32, 4096, 12288, 32, 8, 128, 151936)
MODEL = ModelSpec({"vision": VISION}, ConnectorSpec(1024, 4096, 4096), BACKBONE)
SETUP = TrainingSetup(activation_checkpointing="full")


def workload(**changes: Any) -> Workload:
    """Two kinds of samples, one of them without images."""
    columns = {
        "lengths": np.array([2048, 512]),
        "vision_lengths": np.array([1024, 0]),
        "target_lengths": np.array([256, 256]),
        "images": {"vision": (np.array([2, 0]), np.array([1024, 0]))},
    }
    return Workload(**{"global_batch_size": 256, "microbatch_tokens": 8192, **columns, **changes})


def several(names: tuple[str, ...]) -> tuple[ModelSpec, Workload]:
    """The same model and data with an encoder of each name."""
    model = replace(MODEL, encoders=dict.fromkeys(names, VISION))
    return model, workload(images=dict.fromkeys(names, (np.array([2, 0]), np.array([1024, 0]))))


def cluster(**counts: int) -> Cluster:
    return Cluster(tuple(data_sheet_device_type(name, count) for name, count in counts.items()))


def request(
    devices: Cluster,
    model: ModelSpec = MODEL,
    data: Workload | None = None,
    setup: TrainingSetup = SETUP,
    budget: MemoryBudget | None = None,
    max_batch_patches: Mapping[str, int] | None = None,
) -> Request:
    patches = dict.fromkeys(model.encoders, 16384) if max_batch_patches is None else max_batch_patches
    return Request(
        devices,
        model,
        workload() if data is None else data,
        setup,
        MemoryBudget() if budget is None else budget,
        patches,
    )


def with_memory(asked: Request, nbytes: int) -> Request:
    """The same on devices with this much memory for a module."""
    types = tuple(replace(each, memory_nbytes=nbytes) for each in asked.cluster.device_types)
    return replace(asked, budget=MemoryBudget(usable=1.0), cluster=Cluster(types))


def roofline_surrogate(asked: Request) -> Surrogate:
    times = {each.name: Roofline(each, asked.model, asked.workload, asked.setup) for each in asked.cluster.device_types}
    return Surrogate(asked.cluster, asked.model, asked.workload, asked.setup, times, slices=asked.slices)
