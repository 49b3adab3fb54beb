"""Weights that do not fit the model are refused before anything starts, by a start and by a dry run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import flowtrain
from flowtrain.config.load import override_config
from flowtrain.config.run import RunConfig
from flowtrain.controller import first_weights
from flowtrain.controller.first_weights import check_first_weights
from flowtrain.errors import ConfigError
from tests.checkpoints import qwen3_vl, with_weights
from tests.e2e.worlds import World, tiny_config


def edit_config(model: Path, part: str, **changed: Any) -> None:
    file = model / "config.json"
    values = json.loads(file.read_text())
    values[part].update(changed)
    file.write_text(json.dumps(values))


def pickled_only(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def fewer_words(model: Path) -> None:
    edit_config(model, "text_config", vocab_size=4000)


def wider_language_model(model: Path) -> None:
    edit_config(model, "text_config", intermediate_size=64)


def wider_tower(model: Path) -> None:
    edit_config(model, "vision_config", intermediate_size=64)


def without_a_merger(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: weights[name] for name in weights if "visual.merger.norm" not in name}, model / "model.safetensors"
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return with_weights(qwen3_vl(tmp_path / "model"))


def config_of(tmp_path: Path, model: Path | str, *overrides: str) -> RunConfig:
    world = World()
    world.add_mixed(8)
    vision = {"num_cpus": 0.1, "segment_nbytes": 16 << 20}
    values = tiny_config(tmp_path, world.write(tmp_path / "train.parquet"), "first").model_dump(exclude_unset=True)
    values |= {
        "model": {"family": "qwen3_vl", "path": str(model), "image_token": "<|image_pad|>", "device": "cpu"},
        "encoders": {"vision": vision},
        "backbone": {"num_cpus": 0.1},
    }
    return override_config(RunConfig.model_validate(values), overrides)


@pytest.mark.parametrize("mode", ["decoupled", "auto"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pickled_only, r"holds no \*\.safetensors; convert it"),
        (
            fewer_words,
            r"embed_tokens\.weight of .*, the model \[4000, 32\] by its vocab_size \(4000\), which would grow to \d+, ",
        ),
        (wider_language_model, r"layers\.0\.mlp\.\w+\.weight of .* has shape \[.*48.*\], the model \[.*64.*\]"),
        (wider_tower, r"visual\.blocks\.0\.mlp\.\S+ of .* has shape \[48.*\], the model \[64"),
        (without_a_merger, "2 weights of .* are missing in"),
    ],
)
def test_a_start_and_a_dry_run_refuse_them_and_leave_no_run(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    def no_cluster(*_: object) -> None:
        raise AssertionError("a cluster is started")

    monkeypatch.setattr("flowtrain.controller.cluster.connected", no_cluster)
    config = config_of(tmp_path, model, f"mode={mode}")
    check_first_weights(config)
    spoil(model)
    calls: Sequence[Callable[[RunConfig], object]] = (flowtrain.dry_run, flowtrain.train)
    for call in calls:
        with pytest.raises(ConfigError, match=f"model.path: .*{message}"):
            call(config)
    assert not (tmp_path / "runs").exists()


def test_shards_are_looked_at_by_their_index(tmp_path: Path, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    norm = "model.language_model.norm.weight"
    shards = {"a.safetensors": [name for name in weights if name != norm], "b.safetensors": [norm]}
    for file, names in shards.items():
        save_file({name: weights[name] for name in names}, model / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = config_of(tmp_path, model)
    check_first_weights(config)
    save_file({norm: torch.ones(7)}, model / "b.safetensors")
    with pytest.raises(ConfigError, match=r"norm\.weight of .* has shape \[7\], the model \[32\]"):
        check_first_weights(config)
    (model / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights can be read from .*b\.safetensors"):
        check_first_weights(config)


def test_a_directory_without_any_weights_is_left_to_the_nodes(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    config = config_of(tmp_path, model)
    check_first_weights(config)
    assert flowtrain.dry_run(config).run.num_steps == config.training.max_steps
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"no weights can be read from .*a\.safetensors"):
        check_first_weights(config)


def test_hub_models_and_weights_that_are_not_loaded_are_left_as_they_are(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled_only(model)
    config = config_of(tmp_path, model)
    emulated = config.model_copy(update={"model": config.model.model_copy(update={"device": "emulated"})})
    monkeypatch.setattr(RunConfig, "emulation", property(lambda self: self.model.device == "emulated" or None))
    check_first_weights(emulated)
    with pytest.raises(ConfigError, match="holds no"):
        check_first_weights(config)
    monkeypatch.setattr(first_weights, "usable_checkpoint", lambda files: object())
    check_first_weights(config, resume=True)
    hub = config.model_copy(update={"model": config.model.model_copy(update={"path": "nobody/not-here"})})
    check_first_weights(hub)
