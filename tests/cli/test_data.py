"""``flowtrain data``: what it prints, its exit codes, and that no text from data can steer the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from flowtrain.cli.app import app
from flowtrain.cli.plain_text import one_line, plain, short_paths
from flowtrain.cli.work_progress import work_progress
from flowtrain.config.load import dump_resolved
from tests.e2e.worlds import World, tiny_config

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
NUM_GOOD = 70
ESCAPES = "\x1b[31mred\x1b]0;title\x07 [bold]big[/bold] [/] \u202eback\x9b2J\r \ud800 \u27e6fake\u27e7"


def data(*arguments: str, columns: int = 100) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["data", *arguments])


def record_of(*arguments: str) -> dict[str, Any]:
    result = data(*arguments, "--json")
    assert result.stderr == ""
    record = json.loads(result.stdout)
    assert isinstance(record, dict)
    return record


@pytest.fixture
def world() -> World:
    world = World(seed=2)
    world.add_mixed(NUM_GOOD)
    return world


def written(tmp_path: Path, world: World, *overrides: str, **sections: Any) -> str:
    config = tiny_config(tmp_path, world.write(tmp_path / "rows.parquet"), "tiny", *overrides, **sections)
    path = tmp_path / "config.yaml"
    path.write_text(dump_resolved(config))
    return str(path)


def add_bad(world: World) -> None:
    """Rows 70 to 73: two with an empty answer, one corrupt image, one that is row 0 again."""
    world.add(0, answer=" ")
    world.add(0, answer="")
    world.add(2, images=[world.image(), b"broken"])
    world.rows.append(world.rows[0])


# --- check ------------------------------------------------------------------------------------------------------


def test_a_check_shows_sizes_rejections_duplicates_and_the_verdict(tmp_path: Path, world: World) -> None:
    add_bad(world)
    config = written(tmp_path, world)
    result = data("check", config, "--workers", "1", "--rejected", str(tmp_path / "bad.jsonl"))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for expected in (
        "empty_answer 2 ",
        "row 70: assistant turn 2 of 2 is blank",
        "corrupt_image 1 ",
        "image 2 of 2",
        "4.05% of the training samples; data.max_rejected_fraction (50%) allows it",
        "1 training rows have the turns and images of an earlier one",
        "rows.parquet 0, ",
        "--decode also finds those that cannot be decoded",
        "a run would go through",
    ):
        assert expected in text, expected
    assert "…" not in result.stdout, "a table is cut"
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 3


def test_exit_codes_of_a_check(tmp_path: Path, world: World) -> None:
    add_bad(world)
    config = written(tmp_path, world, "training.max_steps=20")
    refused = data("check", config, "--workers", "1", "data.max_rejected_fraction=0.01")
    assert refused.exit_code == 1
    text = " ".join(refused.stdout.split())  # tables wrap long lines
    assert "the run would end" in text and "a run would not go through" in text
    strict = data("check", config, "--workers", "1", "data.max_rejected_fraction=0.0002")
    assert "data.max_rejected_fraction (0.02%)" in " ".join(strict.stdout.split())
    record = json.loads(data("check", config, "--workers", "1", "--json", "data.max_rejected_fraction=0.01").stdout)
    assert (record["passes"], record["rejected"]["would_end"]) == (False, True)
    wrong = data("check", config, "data.max_seq_le=3")
    assert wrong.exit_code == 2 and "did you mean data.max_seq_len" in wrong.stderr
    for option, file in (("--sizes", "sizes.txt"), ("--rejected", "none/bad.jsonl")):
        assert data("check", config, option, str(tmp_path / file)).exit_code == 2
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 is not enough")
    damaged = data("check", config)
    assert damaged.exit_code == 1 and "rows.parquet" in damaged.stderr


def test_files_of_rejected_rows_are_shown_where_there_are_several(tmp_path: Path, world: World) -> None:
    add_bad(world)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a", "b"):
        world.write(folder / f"{name}.parquet")
    config = written(tmp_path, world, data={"sources": [{"path": str(folder), "name": "two files"}]})
    text = " ".join(data("check", config, "--workers", "1").stdout.split())
    assert "two files row 72, a.parquet row 72: image 2 of 2" in text
    assert "two files row 146, b.parquet row 72: image 2 of 2" in text
    (sample,) = record_of("show", config, "--row", "146")["samples"]
    assert (sample["file"], sample["file_row"]) == (str(folder / "b.parquet"), 72)
    assert "b.parquet row 72; block 9," in data("show", config, "--row", "146", columns=300).stdout


def test_long_paths_do_not_break_tables(tmp_path: Path, world: World) -> None:
    add_bad(world)
    folder = tmp_path / "a_rather_long_folder_name" / "and_another_one"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        world.write(folder / name / "train.parquet")
    sources = [{"path": str(folder / name)} for name in ("one", "two")]
    config = written(tmp_path, world, data={"sources": sources})
    lines = data("check", config, "--workers", "1", columns=80).stdout.splitlines()
    for name in (".../one", ".../two"):
        assert sum(line.startswith(f" {name} ") for line in lines) == 1
        assert sum(line.startswith(f" {name}: ") for line in lines) == 3, "a line for each spread"
    record = record_of("check", config, "--workers", "1")
    assert [source["name"] for source in record["sources"]] == [source["path"] for source in sources]


def test_short_paths_can_be_told_apart() -> None:
    long = "/data/of/somebody"
    assert short_paths([f"{long}/cats/train", "short/cats/train", "eval"], 16) == [
        ".../cats/train",
        "short/cats/train",
        "eval",
    ]
    assert short_paths([f"{long}/cats/{'x' * 30}"], 16) == [f".../{'x' * 30}"]
    assert short_paths([f"{long}/a/train/data/", f"{long}/b/train/data/"], 16) == [
        ".../a/train/data",
        ".../b/train/data",
    ]
    assert short_paths([f"{long}/a/b/many/files", f"{long}/b/b/many/files"], 14) == [
        ".../a/b/many/files",
        ".../b/b/many/files",
    ]
    assert short_paths([f"{long}/a"] * 2, 10) == [".../a"] * 2, "nothing tells them apart"


def test_json_has_every_rejected_row(tmp_path: Path, world: World) -> None:
    for _ in range(9):
        world.add(0, answer="")
    record = record_of("check", written(tmp_path, world), "--workers", "1")
    assert record["schema"] == 1 and record["passes"] and not record["decoded"]
    rejected = record["rejected"]
    assert (rejected["count"], rejected["by_reason"]) == (9, {"empty_answer": 9})
    assert [row["row"] for row in rejected["rows"]] == list(range(NUM_GOOD, NUM_GOOD + 9))
    (source,) = record["sources"]
    assert source["num_rows"] == NUM_GOOD + 9 and source["num_blocks"] == 5
    assert source["tokens"]["p50"] <= source["tokens"]["p95"] <= source["tokens"]["max"] <= 128


def test_the_quickstarts_data_are_good_and_ray_is_not_needed(tmp_path: Path) -> None:
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('RAY' if 'ray' in sys.modules else 'NO RAY'))\n"
        "from flowtrain.cli.app import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "data", "check", str(QUICKSTART), "--workers", "1", "--decode"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a run would go through" in done.stdout and done.stdout.endswith("NO RAY\n")


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with work_progress(plain_lines=True, clock=lambda: now) as progress:
        for done in range(1, 8):
            now += 2.0
            progress("checking rows", 1000 * done, 7000)
    assert capsys.readouterr().err == "checking rows: 3,000 of 7,000\nchecking rows: 6,000 of 7,000\n"


# --- show -------------------------------------------------------------------------------------------------------


def test_a_sample_is_shown_as_the_model_gets_it(tmp_path: Path, world: World) -> None:
    world.add(2, answer="two pictures")
    result = data("show", written(tmp_path, world), "--row", str(NUM_GOOD))
    assert result.exit_code == 0, result.output
    facts = " ".join(result.stdout.split())  # tables wrap long lines
    assert f"row {NUM_GOOD}" in facts and "block 4, its row 6" in facts
    assert "<|im_start|>assistant\n⟦two pictures<|im_end|>⟧\n" in result.stdout
    assert "<image>*4<image>*4\n" in result.stdout
    assert "to the tower 3x28x28" in result.stdout
    record = record_of("show", written(tmp_path, world), "--row", str(NUM_GOOD), "--row", "1")
    both, text_only = record["samples"]
    segments = both["segments"]
    assert sum(segment["num_tokens"] for segment in segments) == both["num_tokens"]
    assert sum(each["num_tokens"] for each in segments if each["bears_loss"]) == both["num_target_tokens"]
    assert [each["num_tokens"] for each in segments if each["is_image"]] == [4, 4]
    assert "".join(each["text"] for each in segments if each["bears_loss"]) == "two pictures<|im_end|>"
    assert [turn["role"] for turn in both["turns"]] == ["user", "assistant"] and text_only["images"] == []


def test_a_quarantined_row_is_shown_with_its_reason(tmp_path: Path, world: World) -> None:
    add_bad(world)
    world.add(1, images=[world.truncated_image()])
    config = written(tmp_path, world)
    result = data("show", config, "--row", "72")
    assert result.exit_code == 0
    assert "quarantined" in result.stdout and "corrupt_image: image 2 of 2" in result.stdout
    assert "image 1" in result.stdout and "turn 1, user" in result.stdout
    assert result.stdout.count("no known image format") == 1 and "image 2 6 B, at fault turn 1" in " ".join(
        result.stdout.split()
    )
    (late,) = record_of("show", config, "--row", "74")["samples"]
    assert late["reason"] == "corrupt_image" and late["segments"] == [] and late["images"][0]["nbytes"] > 0


def test_a_row_that_is_no_sample_is_shown_as_it_is_stored(tmp_path: Path, world: World) -> None:
    world.add(1, answer="the answer")
    world.rows[-1]["texts"][0]["user"] = f"<image> and <image>{ESCAPES[:4]}"
    image_nbytes = len(world.rows[-1]["images"][0]["bytes"])
    lines = [
        '{"conversations": [{"from": "nobody", "value": "who"}]}',
        f'{{"conversations": "none", "more": {json.dumps(["x" * 900] * 90)}}}',
        '{"conversations": \x1b broken',
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines))
    parquet = data("show", written(tmp_path, world), "--row", str(NUM_GOOD))
    assert parquet.exit_code == 0, parquet.output
    for expected in (
        "placeholder_mismatch: 1 images but 2",
        f'"bytes": "{image_nbytes} bytes"',
        '"user": "<image> and <image>\\u001b[31"',
        '"assistant": "the answer"',
    ):
        assert expected in parquet.stdout, expected
    config = written(tmp_path, world, data={"sources": [{"path": str(rows)}]})
    roles, long, broken = (data("show", config, "--row", str(row)).stdout for row in range(3))
    assert '"from": "nobody"' in roles
    assert long.endswith("...\n") and long.count("xxx...\n") == 37, "cut to 40 lines, and each line"
    assert broken.endswith('as it is stored\n{"conversations": \\x1b broken\n')
    (sample,) = record_of("show", config, "--row", "0")["samples"]
    assert json.loads(sample["stored"]) == json.loads(lines[0]) and sample["turns"] == []


def test_text_cut_is_shown(tmp_path: Path, world: World) -> None:
    world.add(0, answer="long words " * 200)
    config = written(tmp_path, world, data={"oversized": "truncate_text"})
    (sample,) = record_of("show", config, "--row", str(NUM_GOOD))["samples"]
    assert sample["num_tokens"] == 128 and sample["num_cut"] > 100
    assert "cut from its end" in " ".join(data("show", config, "--row", str(NUM_GOOD)).stdout.split())


def test_images_are_saved_as_decoded_and_as_the_tower_gets_them(tmp_path: Path) -> None:
    world, folder = World(), tmp_path / "images"
    grey = tmp_path / "grey.png"
    Image.new("RGB", (60, 40), (10, 200, 90)).save(grey)
    world.add(1, images=[grey.read_bytes()])
    assert data("show", written(tmp_path, world), "--row", "0", "--save-images", str(folder)).exit_code == 0
    decoded, tower = (Image.open(path) for path in sorted(folder.iterdir()))
    assert (decoded.size, decoded.getpixel((0, 0))) == ((60, 40), (10, 200, 90))
    assert tower.size == (28, 28)
    assert np.abs(np.asarray(tower).astype(int) - (10, 200, 90)).max() <= 1


def test_sources_rows_and_the_evaluation_are_found_or_refused(tmp_path: Path, world: World) -> None:
    other, held_out = World(seed=8), World(seed=9)
    other.add_mixed(5)
    held_out.add(0, answer="held out")
    sources = [
        {"path": str(each.write(tmp_path / f"{name}.parquet")), "name": name}
        for name, each in (("a", world), ("b", other))
    ]
    evaluation = {"path": str(held_out.write(tmp_path / "e.parquet"))}
    config = written(tmp_path, world, data={"sources": sources, "eval": evaluation})
    for named in ("b", "1"):
        (sample,) = record_of("show", config, "--row", "4", "--source", named)["samples"]
        assert (sample["source"], Path(sample["file"]).name) == ("b", "b.parquet")
    (sample,) = record_of("show", config, "--row", "0", "--eval")["samples"]
    assert sample["source"] == "eval" and sample["turns"][1]["text"] == "held out"
    for arguments, message in (
        (["--row", "0"], "data.sources has 2 sources; give one with --source: a, b"),
        (["--row", "5", "--source", "b"], "--row 5: source b has rows 0 to 4"),
        (["--row", "0", "--source", "c"], "--source c: there is no such source in data.sources, but a, b"),
        (["--row", "0", "--source", "a", "--eval"], "--source a: there is no such source in data.eval, but eval"),
    ):
        refused = data("show", config, *arguments)
        assert refused.exit_code == 2 and message in refused.stderr, refused.stderr
    assert data("show", config).exit_code == 2, "--row is needed"


# --- injection --------------------------------------------------------------------------------------------------


def test_texts_of_others_cannot_steer_the_terminal(tmp_path: Path, world: World) -> None:
    hostile = ESCAPES.replace("\ud800", "")  # parquet has no lone surrogates
    world.add(0, answer=hostile)
    world.rows[0]["texts"][0]["user"] = hostile
    world.add(1, images=[{"bytes": None, "path": hostile}])  # type: ignore[list-item]
    world.rows[-1]["images"] = [{"bytes": None, "path": f"gone{hostile}.png"}]
    config = written(tmp_path, world, data={"sources": [{"path": str(tmp_path / "rows.parquet"), "name": hostile}]})
    shown = data("show", config, "--row", "0", "--row", str(NUM_GOOD), "--row", str(NUM_GOOD + 1)).stdout
    checked = data("check", config, "--workers", "1").stdout
    assert "missing_image" in shown and "missing_image" in checked
    for output in (shown, checked):
        assert not any(ord(letter) < 32 and letter != "\n" for letter in output)
        assert not set(output) & set("\x7f\x9b\u202e")
        assert "[bold]big[/bold]" in output.replace("\n", "")
        assert "\\x1b[31mred" in output.replace("\n", "")
    # A text cannot pretend to bear loss.
    assert "\\u27e6fake\\u27e7" in shown


def test_what_is_escaped_can_be_printed_in_any_encoding() -> None:
    escaped = plain(ESCAPES)
    assert escaped.isprintable() and "\\ud800" in escaped and "[bold]big[/bold]" in escaped
    assert plain("line\nnext\ttab") == "line\nnext\ttab"
    assert plain("猫 é 👩‍🚀") == "猫 é 👩‍🚀"
    assert plain("猫", "ascii") == "\\u732b"
    assert one_line("a\nb" + "c" * 90, 20) == "a\\nbccccccccccccc..."
    assert len(one_line("\x1b" * 90, 20)) == 20


def test_colours_mark_the_loss_on_a_terminal(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowtrain.cli import data_show

    world.add(0, answer="coloured answer")
    monkeypatch.setattr(
        data_show, "Console", lambda **options: Console(**options, force_terminal=True, color_system="standard")
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = data("show", written(tmp_path, world), "--row", str(NUM_GOOD)).stdout
    assert "\x1b[1;32mcoloured answer<|im_end|>\x1b[0m" in output and "⟦" not in output
