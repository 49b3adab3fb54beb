"""``flowtrain init``: what it writes is a run that can be planned and tried, or it says why there is none."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import (
    PreTrainedConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SiglipConfig,
    VideoLlavaConfig,
)
from typer.testing import CliRunner, Result

import flowtrain
from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.controller.starting_config import DEFAULT_ENCODER, YOUR_DATA
from flowtrain.data.conversation import ConversationEncoder
from flowtrain.errors import ConfigError, SourceReadError
from flowtrain.models.checkpoint_kind import checkpoint_kind
from flowtrain.models.families.registry import FAMILIES, family_from_config
from tests.checkpoints import TEXT, internvl, llava, qwen3_vl, saved, siglip, with_weights
from tests.data.test_conversation import FORGETFUL
from tests.hub_server import hub_server
from tests.profiles import write_cpu_profile

ROOT = Path(__file__).parents[2]
DATA = ROOT / "assets" / "openclipart" / "eval.parquet"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    return with_weights(saved(tmp_path / "Tiny-Qwen3", Qwen3Config(**TEXT), dtype="bfloat16"))


@pytest.fixture
def tower(tmp_path: Path) -> Path:
    return with_weights(siglip(tmp_path / "tower"))


@pytest.fixture
def llava_model(tmp_path: Path) -> Path:
    return with_weights(llava(tmp_path / "Tiny LLaVA", "<picture>"))


@pytest.fixture
def internvl_model(tmp_path: Path) -> Path:
    return with_weights(internvl(tmp_path / "InternVL-Tiny-HF"))


@pytest.fixture
def qwen3_vl_model(tmp_path: Path) -> Path:
    return with_weights(qwen3_vl(tmp_path / "Qwen3-VL-Tiny"))


def init(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["init", *map(str, arguments)])


def written(result: Result) -> Path:
    assert result.exit_code == 0, result.output
    found = re.match(r"wrote (.*): family ", result.stdout)
    assert found is not None, result.stdout
    return Path(found[1])


def run_printed_commands(result: Result) -> list[str]:
    """Run the commands that it prints, but for the one that measures; returns what each of them printed."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("flowtrain ")]
    outputs = []
    for line in lines:
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.output)
        outputs.append(done.output)
    return outputs


def test_a_language_model_becomes_the_backbone_of_a_llava_model(
    tmp_path: Path, language_model: Path, tower: Path
) -> None:
    result = init(language_model, "--encoder", tower, "--data", DATA)
    file = written(result)
    assert file == Path("tiny-qwen3.yaml")
    config = load_config(file)
    assert (config.name, config.mode) == ("tiny-qwen3", "auto")
    assert (config.model.family, config.model.path, config.model.dtype) == ("llava", None, "bfloat16")
    assert (config.backbone.path, config.encoders["vision"].path) == (str(language_model), str(tower))
    assert config.model.chat_template is None, "the tokenizer's own can be trained"
    assert config.data.max_seq_len == 1024, "the model's positions"
    checked, planned, tried = run_printed_commands(result)
    assert "rejected" in checked
    assert "starts" in planned or "start it with" in planned
    assert "family llava" in tried and "vision: 4" in tried
    profile = write_cpu_profile(tmp_path / "profile.json", config)
    auto = ["train", str(file), f"allocator.profile={profile}", "--dry-run"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, auto)
    assert done.exit_code == 0 and "starts" in done.output, done.output


def test_the_default_encoder_is_a_place_to_fill_in(language_model: Path, tower: Path) -> None:
    result = init(language_model, "--data", DATA, "--output", "mine.yaml")
    file = written(result)
    assert f"vision tower: {DEFAULT_ENCODER} (--encoder MODEL to choose another)\n" in result.stdout
    assert "--encoder" not in init(language_model, "--encoder", tower, "--output", "other.yaml").stdout
    assert load_config(file).encoders["vision"].path == DEFAULT_ENCODER
    tried = ["train", str(file), f"encoders.vision.path={tower}", "mode=decoupled", "--dry-run"]
    done = CliRunner().invoke(app, tried)
    assert done.exit_code == 0, done.output


def test_a_whole_model_has_a_family_by_its_type(llava_model: Path) -> None:
    result = init(llava_model, "--data", DATA)
    config = load_config(written(result))
    assert (config.name, config.model.family, config.model.path) == ("tiny-llava", "llava", str(llava_model))
    assert (config.model.image_token, config.model.dtype) == ("<picture>", "float32")
    assert config.backbone.path is None and config.encoders["vision"].path is None
    assert family_from_config(config).image_token_id == 4096
    assert "image token <picture>" in result.stdout
    run_printed_commands(result)


