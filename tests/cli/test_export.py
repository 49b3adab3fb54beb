from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from flowtrain.config.load import load_config
from flowtrain.controller import export as export_module
from flowtrain.controller.export import export_run
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.models.families.registry import family_from_config
from flowtrain.observability.run_dir import RunDir, open_run_dir

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
    return state


def test_an_export_loads_with_hugging_face_and_holds_the_trained_weights(
    run: RunDir, trained: dict[str, torch.Tensor]
) -> None:
    assert export_run(run.root) == run.export
    model = LlavaForConditionalGeneration.from_pretrained(run.export)
    processor = AutoProcessor.from_pretrained(run.export)
    got = model.state_dict()["model.multi_modal_projector.linear_1.weight"]
    assert torch.equal(got, trained["connector.linear_1.weight"])
    assert processor.tokenizer.chat_template

    (run.export / "stale.txt").touch()
    assert export_run(run.root) == run.export
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
    assert export_run(run.root, tmp_path / "new" / "model") == tmp_path / "new" / "model"
    assert (tmp_path / "new" / "model" / "config.json").is_file()


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
    with pytest.raises(CheckpointError, match=r"checkpoints: no complete checkpoint to export"):
        export_run(run.root)
