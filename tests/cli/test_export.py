from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration
from typer.testing import CliRunner

from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.controller import export as export_module
from flowtrain.controller.export import Exported, export_run
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.models.families.registry import family_from_config
from flowtrain.observability.run_dir import RunDir, held_run_dir, open_run_dir
from flowtrain.training.checkpoint_store import CheckpointMeta

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TINY = [
    "encoders.vision.config.hidden_size=32",
    "encoders.vision.config.num_hidden_layers=1",
    "backbone.config.hidden_size=32",
    "backbone.config.num_hidden_layers=1",
]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return open_run_dir(load_config(QUICKSTART, [f"runs_dir={tmp_path / 'runs'}", *TINY]), resume=False)


@pytest.fixture
def trained(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Weights that the run's last checkpoint holds."""
    torch.set_num_threads(1)
    state = {
        name: tensor + 0.25
        for name, tensor in family_from_config(run.load_config()).load_backbone().state_dict().items()
    }
    monkeypatch.setattr(export_module, "latest_complete", lambda checkpoints: checkpoints / "step-1")
    monkeypatch.setattr(export_module, "load_backbone_state", lambda checkpoint: state)
    meta = CheckpointMeta(step=3, state={}, config_digest="", dp_size=1, num_threads=1, torch_version="")
    monkeypatch.setattr(export_module, "read_meta", lambda checkpoint: meta)
    return state


def test_an_export_loads_with_hugging_face_and_holds_the_trained_weights(
    run: RunDir, trained: dict[str, torch.Tensor]
) -> None:
    assert export_run(run.root) == Exported(run.export, step=3, is_training=False)
    model = LlavaForConditionalGeneration.from_pretrained(run.export)
    processor = AutoProcessor.from_pretrained(run.export)
    got = model.state_dict()["model.multi_modal_projector.linear_1.weight"]
    assert torch.equal(got, trained["connector.linear_1.weight"])
    assert processor.tokenizer.chat_template

    (run.export / "stale.txt").touch()
    assert export_run(run.root).directory == run.export
    assert not (run.export / "stale.txt").exists()
    assert not list(run.root.glob(".export*"))


def test_a_directory_of_the_users_own_is_never_overwritten(
    run: RunDir, trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"theirs exists and is not empty; name another directory with --to"):
        export_run(run.root, theirs)
    assert export_run(run.root, tmp_path / "new" / "model").directory == tmp_path / "new" / "model"
    assert (tmp_path / "new" / "model" / "config.json").is_file()


def test_the_command_says_which_step_it_wrote_and_that_the_run_is_still_training(
    run: RunDir, trained: dict[str, torch.Tensor]
) -> None:
    with held_run_dir(run.load_config()):
        during = CliRunner().invoke(app, ["export", str(run.root)])
    after = CliRunner().invoke(app, ["export", str(run.root)])
    line = f"exported step 3 to {run.export}"
    assert (during.exit_code, after.exit_code) == (0, 0), during.output + after.output
    assert during.stdout == f"{line}; the run is still training: export again for later steps\n"
    assert after.stdout == f"{line}\n"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_all_files_have_the_mode_that_the_umask_leaves(
    run: RunDir, trained: dict[str, torch.Tensor], umask: int
) -> None:
    before = os.umask(umask)
    try:
        exported = export_run(run.root).directory
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in exported.rglob("*") if path.is_file()}
    assert "model.safetensors" in modes and ".new" not in modes
    assert set(modes.values()) == {0o666 & ~umask}


def test_a_failed_export_leaves_the_old_one(
    run: RunDir, trained: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.export.mkdir()
    (run.export / "config.json").write_text("old")
    trained.clear()
    with pytest.raises(Exception):  # noqa: B017 - whatever the family says of missing weights
        export_run(run.root)
    assert (run.export / "config.json").read_text() == "old"
    assert not list(run.root.glob(".export*"))


def test_a_run_without_a_checkpoint_says_so(run: RunDir) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoints: no complete checkpoint yet"):
        export_run(run.root)