@pytest.mark.parametrize(
    ("model", "family", "image_text"),
    [
        ("internvl_model", "internvl", "<img><IMG_CONTEXT></img>"),
        ("qwen3_vl_model", "qwen3_vl", "<|vision_start|><|image_pad|><|vision_end|>"),
    ],
)
def test_other_whole_models(request: pytest.FixtureRequest, model: str, family: str, image_text: str) -> None:
    result = init(request.getfixturevalue(model), "--data", DATA)
    config = load_config(written(result))
    assert (config.model.family, config.model.dtype) == (family, "bfloat16")
    assert config.model.image_token in image_text and family_from_config(config).image_text == image_text
    run_printed_commands(result)


def test_what_stands_in_comments_can_be_taken_in(
    internvl_model: Path, qwen3_vl_model: Path, language_model: Path, tower: Path
) -> None:
    for number, arguments in enumerate([(internvl_model,), (qwen3_vl_model,), (language_model, "--encoder", tower)]):
        file = written(init(*arguments, "--data", DATA, "--output", f"{number}.yaml"))
        text = file.read_text()
        taken_in = re.sub(r"^( *)# ([a-z_]+: .*)$", r"\1\2", text, flags=re.MULTILINE)
        assert taken_in.count("# ") < text.count("# ") - 2
        file.write_text(taken_in)
        config = load_config(file, [f"data.eval.path={DATA}"])
        assert config.model.freeze == ("backbone",) and config.data.sources[0].weight == 0.8
        assert family_from_config(config).image_layout("vision", 640, 480).num_tokens > 0


def test_the_family_comes_from_the_registry(llava_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint_kind(str(llava_model)).family == "llava"
    monkeypatch.delitem(FAMILIES, "llava")
    with pytest.raises(ConfigError, match="no family for 'llava'; take a checkpoint of variable_llava"):
        checkpoint_kind(str(llava_model))
    monkeypatch.setitem(FAMILIES, "qwen2_vl", FAMILIES["variable_llava"])
    assert checkpoint_kind(str(no_family(llava_model.parent / "other"))).family == "qwen2_vl"


def test_a_llava_whose_images_vary_in_size_is_a_variable_llava(llava_model: Path) -> None:
    settings = json.loads((llava_model / "processor_config.json").read_text())
    settings["image_processor"] |= {"do_resize": False, "size": {"longest_edge": 56}}
    (llava_model / "processor_config.json").write_text(json.dumps(settings))
    assert load_config(written(init(llava_model, "--data", DATA))).model.family == "variable_llava"


def test_without_data_the_file_has_a_place_to_fill_in(language_model: Path, tower: Path) -> None:
    result = init(language_model, "--encoder", tower)
    file = written(result)
    assert "first set data.sources.0.path in it" in result.stdout
    assert load_config(file, check_paths=False).data.sources[0].path == YOUR_DATA
    with pytest.raises(ConfigError, match=rf"data\.sources\.0\.path = '{YOUR_DATA}': no such file"):
        load_config(file)
    filled = load_config(file, [f"data.sources.0.path={DATA}"])
    assert family_from_config(filled).image_layout("vision", 9, 9).num_tokens == 4


def test_data_that_is_not_there_is_refused(language_model: Path, tmp_path: Path) -> None:
    result = init(language_model, "--data", "owner/name")
    assert result.exit_code == 2 and "write hf://datasets/owner/name" in result.output
    assert "--data 'owner/name': no such file" in " ".join(result.output.split())
    assert ".yaml" not in result.output, "the file is not written, so no message speaks of it"
    assert not list(tmp_path.glob("*.yaml"))
    written(init(language_model, "--data", "s3://bucket/shards/*.tar", "--output", "remote.yaml"))
    assert load_config("remote.yaml").data.sources[0].path == "s3://bucket/shards/*.tar"
    secret = init(language_model, "--data", "s3://user:password@bucket/a.tar", "--output", "secret.yaml")
    assert secret.exit_code == 2 and "--data: has a password" in secret.output and not Path("secret.yaml").exists()


SILENT = "{% for message in messages if message['role'] == 'user' %}{{ message['content'] }}{% endfor %}"
UNMARKED = "{% for m in messages %}{% generation %}{% endgeneration %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FORGETFUL, "the tokenizer's own renders earlier turns differently once later ones follow"),
        (SILENT, "the tokenizer's own leaves out the text of role assistant"),
        (UNMARKED, "the tokenizer's own cannot be used: its {% generation %} markers must enclose exactly"),
        (None, "the tokenizer has none"),
    ],
)
def test_a_template_that_cannot_be_trained_is_replaced_and_the_reason_is_said(
    tmp_path: Path, tower: Path, template: str | None, reason: str
) -> None:
    """Qwen3's rewrites earlier turns; models that follow no instructions have none."""
    model = saved(tmp_path / "model", Qwen3Config(**TEXT), template)
    result = init(model, "--encoder", tower, "--data", DATA)
    config = load_config(written(result))
    assert config.model.chat_template is not None and "<|im_start|>" in config.model.chat_template
    said = f"replaced by ChatML, since {reason}"
    assert f"\nchat template: {said}" in result.stdout and "set model.chat_template" not in result.stdout
    assert f"# {said}" in Path("model.yaml").read_text()
    family = family_from_config(config)
    ConversationEncoder(family.tokenizer, image_token="<image>")


