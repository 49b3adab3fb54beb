from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import flowtrain
from flowtrain.cli.app import app
from flowtrain.cli.pack_plot import draw
from flowtrain.config.load import load_config
from flowtrain.controller.pack import TokenSpread
from flowtrain.costs.microbatch_costs import FittedCost, MicrobatchCosts
from flowtrain.costs.profile import Profile
from flowtrain.data.sampler import Sampler
from flowtrain.scheduler.packing.registry import PACKERS
from flowtrain.scheduler.summary import imbalance, packing_fill
from flowtrain.types.plan import CostModel
from tests.predicted import predicted_plans

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
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "HEAVY"
    for expected in ("best_fit_balanced", "all 3 steps, 30 samples each", "4 data-parallel ranks"):
        assert expected in done.stdout
    assert "…" not in done.stdout, "a table is cut"


def test_json_has_the_figures_of_every_method_and_of_the_papers(lengths: str) -> None:
    record = record_of(lengths, "--compare", "--dp", "4", "--batch", "30", "scheduler.microbatch_tokens=2048", "seed=3")
    assert record["settings"] == {
        **{"seed": 3, "dp_size": 4, "global_batch_size": 30, "max_seq_len": 2048, "oversized": "reject"},
        **{
            "shuffle": "blocks",
            "shuffle_blocks": 64,
            "packing": "best_fit_balanced",
            "dispatch": "lpt",
            "cost": "eq3",
            "num_buckets": 4,
        },
        **{"policy": "none", "microbatch_tokens": 2048},
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
    assert (
        "best_fit + zigzag (paper)" in pack(lengths, "scheduler.packing=best_fit", "scheduler.dispatch=zigzag").stdout
    )
    assert len(labels) == len(set(labels)) == len(PACKERS)


def test_rows_come_in_the_order_in_which_a_run_would_draw_them(lengths: str) -> None:
    tokens = [int(line.split(",")[1]) for line in Path(lengths).read_text().splitlines()[1:]]
    shuffled = flowtrain.pack(lengths, ["training.global_batch_size=40", "seed=5"])
    blocks = np.append(np.arange(0, NUM_ROWS, 100), NUM_ROWS)
    drawn = [draw.ref.row for draw in Sampler([blocks], [1.0], 5, "blocks", 64).take(NUM_ROWS)]
    found = [value for step in shuffled.workload.steps for value in step.lengths.tokens.tolist()]
    assert found == [tokens[row] for row in drawn]
    assert "shuffled in blocks of 100 rows, 64 mixed, by seed 5" in shuffled.workload.source
    by_row = flowtrain.pack(lengths, ["training.global_batch_size=40", "seed=5", "data.shuffle=rows"])
    assert "shuffled row by row, by seed 5" in by_row.workload.source
    plain = flowtrain.pack(lengths, ["training.global_batch_size=40", "data.shuffle=false"])
    assert [value for step in plain.workload.steps for value in step.lengths.tokens.tolist()] == tokens
    assert "in the file's order" in plain.workload.source


def test_the_report_shows_how_even_lengths_come(tmp_path: Path) -> None:
    """A file sorted by length is uneven in few blocks, even in many, and most uneven in its own order."""
    file = tmp_path / "sorted.csv"
    file.write_text("num_image_tiles,num_tokens\n" + "".join(f"0,{40 + row // 2}\n" for row in range(6000)))
    given = (str(file), "--batch", "60", "--steps", "100")
    found = {}
    for shuffle in ("rows", "blocks", "none"):
        found[shuffle] = record_of(*given, f"data.shuffle={shuffle}", "data.shuffle_blocks=4")["step_tokens"]
        assert found[shuffle]["mean"] == 60 * 1539.5
        # All rows in 100 steps: lengths 40 to 3039 deviate by 3000 / sqrt(12), steps of 60 by that times sqrt(60).
        assert found[shuffle]["spread_of_rows"] == pytest.approx(3000 / 12**0.5 / 60**0.5 / 1539.5, rel=1e-3)
    rows, blocks, none = (found[shuffle]["spread"] for shuffle in found)
    assert rows == pytest.approx(found["rows"]["spread_of_rows"], rel=0.2)
    assert 2 * rows < blocks < none / 1.5
    # 60 rows of a block of 4 that are open: a variance of 1 + 60 / 4 rows instead of one.
    assert blocks == pytest.approx(rows * 4, rel=0.25)
    assert none == pytest.approx(3000 / 12**0.5 / 1539.5, rel=0.02)
    shown = " ".join(pack(*given, "data.shuffle=rows").stdout.split())
    assert f"a step 92,370 tokens on average, standard deviation {rows:.1%}; with data.shuffle=rows it would" in shown


def test_a_single_step_has_no_spread(lengths: str) -> None:
    assert record_of(lengths, "--batch", "30", "--steps", "1")["step_tokens"] is None
    assert "on average" not in pack(lengths, "--batch", "30", "--steps", "1").stdout


def test_rejected_samples_are_no_spread() -> None:
    even = [np.full(count, 7) for count in (40, 38, 39)]
    assert TokenSpread.of(even) == TokenSpread(7 * 39, 0.0, 0.0)
    assert TokenSpread.of(even[:1]) is None


def test_a_partial_last_step_is_said_and_left_out_of_the_spread(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    tokens = [100] * 8 + [200] * 8 + [10] * 2
    file.write_text("num_image_tiles,num_tokens\n" + "".join(f"0,{count}\n" for count in tokens))
    given = (str(file), "data.shuffle=none")
    spread = record_of(*given, "--batch", "8")["step_tokens"]
    assert (spread["mean"], spread["spread"]) == (1200, pytest.approx(400 * 2**0.5 / 1200))
    shown = " ".join(pack(*given, "--batch", "8").stdout.split())
    assert "steps all 3 steps, 2 steps of 8 samples and a last one of 2" in shown
    assert "a whole step 1,200 tokens on average, standard deviation 47.1%" in shown
    one_whole = " ".join(pack(*given, "--batch", "16").stdout.split())
    assert "all 2 steps, 1 step of 16 samples and a last one of 2" in one_whole and "on average" not in one_whole
    assert "the only step, 18 of 64 samples" in " ".join(pack(*given, "--batch", "64").stdout.split())
    assert "all 2 steps, 9 samples each" in " ".join(pack(*given, "--batch", "9").stdout.split())


def test_rows_beyond_the_longest_sequence_get_the_configured_treatment(lengths: str) -> None:
    given = (lengths, "--batch", "30", "data.max_seq_len=1000")
    rejected = record_of(*given)
    assert (rejected["num_samples"], rejected["rejected"]) == (NUM_ROWS - 1, {"oversized_sample": 1})
    assert "1 row of the file has more" in rejected["notes"][0] and "rejects it" in rejected["notes"][0]
    cut = record_of(*given, "data.oversized=truncate_text")
    assert (cut["num_samples"], cut["rejected"]) == (NUM_ROWS, {})
    assert cut["num_tokens"] == rejected["num_tokens"] + 1000
    assert "but a CSV does not show that" in cut["notes"][0]
    refused = pack(lengths, "data.max_seq_len=10")
    assert refused.exit_code == 2
    assert "every row (90 in all) has more tokens than data.max_seq_len (10); raise it" in refused.stderr


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
    plans = list(predicted_plans(load_config(QUICKSTART, changes)))
    assert [plan.unit.step for plan in plans] == [1, 2, 3]
    assert [
        (step.step, step.digest, step.num_microbatches, step.fill, step.step_imbalance) for step in report.steps
    ] == [(plan.unit.step, plan.digest(), plan.num_microbatches, packing_fill(plan), imbalance(plan)) for plan in plans]
    assert len({plan.digest() for plan in plans}) == 3
    for plan, figures in zip(plans, report.methods[0].steps, strict=True):
        assert (figures.num_bins, figures.num_tokens) == (plan.num_microbatches, plan.num_tokens)
        assert figures.step_imbalance == pytest.approx(imbalance(plan))
        assert figures.fill == packing_fill(plan)
    assert [plan.digest() for plan in predicted_plans(load_config(QUICKSTART, changes), num_steps=1)] == [
        plans[0].digest()
    ]


H200 = ("backbone.accelerator_type=H200", "training.global_batch_size=24", "backbone.data_parallel_size=2")


def test_every_policy_is_compared_by_simulated_steps() -> None:
    changes = [*H200, "mode=monolithic", "backbone.pipeline_parallel_size=2"]
    report = flowtrain.pack(QUICKSTART, changes, num_steps=3, compare=True)
    methods = {method.method.label: method for method in report.methods}
    first, searched = report.methods[0], methods["pipetune (searched)"]
    assert first.method.label == "best_fit_balanced + lpt" and "balanced + lpt" in methods
    assert report.workload.simulated_on == "4 ranks (dp=2 pp=2 tp=1) on h200, times from data sheets"
    assert searched.simulated_s is not None and first.simulated_s is not None
    for step, default in zip(searched.steps, first.steps, strict=True):
        assert step.simulated_s is not None and default.simulated_s is not None
        assert 0 < step.simulated_s <= default.simulated_s, "what the search starts from is among its candidates"
    assert searched.simulated_s < first.simulated_s
    assert flowtrain.pack(QUICKSTART, changes, num_steps=1).methods[0].simulated_s is None, "only where it is asked for"

    tuned = flowtrain.pack(QUICKSTART, [*changes, "pipeline.policy=pipetune"], num_steps=3)
    (mine,) = tuned.methods
    assert mine.method == searched.method
    assert [step.num_bins for step in mine.steps] == [step.num_microbatches for step in tuned.steps]
    balanced = flowtrain.pack(QUICKSTART, [*changes, "pipeline.policy=balanced"], num_steps=3, compare=True).methods[-1]
    for other in (mine, balanced):  # whatever the policy is
        assert other.method == searched.method
        assert [step.simulated_s for step in other.steps] == [step.simulated_s for step in searched.steps]


def test_simulated_steps_outside_monolithic_are_the_backbones() -> None:
    report = flowtrain.pack(QUICKSTART, [*H200, "mode=auto"], num_steps=1, compare=True)
    assert report.workload.simulated_on.endswith("times from data sheets; the backbone alone, without encoders")
    assert any("mode is auto" in note for note in report.workload.notes)


def test_steps_without_samples_have_no_figures_and_no_error() -> None:
    report = flowtrain.pack(QUICKSTART, [*H200, "data.max_seq_len=20"], num_steps=2, compare=True)
    assert report.workload.token_spread is None
    assert all(method.simulated_s is None for method in report.methods)


def test_tables_name_the_policy(tmp_path: Path) -> None:
    balanced = pack(QUICKSTART, "--steps", "1", "pipeline.policy=balanced").stdout
    assert "policy balanced: packing balanced, dispatch lpt" in balanced and "simulated" not in balanced
    plot = tmp_path / "page.html"
    shown = pack(QUICKSTART, "--steps", "1", *H200, "--compare", "pipeline.policy=pipetune", "--plot", str(plot)).stdout
    assert "policy pipetune, which starts from packing best_fit_balanced" in shown
    assert "simulated step: mean time without the update" in shown and "…" not in shown
    assert "pipetune (searched)" in plot.read_text() and "simulated step, ms" in plot.read_text()


def test_a_comparison_says_why_it_has_no_simulated_steps(tmp_path: Path) -> None:
    record = record_of(QUICKSTART, "--steps", "1", "--compare")
    assert record["simulated_on"] is None and all(each["simulated_s"] is None for each in record["methods"])
    assert "neither allocator.profile nor backbone.accelerator_type is given" in record["notes"][0]
    refused = record_of(QUICKSTART, "--steps", "1", "--compare", f"allocator.profile={tmp_path / 'none.json'}")
    assert "the policy pipetune is not compared, since its search is refused: " in refused["notes"][0]
    assert "none.json" in refused["notes"][0]


def test_arrival_order_is_said_to_be_unpredictable() -> None:
    report = flowtrain.pack(QUICKSTART, ["data.order=arrival"], num_steps=1)
    assert [step.digest for step in report.steps] == [None]
    assert "data.order is arrival" in report.workload.notes[0]


def test_a_cost_that_a_run_would_fit_first_is_shown_as_what_it_starts_with(lengths: str, tmp_path: Path) -> None:
    fitting = (QUICKSTART, "scheduler.cost=profile", "data.order=arrival", "--steps", "1")
    for given in (fitting, (*fitting, "--lengths", lengths, "data.max_seq_len=512")):
        record = record_of(*given)
        assert record["settings"]["cost"] == "eq3"
        assert any("starts with eq3" in note for note in record["notes"])
        assert record["methods"][0]["step_cost"] == record_of(*given, "scheduler.cost=eq3")["methods"][0]["step_cost"]
    shown = pack(*fitting, "--plot", str(tmp_path / "plot.html"))
    assert "cost eq3 (until the run has fitted its own)" in re.sub(r"\s+", " ", shown.stdout)
    assert "cost eq3 (until the run has fitted its own)" in (tmp_path / "plot.html").read_text()
    assert "until the run" not in pack(QUICKSTART, "data.order=arrival", "--steps", "1").stdout


@pytest.mark.parametrize(("capacity", "is_noted"), [(2048, False), (4096, True)])
def test_a_profile_beyond_its_capacity_is_extrapolated_for_a_csv(
    lengths: str, tmp_path: Path, capacity: int, is_noted: bool
) -> None:
    fitted = FittedCost(CostModel("profile", per_token=1e-4, per_square=1e-8), "squares", 0.9, 0.8, 100)
    file = tmp_path / "profile.json"
    file.write_text(Profile("cpu", {}, {}, microbatches=MicrobatchCosts(fitted, {}, 2048)).to_json())
    given = ("scheduler.cost=profile", f"scheduler.cost_profile={file}", f"scheduler.microbatch_tokens={capacity}")
    record = record_of(lengths, *given)
    note = "scheduler.cost_profile was fitted at 2,048 tokens a microbatch; the costs of 4,096 here are extrapolated"
    assert (note in record["notes"]) == is_noted
    assert record["settings"]["cost"] == "profile"


def test_a_csv_says_that_it_predicts_no_plans(lengths: str) -> None:
    assert any("digest is null" in note for note in record_of(lengths)["notes"])
    assert any("data.order is arrival" in note for note in record_of(lengths, "data.order=arrival")["notes"])


def test_a_csv_says_that_it_cannot_show_a_search(lengths: str) -> None:
    search = ("pipeline.policy=pipetune", "backbone.accelerator_type=H200")
    (note,) = (each for each in record_of(QUICKSTART, *search, "--lengths", lengths)["notes"] if "pipetune" in each)
    assert "packed as with 'none'" in note
    assert not any("pipetune" in each for each in record_of(QUICKSTART, "--lengths", lengths)["notes"])


def test_more_rejected_samples_than_a_run_takes_are_said(lengths: str) -> None:
    few = record_of(lengths, "data.max_seq_len=1000")
    assert not any("would end" in note for note in few["notes"])
    many = record_of(lengths, "data.max_seq_len=1000", "data.max_rejected_fraction=0.0002")
    assert (
        "rejected: 1 of 90 samples (1.11%), more than data.max_rejected_fraction (0.02%) allows: a run would end"
        in many["notes"]
    )
    start = record_of(lengths, "data.max_seq_len=300", "--batch", "30", "--steps", "1")
    assert start["rejected"] and not any("would end" in note for note in start["notes"]), "a run judges later"


def test_one_rank_has_nobody_to_wait_for(lengths: str) -> None:
    shown = pack(lengths, "--dp", "1", "--compare")
    assert shown.exit_code == 0 and "try --dp N" in shown.stdout
    rows = [line.split() for line in shown.stdout.splitlines() if line.split()[:1] == ["best_fit_balanced"]]
    assert [row.count("-") for row in rows] == [1, 3] and rows[1][1:] == ["-", "-", "-", "1.000"]
    several = pack(lengths, "--dp", "2", "--compare")
    assert "try --dp N" not in several.stdout
    assert " - " not in several.stdout
    for dp_size, num_panels in ((1, 2), (2, 6)):
        report = flowtrain.pack(lengths, [f"backbone.data_parallel_size={dp_size}"])
        titles = [axes.get_title(loc="left") for axes in draw(report).axes]
        assert len(titles) == 1 + num_panels
        assert any("DistRatio" in title for title in titles) == (dp_size > 1)


def test_nothing_runs_out_of_the_picture(lengths: str, tmp_path: Path) -> None:
    directory = tmp_path / ("W" * 120) / ("m" * 200)
    directory.mkdir(parents=True)
    (directory / "the_last_part.csv").write_text(Path(lengths).read_text())
    for dp_size, ranks in ((1, "over 1 data-parallel rank;"), (4, "over 4 data-parallel ranks;")):
        changes = [f"backbone.data_parallel_size={dp_size}"]
        figure = draw(flowtrain.pack(directory / "the_last_part.csv", changes, compare=True))
        figure.draw_without_rendering()  # lays it out
        assert "…" in figure.get_suptitle() and "the_last_part.csv: 90 rows" in figure.get_suptitle()
        assert ranks in figure.get_suptitle()
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height
        titles = [axes._left_title.get_window_extent() for axes in figure.axes]  # type: ignore[attr-defined]
        assert not any(one.overlaps(other) for one, other in combinations(titles, 2))


def test_words_agree_with_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("num_image_tiles,num_tokens\n1,20\n")
    shown = "".join(pack(str(file), "--dp", "1", "--batch", "1").stdout.split())  # a long path is broken anywhere
    assert "one.csv:1row,shuffled" in shown
    assert "theonlystep,1sampleeach" in shown and "1data-parallelrank," in shown
    file.write_text("num_image_tiles,num_tokens\n1,20\n1,20\n")
    first = pack(str(file), "--dp", "1", "--batch", "1", "--steps", "1").stdout
    assert "the first of 2 steps" in first


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
        (("--plot", "none/figure.png"), 2, "--plot none/figure.png: there is no directory none; create it"),
        (("--steps", "0"), 2, "num_steps (--steps) is 0; it must be at least 1"),
        (("--lengths", "other.csv"), 2, "would replace the data; give one of them"),
        (("scheduler.cost=flops",), 2, "scheduler.cost ('flops') needs the backbone's shape"),
        (("scheduler.cost=profile",), 2, "as no run fits costs to a CSV; give the profile.json"),
        (("scheduler.cost=profile", "data.order=arrival"), 2, "as no run fits costs to a CSV"),
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


def test_a_plot_without_matplotlib_names_the_extra(
    lengths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    picture = tmp_path / "plot.png"
    for command in (["pack", lengths], ["plan", str(QUICKSTART)]):
        result = CliRunner().invoke(app, [*command, "--plot", str(picture)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--plot {picture}: plots need matplotlib" in result.stderr
        assert "pip install 'flowtrain[plot]'" in result.stderr
    assert not picture.exists()


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_packed(lengths: str, tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    result = pack(lengths, "--plot", str(tmp_path / "taken.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("taken.png: no file can be written there; choose another place\n")


def test_a_csv_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("num_image_tiles,num_tokens\n1,x\n")
    result = pack(str(bad))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"flowtrain: lengths {bad}, line 2: num_tokens is 'x'")


def test_without_a_decided_mode_the_configured_microbatches_are_shown() -> None:
    found = flowtrain.pack(QUICKSTART, ["mode=auto"], num_steps=2)
    assert found.steps == flowtrain.pack(QUICKSTART, num_steps=2).steps
