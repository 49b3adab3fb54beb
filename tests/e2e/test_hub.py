"""A run whose backbone is on the hub: fetched once, before the actors start, or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from flowtrain.config.run import RunConfig
from tests.e2e.processes import driver
from tests.e2e.worlds import World, tiny_config
from tests.hub_server import HubServer, hub_server

pytestmark = pytest.mark.e2e

MODEL = "tests/tiny"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    world = World(seed=8)
    world.add_mixed(16)
    return tiny_config(
        tmp_path,
        world.write(tmp_path / "data.parquet"),
        "from-hub",
        training={"max_steps": 1},
        backbone={"path": MODEL, "config": None, "data_parallel_size": 2},
        observability={"progress": "plain"},
    )


@pytest.fixture
def hub(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    text = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=4096,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    model.save_pretrained(tmp_path / "served" / MODEL, max_shard_size="400KB")
    with hub_server(tmp_path / "served") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        yield server


def test_the_backbone_is_fetched_once(config: RunConfig, hub: HubServer, tmp_path: Path) -> None:
    with driver(config, tmp_path / "run.log") as started:
        assert started.wait() == 0, started.report("it failed")
        assert started.num_steps == 1
    weights = {name: count for name, count in hub.downloads.items() if name.endswith(".safetensors")}
    assert len(weights) > 1 and set(weights.values()) == {1}, "two ranks, one node"


@pytest.mark.nightly
def test_a_node_that_does_not_get_it_ends_the_start(config: RunConfig, hub: HubServer, tmp_path: Path) -> None:
    for file in (tmp_path / "served" / MODEL).glob("*.safetensors"):
        hub.broken.add(f"{MODEL}/{file.name}")
    with driver(config, tmp_path / "run.log") as started:
        assert started.wait() == 1, started.report("it did not fail")
        said = " ".join(started.log.read_text().split())
    assert "backbone.path: 'tests/tiny' cannot be fetched from the hub" in said
    assert "put HF_HOME on a file system that all nodes share" in said
