from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flowtrain
from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.observability.run_dir import open_run_dir

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")

HEAVY = ("torch", "ray", "transformers", "pyarrow", "numba")
PROBE = f"""
import atexit, sys
atexit.register(lambda: print("HEAVY", *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr))
from flowtrain.cli.app import main
main()
"""


def flowtrain_command(*arguments: str, cwd: Path) -> tuple[int, str, str, list[str]]:
    """Exit code, standard output, standard error, and which heavy packages were imported until the end."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    *error, heavy = done.stderr.splitlines()
    return done.returncode, done.stdout, "\n".join(error), heavy.split()[1:]


def test_help_and_version_import_nothing_heavy(tmp_path: Path) -> None:
    code, output, _, heavy = flowtrain_command("--help", cwd=tmp_path)
    assert (code, heavy) == (0, [])
    assert "train" in output and "export" in output
    code, output, _, heavy = flowtrain_command("--version", cwd=tmp_path)
    assert (code, output, heavy) == (0, f"flowtrain {flowtrain.__version__}\n", [])
    code, output, _, heavy = flowtrain_command("train", "--help", cwd=tmp_path)
    assert (code, heavy) == (0, [])
    assert "--resume" in output and "--dry-run" in output


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "training.learning_rat=1e-4",
            "override 'training.learning_rat=1e-4': training.learning_rat = 0.0001: unknown key; "
            "did you mean training.learning_rate?",
        ),
        (
            "training.global_batch_size=many",
            "override 'training.global_batch_size=many': training.global_batch_size = 'many': must be an integer",
        ),
        (
            "data.max_seq_len=4096",
            "data.max_seq_len (4096) is larger than scheduler.microbatch_tokens (512): a sample of that length would "
            "fit no microbatch; lower the first or raise the second",
        ),
    ],
)
def test_a_refused_configuration_is_one_message_and_exit_code_2(tmp_path: Path, override: str, fault: str) -> None:
    code, output, error, heavy = flowtrain_command("train", QUICKSTART, override, cwd=tmp_path)
    assert (code, output, error) == (2, "", f"flowtrain: {QUICKSTART}: {fault}")
    assert heavy == []
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"runs_dir={tmp_path / 'runs'}"])
    root = open_run_dir(config, resume=False).root
    code, _, error, heavy = flowtrain_command("train", QUICKSTART, cwd=tmp_path)
    assert (code, heavy) == (2, [])
    assert error.startswith(f"flowtrain: {root} already holds a run; continue it with --resume")
    code, _, error, heavy = flowtrain_command("train", QUICKSTART, "seed=5", "--resume", cwd=tmp_path)
    assert (code, heavy) == (2, [])
    assert error.endswith("  - seed was 0, is now 5")
    code, output, error, heavy = flowtrain_command("train", QUICKSTART, "--dry-run", cwd=tmp_path)
    assert (code, output, heavy) == (2, "", [])
    assert error.startswith(f"flowtrain: {root} already holds a run; continue it with --resume")
    changed = ("limits.stall_timeout_s=77", "--dry-run", "--resume")
    code, output, error, _ = flowtrain_command("train", QUICKSTART, *changed, cwd=tmp_path)
    assert (code, error) == (0, "")
    then = load_config(QUICKSTART).limits.stall_timeout_s
    for expected in ("from the beginning", "limits.stall_timeout_s", f"{then} -> 77.0"):
        assert expected in output


def test_a_file_that_is_not_there_and_a_run_that_is_not_there(tmp_path: Path) -> None:
    code, _, error, _ = flowtrain_command("train", "none.yaml", cwd=tmp_path)
    assert (code, error) == (
        2,
        "flowtrain: none.yaml: the configuration cannot be read: No such file or directory",
    )
    code, _, error, heavy = flowtrain_command("export", "none", cwd=tmp_path)
    assert (code, heavy) == (2, [])
    looked = "there is no none/config.yaml or runs/none/config.yaml"
    way_out = "Give the run's directory; one that starts has none until Ray has placed its actors"
    assert error == f"flowtrain: no run 'none': {looked}. {way_out}"


def test_a_dry_run_shows_or_refuses_the_backbones_degrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    shown = runner.invoke(app, ["train", QUICKSTART, "backbone.pipeline_parallel_size=2", "--dry-run"])
    assert shown.exit_code == 0 and "2: 1 data x 2 pipeline x 1 tensor parallel" in shown.output
    assert "1f1b, a slice of the layers a rank" in shown.output
    refused = runner.invoke(app, ["train", QUICKSTART, "backbone.tensor_parallel_size=7", "--dry-run"])
    assert refused.exit_code == 2
    message = "backbone.tensor_parallel_size (7) does not divide the backbone's attention heads"
    assert message in refused.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "there", "absent"),
    [
        (
            ["mode=monolithic", "backbone.pipeline_parallel_size=2", "pipeline.encoder_layers=own"],
            [
                "1f1b, 2 slices of the layers a rank, the encoder in stages of its own",
                "encoder 0-1, backbone 0-1",
                "encoder 2-3, backbone 2-3",
                "vision 897,792",
            ],
            ["encoder vision", "both on a device"],
        ),
        (["mode=llm_only"], ["2,472,384, of them 2,472,384 trainable: connector"], ["encoder", "vision 897,792"]),
        (
            ["mode=colocated"],
            ["1 where the cluster has GPUs (of each: vision 0.4, backbone 0.6)", "encoder vision", "both on a device"],
            ["encoder 0"],
        ),
        (
            ["mode=monolithic", "encoders.vision.trainable=true"],
            ["3,370,176, of them 3,370,176 trainable", "encoder 0-3"],
            ["(frozen)"],
        ),
        (
            ['model.freeze=["*embed_tokens*"]', 'training.learning_rates={"*norm*": 0.1}'],
            ["of them 1,685,952 trainable: vision 897,792 (frozen)", "backbone 2,410,560 (1,624,128 trained)"],
            ["connector 61,824 ("],
        ),
    ],
)
def test_a_dry_run_shows_what_a_mode_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], there: list[str], absent: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    shown = runner.invoke(app, ["train", QUICKSTART, *overrides, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert [text for text in there if text not in shown.output] == []
    assert [text for text in absent if text in shown.output] == []


def test_a_dry_run_shows_actors_steps_data_and_memory_and_needs_no_ray(tmp_path: Path) -> None:
    code, output, error, heavy = flowtrain_command(
        "train", QUICKSTART, "training.max_steps=7", "--dry-run", cwd=tmp_path
    )
    assert (code, error) == (0, "")
    assert "ray" not in heavy
    for expected in ("7 of 16 samples", "1,050 samples", "every 50 steps"):
        assert expected in output
    actors, memory = output.split("memory of a device")
    rows = {line.split("│")[1].strip(): line for line in actors.splitlines() if line.count("│") == 6}
    assert [cell.strip() for cell in rows["vision"].split("│")[2:6]] == ["2", "0.5", "0", "16 MiB"]
    assert [cell.strip() for cell in rows["backbone"].split("│")[2:6]] == ["1", "1", "0", "-"]
    facts = {cells[1].strip(): cells[2].strip() for line in actors.splitlines() if len(cells := line.split("│")) == 4}
    assert facts["tokens an image"] == "vision: 49"
    assert facts["parameters"] == (
        "3,370,176, of them 2,472,384 trainable: vision 897,792 (frozen), connector 61,824, backbone 2,410,560"
    )
    assert facts["order"] == "deterministic"
    assert facts["feeders"].startswith("1, each with up to 32 samples of 260 KiB and "), "of an evaluation round"
    assert "of open blocks" in facts["feeders"]
    segments = [float(rows[name].split("│")[5].split()[0]) for name in ("vision", "feeder")]
    assert float(facts["memory pool"].split()[0]) == pytest.approx(2 * segments[0] + segments[1], abs=0.01)
    assert facts["memory pool"].endswith("MiB at most; unused pages take no memory")
    assert facts["oversized"] == "more than 512 tokens: reject"
    assert facts["warning"].startswith("training.warmup_steps is 20, and the run has 7 steps: the learning rate")
    needs = [[cell.strip() for cell in line.split("│")[1:-1]] for line in memory.splitlines() if line.count("│") == 6]
    assert [need[:2] for need in needs] == [["backbone", "backbone 0-3"], ["encoder vision", "all that features need"]]
    assert all(need[-1].endswith("iB") for need in needs)
    assert facts["memory settings"].startswith("activation checkpointing none; auto sharding")
    assert (facts["dispatch"], facts["cost"], facts["backbone ranks"]) == ("lpt, 4 buckets", "eq3", "1 data-parallel")
    assert list(tmp_path.iterdir()) == []
