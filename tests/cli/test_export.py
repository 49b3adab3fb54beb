from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from shared.random_tower import RANDOM_TOWER_OVERRIDES
from transformers import AutoProcessor, LlavaForConditionalGeneration
from typer.testing import CliRunner

from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.controller import export as export_module
from flowtrain.controller.export import Exported, export_run
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.parallel_layers import local_shard
from flowtrain.observability.run_dir import RunDir, held_run_dir, open_run_dir
from flowtrain.training import checkpoint_store
from flowtrain.training.checkpoint_store import CheckpointMeta
from flowtrain.training.mesh import init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TINY = [
    *RANDOM_TOWER_OVERRIDES,
    "encoders.vision.config.hidden_size=32",
    "encoders.vision.config.num_hidden_layers=1",
    "backbone.config.hidden_size=32",
    "backbone.config.num_hidden_layers=1",
]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return open_run_dir(load_config(QUICKSTART, [f"runs_dir={tmp_path / 'runs'}", *TINY]), resume=False)


def save(run: RunDir, step: int, shift: float, metrics: dict[str, float] | None = None) -> dict[str, torch.Tensor]:
    """Commit a checkpoint whose trained weights are the first ones plus ``shift``; returns all weights."""
    config = run.load_config()
    group = init_backbone_group(0, Degrees(), torch.device("cpu"))
    trainer = Trainer(config, family_from_config(config), group, num_steps=10)
    with torch.no_grad():
        for _, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.full_like(parameter, shift))
    temporary = checkpoint_store.temporary_directory(run.checkpoints, step, "nonce")
    trainer.save_checkpoint(temporary)
    weights = {name: local_shard(parameter).clone() for name, parameter in trainer.model.named_parameters()}
    group.close()
    meta = CheckpointMeta(
        step=step, state={}, config_digest="", dp_size=1, num_threads=1, torch_version="", metrics=metrics or {}
    )
    checkpoint_store.commit(temporary, meta, keep=2, keep_best=config.checkpoint.keep_best)
    return weights


@pytest.fixture
def trained(run: RunDir) -> dict[str, torch.Tensor]:
    """Weights that the run's last checkpoint holds."""
    return save(run, 3, 0.25)


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
    monkeypatch.setattr(export_module, "stored_state", lambda checkpoint: {})
    with pytest.raises(CheckpointError, match="are missing"):
        export_run(run.root)
    assert (run.export / "config.json").read_text() == "old"
    assert not list(run.root.glob(".export*"))


def test_a_run_without_a_checkpoint_says_so(run: RunDir) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoints: no complete checkpoint yet"):
        export_run(run.root)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_not_exported_but_the_one_before(
    run: RunDir, trained: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 4, 0.5)
    flip(run.checkpoints / "step-00000004" / "__0_0.distcp")
    assert export_run(run.root).step == 3
    assert "step-00000004 is corrupt and is not used: __0_0.distcp has CRC-32" in caplog.text
    assert (run.checkpoints / "step-00000004").exists(), "an export changes nothing in the run"


def test_the_command_writes_bfloat16(run: RunDir, trained: dict[str, torch.Tensor]) -> None:
    result = CliRunner().invoke(app, ["export", str(run.root), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    model = LlavaForConditionalGeneration.from_pretrained(run.export)
    assert model.dtype == torch.bfloat16
    got = model.state_dict()["model.multi_modal_projector.linear_1.weight"]
    assert torch.equal(got, trained["connector.linear_1.weight"].bfloat16())
    assert CliRunner().invoke(app, ["export", str(run.root), "--dtype", "int8"]).exit_code == 2


def test_frozen_weights_are_exported_from_their_origin_and_compared(tmp_path: Path) -> None:
    overrides = [f"runs_dir={tmp_path / 'runs'}", *TINY, "model.freeze=[backbone]"]
    run = open_run_dir(load_config(QUICKSTART, overrides), resume=False)
    weights = save(run, 1, 0.25)
    assert export_run(run.root, tmp_path / "a").step == 1
    state = LlavaForConditionalGeneration.from_pretrained(tmp_path / "a").state_dict()
    embedding = "embed_tokens.weight"
    assert torch.equal(state[f"model.language_model.{embedding}"], weights[f"language_model.model.{embedding}"])
    assert torch.equal(state["model.multi_modal_projector.linear_1.weight"], weights["connector.linear_1.weight"])
    config = run.config.read_text()
    run.config.write_text(config.replace("seed: 0", "seed: 1"))
    assert run.config.read_text() != config
    with pytest.raises(
        CheckpointError, match=r"frozen backbone of digest .* \(from random weights of seed 0\), which now"
    ):
        export_run(run.root, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_weights_frozen_by_pattern_are_exported_from_their_origin(tmp_path: Path) -> None:
    overrides = [f"runs_dir={tmp_path / 'runs'}", *TINY, 'model.freeze=["*.mlp.*", "*lm_head*"]']
    run = open_run_dir(load_config(QUICKSTART, overrides), resume=False)
    weights = save(run, 1, 0.25)
    first = family_from_config(run.load_config()).load_backbone().state_dict()
    assert export_run(run.root, tmp_path / "a").step == 1
    state = LlavaForConditionalGeneration.from_pretrained(tmp_path / "a").state_dict()
    for name, weight in weights.items():
        is_frozen = ".mlp." in name or "embed_tokens" in name
        assert torch.equal(weight, first[name]) == is_frozen, name
        if name.startswith("language_model.model."):
            assert torch.equal(state[f"model.{name.replace('.model.', '.', 1)}"], weight), name
    run.config.write_text(run.config.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(CheckpointError, match="frozen backbone of digest"):
        export_run(run.root, tmp_path / "b")


@pytest.fixture
def best_kept(tmp_path: Path) -> RunDir:
    """A run that keeps its best checkpoint: step 3 is better than step 4, and step 5 has no loss."""
    overrides = [f"runs_dir={tmp_path / 'best'}", *TINY, "checkpoint.keep_best=eval_loss"]
    run = open_run_dir(load_config(QUICKSTART, overrides), resume=False)
    for step, metrics in ((3, {"eval_loss": 1.0}), (4, {"eval_loss": 2.0}), (5, {})):
        save(run, step, 0.1 * step, metrics)
    return run


def test_the_best_checkpoint_is_exported_on_request(best_kept: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    result = CliRunner().invoke(app, ["export", str(best_kept.root), "--best"])
    assert result.exit_code == 0 and result.stdout == f"exported step 3 to {best_kept.export}\n", result.output
    assert export_run(best_kept.root).step == 5
    flip(best_kept.checkpoints / "step-00000003" / "__0_0.distcp")
    assert export_run(best_kept.root, best=True).step == 4
    assert "step-00000003 is corrupt and is not used" in caplog.text


def test_a_run_that_keeps_or_has_no_best_checkpoint_says_so(run: RunDir, best_kept: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"keeps no best checkpoint: checkpoint.keep_best is not set.*without --best"):
        export_run(run.root, best=True)
    for path in best_kept.checkpoints.glob("step-*[34]"):
        path.rename(path.with_name(f"gone-{path.name}"))
    with pytest.raises(CheckpointError, match=r"no complete checkpoint has eval_loss \(checkpoint.keep_best\) yet"):
        export_run(best_kept.root, best=True)
