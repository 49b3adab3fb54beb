"""The tables of docs/memory.md are what the cost model says of Qwen3-32B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from flowtrain.allocator.memory import backbone_memory
from flowtrain.allocator.model_file import read_model_file
from flowtrain.costs.memory import MOMENTS, StepMemory
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
REPLICAS, GROUPS = Degrees(dp=64), Degrees(dp=8, tp=8)
EACH = {"gradient_reduction": "microbatch", "activation_checkpointing": "full"}
COLUMNS: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "`step`": (REPLICAS, EACH | {"gradient_reduction": "step"}),
    "`microbatch`": (REPLICAS, EACH),
    "`hybrid`, groups of 8": (REPLICAS, EACH | {"sharding": "hybrid", "shard_size": 8}),
    "keeps all": (REPLICAS, EACH | {"activation_checkpointing": "none"}),
    "`offload`": (REPLICAS, EACH | {"activation_checkpointing": "offload"}),
    "tp=8, tokens split": (GROUPS, EACH | {"activation_checkpointing": "none"}),
    "tp=8, tokens whole": (GROUPS, EACH | {"activation_checkpointing": "none", "sequence_parallel": False}),
}


def rows(memories: list[StepMemory]) -> Iterator[str]:
    """What no memory has any of is left out."""
    for field in fields(StepMemory):
        sizes = [getattr(memory, field.name) for memory in memories]
        if field.name != "host" and any(sizes):
            yield row(field.name.replace("_", " "), sizes)
    for moment in (each for each in MOMENTS if any(each in memory.moments for memory in memories)):
        yield row(f"device, at the {moment}", [memory.at(moment) for memory in memories])
    yield row("host", [memory.host for memory in memories])


def row(name: str, sizes: list[int]) -> str:
    return f"| {name} | {' | '.join(f'{nbytes / 2**30:.2f}' for nbytes in sizes)} |"


def test_the_page_shows_what_is_predicted() -> None:
    found = read_model_file(MODELS / "vlm_32b.yaml")
    memories = [
        backbone_memory(found.model, found.workload, TrainingSetup(**settings), degrees)
        for degrees, settings in COLUMNS.values()
    ]
    page = PAGE.read_text()
    expected = [f"| GiB | {' | '.join(COLUMNS)} |", *rows(memories)]
    missing = [line for line in expected if line not in page]
    assert not missing, "\n".join(expected)
    for memory in memories[:2]:
        assert f"{memory.peak / 2**30:.1f} GiB" in page


@pytest.mark.parametrize("field", [field.name.replace("_", " ") for field in fields(StepMemory)])
def test_every_line_is_explained(field: str) -> None:
    assert f"| **{field}** |" in PAGE.read_text()
