from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import flowtrain
from flowtrain.cli.app import app
from flowtrain.config.load import load_config
from flowtrain.controller.predict import predict_plans
from flowtrain.data.sampler import Sampler
from flowtrain.scheduler.packing.registry import PACKERS
from flowtrain.scheduler.summary import imbalance, packing_fill

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
NUM_ROWS = 90


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """A CSV of lengths; the last row is longer than all others."""
    draw = random.Random(7)
    rows = [(draw.randint(0, 4), draw.randint(20, 900)) for _ in range(NUM_ROWS - 1)] + [(6, 1500)]
    path = tmp_path / "lengths.csv"
    path.write_text("num_image_tiles,num_tokens\n" + "".join(f"{tiles},{tokens}\n" for tiles, tokens in rows))
    return str(path)


def pack(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["pack", *arguments])


def record_of(*arguments: str) -> dict[str, Any]:
    result = pack(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    record = json.loads(result.stdout)
    assert isinstance(record, dict)
    return record


def test_a_csv_alone_is_packed_by_the_defaults_and_imports_nothing_heavy(lengths: str, tmp_path: Path) -> None:
    program = (
        "import atexit, sys\n"
        "heavy = ('torch', 'ray', 'transformers', 'matplotlib')\n"
        "atexit.register(lambda: print('HEAVY', *[name for name in heavy if name in sys.modules]))\n"
        "from flowtrain.cli.app import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "pack", lengths, "--dp", "4", "--batch", "30"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "HEAVY"
    for expected in ("best_fit_balanced", "the first 3 of 3 steps, 30 samples each", "4 data-parallel ranks"):
        assert expected in done.stdout
    assert "…" not in done.stdout, "a table is cut"


def test_json_has_the_figures_of_every_method_and_of_the_papers(lengths: str) -> None:
    record = record_of(lengths, "--compare", "--dp", "4", "--batch", "30", "scheduler.microbatch_tokens=2048", "seed=3")
    assert record["settings"] == {
        **{"seed": 3, "dp_size": 4, "global_batch_size": 30, "max_seq_len": 2048, "oversized": "reject"},
        **{"packing": "best_fit_balanced", "dispatch": "lpt", "cost": "eq3", "num_buckets": 4},
        "microbatch_tokens": 2048,
    }
    assert (record["num_samples"], record["num_steps"], record["rejected"]) == (NUM_ROWS, 3, {})
    methods = {method["label"]: method for method in record["methods"]}
    assert record["methods"][0]["packing"] == "best_fit_balanced"
    assert set(methods) == {f"{name} + lpt" for name in PACKERS} | {"best_fit + zigzag (paper)"}
    for method in methods.values():
        assert method["num_bins"] == 4 * method["num_slots"]
        assert 0 < method["fill"] <= 1 and 0 <= method["dist_ratio_vision"] < 1
        for spread in ("step_imbalance", "slot_imbalance", "excess", "plan_time_s"):
            assert method[spread]["median"] <= method[spread]["max"]
    ours = methods["best_fit_balanced + lpt"]
    assert [step["digest"] for step in record["steps"]] == [None] * 3
    assert [step["step"] for step in record["steps"]] == [1, 2, 3]
    assert max(step["step_imbalance"] for step in record["steps"]) == ours["step_imbalance"]["max"]
    assert sum(step["num_microbatches"] for step in record["steps"]) == ours["num_bins"]


def test_a_method_is_not_shown_twice_where_the_configured_one_is_the_papers(lengths: str) -> None:
    record = record_of(lengths, "--compare", "--batch", "30", "scheduler.packing=best_fit", "scheduler.dispatch=zigzag")
    labels = [method["label"] for method in record["methods"]]
    assert labels[0] == "best_fit + zigzag (paper)"
    assert len(labels) == len(set(labels)) == len(PACKERS)


def test_rows_come_in_the_order_in_which_a_run_would_draw_them(lengths: str) -> None:
    tokens = [int(line.split(",")[1]) for line in Path(lengths).read_text().splitlines()[1:]]
    shuffled = flowtrain.pack(lengths, ["training.global_batch_size=40", "seed=5"])
    drawn = [ref.row for ref in Sampler([NUM_ROWS], [1.0], seed=5).take(NUM_ROWS)]
    found = [value for step in shuffled.workload.steps for value in step.lengths.tokens.tolist()]
    assert found == [tokens[row] for row in drawn]
    assert "shuffled by seed 5" in shuffled.workload.source
    plain = flowtrain.pack(lengths, ["training.global_batch_size=40", "data.shuffle=false"])
    assert [value for step in plain.workload.steps for value in step.lengths.tokens.tolist()] == tokens
    assert "in the file's order" in plain.workload.source


def test_rows_beyond_the_longest_sequence_get_the_configured_treatment(lengths: str) -> None:
    given = (lengths, "--batch", "30", "data.max_seq_len=1000")
    rejected = record_of(*given)
    assert (rejected["num_samples"], rejected["rejected"]) == (NUM_ROWS - 1, {"oversized_sample": 1})
    assert "rejects them" in rejected["notes"][0]
    cut = record_of(*given, "data.oversized=truncate_text")
    assert (cut["num_samples"], cut["rejected"]) == (NUM_ROWS, {})
    assert cut["num_tokens"] == rejected["num_tokens"] + 1000
    assert "which a CSV does not tell" in cut["notes"][0]
    refused = pack(lengths, "data.max_seq_len=10")
    assert refused.exit_code == 1
    assert "all 90 rows have more tokens than data.max_seq_len (10); raise it" in refused.stderr


def test_a_configuration_packs_a_csv_instead_of_its_data(lengths: str) -> None:
    record = record_of(
        *(QUICKSTART, "data.sources.0.path=nowhere.parquet", "data.max_seq_len=2048"),
        *("scheduler.microbatch_tokens=2048", "--lengths", lengths, "--steps", "2"),
    )
    assert (record["num_steps"], record["settings"]["global_batch_size"], record["num_samples"]) == (2, 16, 32)
    assert record["source"].startswith(lengths)
    assert "the first 2 of 240 steps" in record["order"]
    by_flops = record_of(QUICKSTART, "scheduler.cost=flops", "--lengths", lengths, "--steps", "1")
    assert by_flops["methods"][0]["step_cost"] > 1e9


def test_pack_predicts_the_plans_that_a_runs_planner_makes() -> None:
    changes = ["training.global_batch_size=24", "backbone.data_parallel_size=3", "training.max_steps=3", "seed=2"]
    report = flowtrain.pack(QUICKSTART, changes)
    plans = list(predict_plans(load_config(QUICKSTART, changes)))
    assert [plan.unit.step for plan in plans] == [1, 2, 3]
    assert [
        (step.step, step.digest, step.num_microbatches, step.fill, step.step_imbalance) for step in report.steps
    ] == [(plan.unit.step, plan.digest(), plan.num_microbatches, packing_fill(plan), imbalance(plan)) for plan in plans]
    assert len({plan.digest() for plan in plans}) == 3
    for plan, figures in zip(plans, report.methods[0].steps, strict=True):
        assert (figures.num_bins, figures.num_tokens) == (plan.num_microbatches, plan.num_tokens)
        assert figures.step_imbalance == pytest.approx(imbalance(plan))
        assert figures.fill == packing_fill(plan)
    assert [plan.digest() for plan in predict_plans(load_config(QUICKSTART, changes), num_steps=1)] == [
        plans[0].digest()
    ]


def test_arrival_order_is_said_to_be_unpredictable() -> None:
    report = flowtrain.pack(QUICKSTART, ["data.order=arrival"], num_steps=1)
    assert [step.digest for step in report.steps] == [None]
    assert "data.order is arrival" in report.workload.notes[0]


def test_progress_counts_steps_and_methods(lengths: str) -> None:
    told: list[tuple[str, int, int]] = []
    flowtrain.pack(lengths, ["training.global_batch_size=45"], compare=True, progress=lambda *now: told.append(now))
    total = 2 * (len(PACKERS) + 1)
    assert told == [("packing", done, total) for done in range(1, total + 1)]


def test_the_picture_is_a_picture(lengths: str, tmp_path: Path) -> None:
    result = pack(lengths, "--batch", "30", "--compare", "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 0, result.stderr
    assert result.stderr == f"plot: {tmp_path / 'plot.png'}\n"
    with Image.open(tmp_path / "plot.png") as image:
        assert image.format == "PNG" and image.width > 1200 and image.height > 600
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_the_page_holds_tables_and_drawing_and_loads_nothing(tmp_path: Path, lengths: str) -> None:
    odd = tmp_path / "a<b&c.csv"
    odd.write_text(Path(lengths).read_text())
    result = pack(str(odd), "--batch", "30", "--compare", "--plot", str(tmp_path / "plot.html"))
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "plot.html").read_text()
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    assert page.count("<svg") == 1 and page.rstrip().endswith("</html>")
    assert "<!DOCTYPE svg" not in page and "<?xml" not in page
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|url\((?!#)[^)]*\)|@import", page) == []
    assert "a&lt;b&amp;c.csv" in page and "a<b" not in page
    for name in (*PACKERS, "best_fit + zigzag (paper)"):
        assert f"<td>{name}</td>" in page


@pytest.mark.parametrize(
    ("arguments", "code", "fault"),
    [
        (("--plot", "figure.svg"), 2, "--plot figure.svg: the ending must be .png or .html"),
        (("--plot", "none/figure.png"), 2, "--plot none/figure.png: there is no directory none; make it"),
        (("--steps", "0"), 2, "num_steps (--steps) is 0; it must be at least 1"),
        (("--lengths", "other.csv"), 2, "are to be taken instead of data; give one of them"),
        (("scheduler.cost=flops",), 2, "scheduler.cost ('flops') needs the backbone's shape"),
        (("scheduler.cost=profile",), 2, "scheduler.cost_profile"),
        (("scheduler.packing=best",), 2, "scheduler.packing = 'best': must be"),
        (("scheduler.microbatch_token=9",), 2, "unknown key; did you mean scheduler.microbatch_tokens?"),
        (("--dp", "8", "--batch", "4"), 2, "training.global_batch_size (4) is smaller than"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    lengths: str, arguments: tuple[str, ...], code: int, fault: str
) -> None:
    result = pack(lengths, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert fault in result.stderr


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_packed(lengths: str, tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    result = pack(lengths, "--plot", str(tmp_path / "taken.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("taken.png: no file can be written there; choose another place\n")


def test_a_csv_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("num_image_tiles,num_tokens\n1,x\n")
    result = pack(str(bad))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"flowtrain: lengths {bad}, line 2: num_tokens is 'x'")
