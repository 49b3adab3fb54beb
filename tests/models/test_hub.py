"""What is fetched from the hub, against a small hub of the tests' own; each fetch is a process, as on a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowtrain.models.hub import hub_models
from flowtrain.types.nodes import HubModel
from tests.hub_server import HubServer, hub_server
from tests.training.ranks import make_config

pytestmark = pytest.mark.processes

MODEL = HubModel("owner/model", "backbone.path", has_weights=True)
FETCH = """
import json, sys
from flowtrain.errors import ResourceError
from flowtrain.models.hub import HubFetch
from flowtrain.types.nodes import HubModel
from flowtrain.models.weight_files import safetensors_files
models = [HubModel(**each) for each in json.loads(sys.argv[1])]
fetch = HubFetch(models)
try:
    commits = fetch.fetch()
    state = fetch.state()
    files = {m.repo_id: [f.name for f in safetensors_files(m.repo_id, m.key)] for m in models if m.has_weights}
    print(json.dumps([commits, state.done_nbytes, state.total_nbytes, files]))
except ResourceError as error:
    print(error)
    sys.exit(3)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "served" / "owner" / "model"
    (folder / "onnx").mkdir(parents=True)
    for number in range(2):
        save_file({f"w{number}": torch.zeros(1000)}, folder / f"model-{number}.safetensors")
    index = {"weight_map": {f"w{number}": f"model-{number}.safetensors" for number in range(2)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    for name in ("pytorch_model.bin", "modeling.py", "onnx/model.safetensors"):
        (folder / name).write_text("not read")
    with hub_server(tmp_path / "served") as server:
        yield server


def start(hub: HubServer, cache: Path, *models: HubModel, **environment: str) -> subprocess.Popen[str]:
    asked = json.dumps([{"repo_id": m.repo_id, "key": m.key, "has_weights": m.has_weights} for m in models])
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, asked],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetched(process: subprocess.Popen[str]) -> list[object]:
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, output + error
    found = json.loads(output)
    assert isinstance(found, list)
    return found


def test_nodes_with_one_cache_download_each_file_once(hub: HubServer, tmp_path: Path) -> None:
    processes = [start(hub, tmp_path / "cache", MODEL) for _ in range(2)]
    for process in processes:
        commits, done, total, files = fetched(process)
        assert commits == {"owner/model": hub.commit_of("owner/model")}
        assert done == total and isinstance(total, int) and total > 8000
        assert files == {"owner/model": ["model-0.safetensors", "model-1.safetensors"]}
    names = ["config.json", "model-0.safetensors", "model-1.safetensors", "model.safetensors.index.json"]
    assert hub.downloads == {f"owner/model/{name}": 1 for name in [*names, "tokenizer.json"]}, "no pickle, no code"


def test_a_node_without_the_hub_uses_a_complete_cache_and_refuses_another(hub: HubServer, tmp_path: Path) -> None:
    fetched(start(hub, tmp_path / "cache", MODEL))
    before = sum(hub.downloads.values())
    commits, _, total, files = fetched(start(hub, tmp_path / "cache", MODEL, HF_HUB_OFFLINE="1"))
    assert commits == {"owner/model": hub.commit_of("owner/model")} and files and total is None
    assert sum(hub.downloads.values()) == before
    refused = start(hub, tmp_path / "empty", MODEL, HF_HUB_OFFLINE="1")
    output, _ = refused.communicate(timeout=120)
    assert refused.returncode == 3
    assert output.startswith("backbone.path: 'owner/model' cannot be fetched from the hub: ")


def test_a_tokenizer_brings_no_weights(hub: HubServer, tmp_path: Path) -> None:
    fetched(start(hub, tmp_path / "cache", HubModel("owner/model", "model.tokenizer", has_weights=False)))
    assert set(hub.downloads) == {
        f"owner/model/{name}" for name in ("config.json", "tokenizer.json", "model.safetensors.index.json")
    }


def test_local_directories_are_not_fetched(tmp_path: Path) -> None:
    path, tower, language = str(tmp_path), "google/siglip-base-patch16-224", "Qwen/Qwen3-32B"

    def models(backbone: str, tokenizer: str, **options: bool) -> tuple[HubModel, ...]:
        config = make_config(
            encoders={"vision": {"path": tower}}, backbone={"path": backbone}, model={"tokenizer": tokenizer}
        )
        return hub_models(config, **options)

    assert models(language, language) == (
        HubModel(language, "backbone.path", True),
        HubModel(tower, "encoders.vision.path", True),
    )
    assert models(language, path, with_backbone=False)[-1] == HubModel(language, "backbone.path", False)
    assert [model.repo_id for model in models(path, path)] == [tower]


def test_without_images_a_tower_is_only_described() -> None:
    config = make_config(mode="llm_only", encoders={"vision": {"path": "google/siglip-base-patch16-224"}})
    assert hub_models(config)[0] == HubModel("google/siglip-base-patch16-224", "encoders.vision.path", False)
