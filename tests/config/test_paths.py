from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowtrain.config.load import load_config
from flowtrain.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def project(tmp_path: Path, minimal_text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project directory with ``configs/run.yaml``; the current directory is another one."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for directory in (project / "configs", elsewhere):
        directory.mkdir(parents=True)
    (project / "configs" / "run.yaml").write_text(minimal_text)
    monkeypatch.chdir(elsewhere)
    return project


def test_a_relative_path_starts_here_then_at_the_file_then_at_its_parent(project: Path) -> None:
    config_file = project / "configs" / "run.yaml"
    for directory in (project, project / "configs", Path.cwd()):
        (directory / "train.parquet").touch()
        assert load_config(config_file).data.sources[0].path == str(directory / "train.parquet")


def test_data_that_is_nowhere_is_refused_with_the_places_looked_at(project: Path) -> None:
    config_file = project / "configs" / "run.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(config_file)
    assert str(caught.value) == (
        f"{config_file}: line 9: data.sources.0.path = 'train.parquet': no such file or directory "
        f"(looked in {Path.cwd()}, {project / 'configs'}, {project})"
    )
    assert load_config(config_file, check_paths=False).data.sources[0].path == "train.parquet"


def test_a_pattern_is_searched_like_a_path_and_a_url_stays(project: Path) -> None:
    config_file = project / "configs" / "run.yaml"
    (project / "shards").mkdir()
    (project / "shards" / "1.tar").touch()
    for pattern in ("shards/*.tar", "shards/**/[0-9].*"):
        config = load_config(config_file, [f"data.sources.0.path={pattern}"])
        assert config.data.sources[0].path == str(project / pattern)
    with pytest.raises(ConfigError, match=r"path = 'shards/\*.json': no file matches \(looked in"):
        load_config(config_file, ["data.sources.0.path=shards/*.json"])
    urls = ["data.sources.0.path=s3://bucket/*.tar", "data.sources.0.image_root=hf://datasets/owner/name"]
    source = load_config(config_file, urls).data.sources[0]
    assert (source.path, source.image_root) == ("s3://bucket/*.tar", "hf://datasets/owner/name")


def test_a_data_set_of_the_hub_needs_its_url(project: Path) -> None:
    config_file = project / "configs" / "run.yaml"
    with pytest.raises(ConfigError, match="data set of this name, write hf://datasets/HuggingFaceM4/the_cauldron"):
        load_config(config_file, ["data.sources.0.path=HuggingFaceM4/the_cauldron"])
    with pytest.raises(ConfigError, match=r"no such file or directory \(looked in .*\)$"):
        load_config(config_file, ["data.sources.0.path=data/x.parquet"])


def test_a_cost_profile_is_looked_for_beside_the_configuration_and_must_be_there(project: Path) -> None:
    config_file = project / "configs" / "run.yaml"
    (project / "train.parquet").touch()
    override = "scheduler.cost_profile=cost_profile.json"
    with pytest.raises(ConfigError, match=r"scheduler.cost_profile = 'cost_profile.json': no such file or directory"):
        load_config(config_file, [override])
    found = project / "configs" / "cost_profile.json"
    found.touch()
    assert load_config(config_file, [override]).scheduler.cost_profile == str(found)


@pytest.mark.parametrize("hub_id", ["gpt2", "google/siglip-base-patch16-224", "Qwen/Qwen3-1.7B"])
def test_a_hub_id_stays_as_it_is(minimal: Path, hub_id: str) -> None:
    config = load_config(minimal, [f"model.tokenizer={hub_id}", f"backbone.path={hub_id}", "backbone.config=null"])
    assert config.model.tokenizer == config.backbone.path == hub_id


def test_a_local_model_comes_before_a_hub_id_of_the_same_name(minimal: Path) -> None:
    Path("owner/model").mkdir(parents=True)
    assert load_config(minimal, ["model.tokenizer=owner/model"]).model.tokenizer == str(Path("owner/model").resolve())


@pytest.mark.parametrize("path", ["./model", "../model", "/no/where", "~/no/where", "a/b/c", "models/"])
def test_a_local_model_that_is_missing_is_refused(minimal: Path, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [f"model.tokenizer={path}"])
    message = str(caught.value)
    assert message.startswith(f"run.yaml: override 'model.tokenizer={path}': model.tokenizer = {path!r}: no such file")
    assert message.endswith("; it is not a hub id (owner/name) either")


def test_a_chat_template_is_a_file_or_the_template_itself(minimal: Path) -> None:
    Path("chat.jinja").write_text("{{ messages }}")
    absolute = str(Path("chat.jinja").resolve())
    assert load_config(minimal, ["model.chat_template=chat.jinja"]).model.chat_template == absolute
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert load_config(minimal, [f"model.chat_template='{template}'"]).model.chat_template == template
    with pytest.raises(ConfigError, match=r"model.chat_template = 'none.jinja': no such file or directory"):
        load_config(minimal, ["model.chat_template=none.jinja"])


def test_an_image_root_must_be_a_directory(minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.sources.0.image_root = 'train.parquet': must be a directory"):
        load_config(minimal, ["data.sources.0.image_root=train.parquet"])


def test_every_missing_path_is_named_at_once(minimal: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ["data.eval.path=x", "model.tokenizer=./y"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "run.yaml: 2 errors"
    assert "data.eval.path = 'x'" in lines[1]
    assert "model.tokenizer = './y'" in lines[2]