def test_a_tokenizer_without_chatml_gets_words(tmp_path: Path, tower: Path) -> None:
    model = saved(tmp_path / "model", Qwen3Config(**TEXT), None)
    text = (model / "tokenizer.json").read_text().replace("<|im_start|>", "<|begin|>")
    (model / "tokenizer.json").write_text(text)
    settings = (model / "tokenizer_config.json").read_text().replace("<|im_start|>", "<|begin|>")
    (model / "tokenizer_config.json").write_text(settings)
    result = init(model, "--encoder", tower, "--data", DATA)
    config = load_config(written(result))
    assert "chat template: replaced by roles in words (USER:, ASSISTANT:), since" in result.stdout
    assert config.model.chat_template is not None and "ASSISTANT:" in config.model.chat_template
    with_weights(model)
    done = CliRunner().invoke(app, ["train", "model.yaml", "mode=decoupled", "--dry-run"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("has_rates", [True, False])
def test_the_header_has_the_printed_commands(
    llava_model: Path, monkeypatch: pytest.MonkeyPatch, has_rates: bool
) -> None:
    """They work here: mode auto has no rates of CPUs. Without data there is nothing to check."""
    monkeypatch.setattr("flowtrain.controller.starting_config._has_data_sheet", lambda: has_rates)
    tried = "flowtrain train run.yaml --dry-run" if has_rates else "flowtrain train run.yaml mode=decoupled --dry-run"
    for arguments, first in ((("--data", DATA), ["flowtrain data check run.yaml"]), ((), [])):
        result = init(llava_model, *arguments, "--output", "run.yaml", "--force")
        header = [line.removeprefix("#   ") for line in Path("run.yaml").read_text().splitlines() if "#   " in line]
        assert header == [*first, "flowtrain plan run.yaml --devices 8", tried]
        assert [line for line in result.stdout.splitlines() if line.startswith("flowtrain ")] == header


def test_warmup_fits_a_run_whose_steps_are_known(llava_model: Path) -> None:
    rows = pq.read_metadata(DATA).num_rows
    short = load_config(written(init(llava_model, "--data", DATA)))
    assert short.training.warmup_steps == -(-rows // 64) // 10 < 100
    remote = init(llava_model, "--data", "s3://bucket/shards/*.tar", "--output", "remote.yaml")
    assert load_config(written(remote)).training.warmup_steps == 100


def test_data_that_cannot_be_read_yet_costs_only_the_fitting_warmup(
    llava_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise SourceReadError("eval.parquet: Stale file handle")

    monkeypatch.setattr("flowtrain.controller.starting_config.SourceSet.index", unreachable)
    assert load_config(written(init(llava_model, "--data", DATA))).training.warmup_steps == 100


def test_a_file_is_replaced_only_by_force(language_model: Path, tower: Path) -> None:
    Path("run.yaml").write_text("mine")
    arguments = (language_model, "--encoder", tower, "--output", "run.yaml")
    refused = init(*arguments)
    assert refused.exit_code == 2 and "run.yaml exists" in refused.output and "--force" in refused.output
    assert Path("run.yaml").read_text() == "mine"
    assert written(init(*arguments, "--force")) == Path("run.yaml")
    assert "Tiny-Qwen3" in Path("run.yaml").read_text()
    for place in (".", "nowhere/run.yaml"):
        assert init(language_model, "--output", place).exit_code == 2


def moe(folder: Path) -> Path:
    return saved(folder, Qwen3MoeConfig(**TEXT, num_experts=4))


def moe_by_setting(folder: Path) -> Path:
    return saved(folder, Qwen3Config(**TEXT), text_config={"num_local_experts": 8})


def own_code(folder: Path) -> Path:
    return saved(folder, Qwen3Config(**TEXT), auto_map={"AutoModel": "modeling_own.Own"})


def video(folder: Path) -> Path:
    return saved(folder, VideoLlavaConfig())


def pair(folder: Path) -> Path:
    return saved(folder, SiglipConfig())


def no_family(folder: Path) -> Path:
    return saved(folder, Qwen2VLConfig())


def no_type(folder: Path) -> Path:
    return saved(folder, Qwen3Config(**TEXT), model_type=None)


def unknown_type(folder: Path) -> Path:
    return saved(folder, Qwen3Config(**TEXT), model_type="brand_new")


def no_config(folder: Path) -> Path:
    folder.mkdir()
    return folder


def no_json(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{")
    return folder


def no_plan(folder: Path) -> Path:
    """A causal language model without a plan for tensor parallelism."""
    return saved(folder, PreTrainedConfig(), model_type="gpt2", n_layer=1, n_head=1, n_embd=8)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (moe, "'qwen3_moe' is a mixture of experts (num_local_experts 4)"),
        (moe_by_setting, "is a mixture of experts (num_local_experts 8)"),
        (own_code, "brings code of its own (auto_map in config.json: modeling_own.Own), which FlowTrain never runs"),
        (video, "'video_llava' is a video model"),
        (pair, "'siglip' is a vision tower; give the language model"),
        (no_family, "no family for 'qwen2_vl'"),
        (no_type, "config.json has no model_type"),
        (unknown_type, "brand_new"),
        (no_config, "no config.json of a model can be read"),
        (no_json, "no config.json of a model can be read"),
        (no_plan, "'gpt2' has no base_model_tp_plan"),
        (lambda folder: folder, "there is no such directory, and it is no hub id"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(
    tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    result = init(make(tmp_path / "model"), "--data", DATA)
    assert result.exit_code == 2, result.output
    assert reason in result.output and not list(tmp_path.glob("*.yaml"))


def test_a_whole_model_takes_no_other_encoder(llava_model: Path, tower: Path) -> None:
    result = init(llava_model, "--encoder", tower)
    assert result.exit_code == 2 and "with an encoder of its own" in result.output


def test_a_path_that_does_not_print_stays_in_its_line(tmp_path: Path) -> None:
    model = qwen3_vl(tmp_path / "two\nlines: 1\r\x85\u2028 # three\x1b[2J")
    file = written(init(model, "--data", DATA, "--output", "a name.yaml"))
    text = file.read_bytes().decode()
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert text.startswith("# Starts from ") and text.split("\n")[1].startswith("# Written by")
    assert "#   flowtrain data check 'a name.yaml'" in text
    assert load_config(file).model.path == str(model)
    refused = init(model, "--data", DATA, "--output", "two\nlines: 1.yaml")
    assert refused.exit_code == 2 and "characters that do not print" in refused.output


def test_in_python_it_returns_what_it_wrote(language_model: Path, tower: Path) -> None:
    started = flowtrain.init(language_model, encoder=str(tower), output="run.yaml")
    assert started.file.read_text() == started.text and started.to_fill_in == ("data.sources.0.path",)
    assert load_config(started.file, check_paths=False) == started.config


@pytest.mark.slow
def test_a_model_of_the_hub_is_read_without_its_weights(tmp_path: Path, tower: Path) -> None:
    model = saved(tmp_path / "served" / "tests" / "Tiny", Qwen3Config(**TEXT))
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "work").mkdir()
    with hub_server(tmp_path / "served") as hub:
        done = subprocess.run(
            [sys.executable, "-m", "flowtrain.cli.app", "init", "tests/Tiny", "--encoder", str(tower)],
            cwd=tmp_path / "work",
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / "cache"),
                "HF_HUB_OFFLINE": "0",
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "tests/Tiny/config.json" in hub.downloads and "tests/Tiny/model.safetensors" not in hub.downloads
    config = load_config(tmp_path / "work" / "tiny.yaml", check_paths=False)
    assert (config.name, config.backbone.path) == ("tiny", "tests/Tiny")
