"""The page of a run: its structure, its policy, and whatever a run may be."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain.errors import ConfigError
from flowtrain.observability.report import gantt
from flowtrain.observability.report.build import MAX_RUNS, ReportOptions, build_report
from flowtrain.observability.report.data_sections import MAX_REJECTED, generated_of
from flowtrain.observability.report.run_data import read_run
from tests.report.parsed import Node, parsed
from tests.report.runs import (
    HOSTILE,
    START_S,
    event,
    picture,
    started,
    step_record,
    write_lines,
    write_run,
    write_trace,
)

NOW = START_S + 1000.0
NO_PICTURES = ReportOptions(thumbnails=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path, num_steps=60)


def page_of(*directories: Path, options: ReportOptions = NO_PICTURES) -> Node:
    """The page, whose rules every page keeps."""
    text = build_report(directories, options, NOW)
    text.encode("utf-8")
    page = parsed(text.removeprefix("<!DOCTYPE html>\n"))
    check_rules(page)
    return page


def check_rules(page: Node) -> None:
    """No script, no request, one policy; unique ids; headings in order; tables, pictures and charts have names."""
    assert not page.all("script") and not page.all("iframe") and not page.all("object")
    for node in page.all():
        for name, value in node.attributes.items():
            assert not name.startswith("on") and name != "style", name
            if name in ("src", "href"):
                assert value is not None and value.startswith(("#", "data:")), value
    (style,) = page.all("style")
    digest = base64.b64encode(hashlib.sha256(style.text.encode()).digest()).decode()
    (policy,) = [m for m in page.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy"]
    content = policy.attributes["content"] or ""
    assert content.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:;")
    assert "unsafe" not in content and "http" not in content and "@import" not in style.text
    assert "url(" not in style.text
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    levels = [int(node.name[1]) for node in page.all() if re.fullmatch("h[1-6]", node.name)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    for table in page.all("table"):
        assert table.all("caption") and all(head.attributes.get("scope") in ("col", "row") for head in table.all("th"))
        assert all(head.text for head in table.all("th")), "a heading without a text"
        widths = {len([cell for cell in row.all() if cell.name in ("th", "td")]) for row in table.all("tr")}
        assert len(widths) == 1, widths
    for drawn in [node for node in page.all("svg") if node.attributes.get("role") == "img"]:
        names = (drawn.attributes["aria-labelledby"] or "").split()
        assert [node.name for node in (page.by_id(name) for name in names)] == ["title", "desc"]
        assert all(page.by_id(name).text for name in names)
    assert all(node.attributes.get("alt") for node in page.all("img"))
    known = set(re.findall(r"\.([a-z][a-z0-9-]*)", style.text))
    used = {name for node in page.all() for name in (node.attributes.get("class") or "").split()}
    assert used <= known | {"running"}, used - known


def headings(page: Node) -> list[str]:
    return [node.text for node in page.all("h2")]


def classes(page: Node, name: str) -> list[str]:
    return [node.text for node in page.all(class_=name)]


def row(page: Node, table: str, first: str) -> list[str]:
    """The cells of a table's row, by its caption and the row's heading."""
    for found in page.all("table"):
        if found.all("caption")[0].text.startswith(table):
            for line in found.all("tr"):
                cells = [cell.text for cell in line.all() if cell.name in ("th", "td")]
                if cells[0] == first:
                    return [cell.replace("\u00a0", " ") for cell in cells[1:]]
    raise AssertionError(f"{table}: {first}")


def test_the_page_of_a_run_that_ended_well(directory: Path) -> None:
    page = page_of(directory)
    assert headings(page) == [
        *("At a glance", "Learning", "Generated samples", "Speed", "Flow of data", "Timeline", "Packing and balance"),
        *("Plan and reality", "Quarantine", "Faults and restarts", "Checkpoints", "Configuration"),
    ]
    assert [link.text for link in page.all("nav")[0].all("a")] == headings(page)
    assert all(page.by_id((link.attributes["href"] or "")[1:]) for link in page.all("a"))
    assert page.all("title")[0].text == "quickstart: FlowTrain report"
    assert page.all("h1")[0].text == "quickstart done"
    assert [figure.text for figure in page.all("h3")][:4] == [
        "Loss",
        "Loss by source",
        "Gradient norm",
        "Learning rate",
    ]
    charts = [node.text for node in page.all("h3") if node.text != "shapes, row 3" and node.text != "shapes, row 7"]
    assert charts[4:] == [
        *("Throughput", "Model FLOPs utilisation", "Step time", "Samples"),
        *("Starved and blocked", "Pool occupancy", "Steps ready ahead", "Reading and planning a step"),
        *("Steps 10 to 12", "Packing fill", "Imbalance"),
    ]
    (lead,) = classes(page, "lead")
    assert "60 of 60 steps" in lead and "mode decoupled" in lead and "2026-11-18 11:06:34 UTC" in lead
    (first,) = classes(page, "first")
    assert first.startswith("The limit is the backbone")
    tiles = dict(zip([n.text for n in page.all("dt", "") if n.text][:10], classes(page, "value"), strict=True))
    assert tiles["Quarantined"] == "0" and tiles["Restarts"] == "0" and tiles["Training loss"]
    assert row(page, "Plan: mode decoupled", "vision") == ["2", "2 x 1 x 1", "0.5", "0", "16.0 MiB"]
    assert row(page, "Checkpoints", "50")[1:3] == ["400 ms", "28.6 MiB"]
    assert "microbatch" not in page.by_id("configuration").text and "seed: 0" in page.by_id("configuration").text


def test_a_caption_with_html_in_it_stays_text(directory: Path) -> None:
    """Wherever a text of data, of a fault or of a configuration is shown."""
    sample = {
        "source": HOSTILE,
        "row": 1,
        "prompt": HOSTILE,
        "reference": HOSTILE,
        "text": HOSTILE,
        "images": [HOSTILE],
    }
    write_lines(
        directory / "events.jsonl",
        [
            started(mode=HOSTILE, device=HOSTILE),
            event("evaluation", 10, 10.0, name=HOSTILE, loss=2.0, generated=[sample, HOSTILE, None]),
            event("evaluation", 20, 20.0, name=HOSTILE, loss=1.0, generated=[sample]),
            event("restart", 12, 12.0, role=HOSTILE, name=HOSTILE, reason=HOSTILE, down_s=1.0),
            event("note", 12, 12.0, level="warning", text=HOSTILE),
            event("checkpoint", 20, 21.0, duration_s=1.0, nbytes=5, best_of=HOSTILE),
            event("run_ended", 60, 61.0, outcome="failed", reason=HOSTILE, duration_s=61.0),
        ],
    )
    rejected = dict.fromkeys(("source", "id", "reason", "path", "detail", "file"), HOSTILE)
    write_lines(directory / "quarantine.jsonl", [{**rejected, "row": 1, "file_row": 1, "image": 1}])
    config = f"name: {json.dumps(HOSTILE)}\nmode: {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)}: 1\n"
    (directory / "config.yaml").write_text(config)
    (directory / "planning.json").write_text(json.dumps({"modes": [{"mode": HOSTILE, "reason": HOSTILE}]}))
    trace = directory / "trace.json"
    trace.write_text(
        trace.read_text().replace('"feeder-0"', json.dumps(HOSTILE)).replace('"size"', json.dumps(HOSTILE))
    )
    metrics = directory / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"openclipart"', json.dumps(HOSTILE)))
    page = page_of(directory)
    for key in (
        "glance",
        "learning",
        "samples",
        "timeline",
        "plan",
        "quarantine",
        "faults",
        "checkpoints",
        "configuration",
    ):
        assert "<script>alert('x')</script>" in page.by_id(key).text, key
    assert HOSTILE.replace("\u202e", "\ufffd") in page.all("title")[0].text
    assert not page.all("img")
    both = page_of(directory, directory)
    assert "<script>" in both.by_id("glance").text and "<script>" in both.by_id("curves").text


def test_a_failed_run_says_why_first(directory: Path) -> None:
    text = "backbone-dp0-pp0-tp0 died"
    restart = event("restart", 30, 30.0, role="encoder", name="encoder-1", reason="killed", down_s=2.5)
    end = event("run_ended", 60, 61.0, outcome="failed", reason=text, duration_s=61.0)
    write_lines(directory / "events.jsonl", [started(), restart, end])
    page = page_of(directory)
    assert classes(page, "first") == [f"The run failed: {text}"]
    assert page.all("h1")[0].text == "quickstart failed"
    assert row(page, "Faults and restarts", "2026-11-18 11:07:10 UTC") == [
        *("30", "restart", "encoder-1: killed; worked again after 2.50 s")
    ]
    marks = page.by_id("loss-chart-title")
    assert marks.text == "Loss" and "encoder-1 restarted" in page.by_id("learning").text


def test_skipped_steps_in_a_row_are_one_fault_with_its_reason(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [step_record(step, rng) for step in range(1, 31)]
    for step in (*range(2, 13), 20, 21, 25):
        records[step - 1].update(skipped=True, spike=step in (20, 25))
    del records[24]["spike"]
    write_lines(tmp_path / "metrics.jsonl", records)
    (tmp_path / "config.yaml").write_text("name: skips\n")
    rows = [[cell.text for cell in line.all("td")] for line in page_of(tmp_path).by_id("faults").all("tr")[1:]]
    assert [cells[-3:] for cells in rows] == [
        ["2-12", "skipped steps", "loss or gradients were not finite; no update"],
        ["20", "skipped step", "the loss was a spike; no update"],
        ["21", "skipped step", "loss or gradients were not finite; no update"],
        ["25", "skipped step", "loss or gradients were not finite or the loss was a spike; no update"],
    ]


def test_a_killed_run_of_an_earlier_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [step_record(step, rng) for step in range(1, 31)]
    records[9]["eval_loss"] = 4.5
    records[19].update(skipped=True, loss=None, skipped_steps=1)
    records[24]["rewound_to"] = 10
    for record in records:
        del record["skipped_steps"], record["fetch_s"]
    write_lines(tmp_path / "metrics.jsonl", records)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "lo')
    (tmp_path / "config.yaml").write_text("name: old\ntraining: {max_steps: 100}\nunknown: {key: 1}\n")
    page = page_of(tmp_path)
    assert page.all("h1")[0].text == "old ended without a word"
    assert "30 of 100 steps" in classes(page, "lead")[0]
    assert "the run is of an earlier version" in page.by_id("glance").text
    command = f"flowtrain train {tmp_path}/config.yaml --resume"
    text = f"there is no checkpoint, so {command} begins anew; steps 1 to 30 are lost"
    assert f"Resume: {text}." in page.by_id("glance").text
    for name in ("step-00000010", "step-00000020"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "meta.json").touch()
    text = f"{command} goes on after step 20; steps 21 to 30 are lost"
    assert f"Resume: {text}." in page_of(tmp_path).by_id("glance").text
    assert "held-out: from 4.50 at step 10" in page.by_id("loss-chart-desc").text
    faults = page.by_id("faults").text
    assert "skipped step" in faults and "weights and optimizer went back to the checkpoint of step 10" in faults
    assert "Timeline" not in headings(page) and "Checkpoints" not in headings(page)


@pytest.mark.parametrize("metrics", [None, "", "rubbish\n"])
def test_a_run_without_a_step(tmp_path: Path, metrics: str | None) -> None:
    (tmp_path / "config.yaml").write_text("name: new\n")
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    page = page_of(tmp_path)
    assert page.all("h1")[0].text == "new no steps"
    assert headings(page) == ["At a glance", "Quarantine", "Faults and restarts", "Configuration"]
    assert "the run has not finished a step" in page.by_id("glance").text
    assert ("line 1 cannot be read" in page.by_id("glance").text) == (metrics == "rubbish\n")
    page_of(tmp_path, tmp_path)


@pytest.mark.parametrize("num_steps", [1, 2, 39, 40, 1000])
def test_a_run_of_any_length_and_a_long_one_stays_small(tmp_path: Path, num_steps: int) -> None:
    directory = write_run(tmp_path, num_steps=num_steps)
    page_of(directory)
    assert len(build_report([directory], NO_PICTURES, NOW)) < 700_000


def test_values_that_are_not_finite_or_constant_have_a_chart_or_none(tmp_path: Path) -> None:
    directory = write_run(tmp_path, num_steps=50)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.update(loss=None, grad_norm=0.0, mfu=None, backbone_mfu=None, lr=1e-300, starved_s=0.0, step_time_s=0.0)
        line.update(tokens_per_s=1e30)
    write_lines(directory / "metrics.jsonl", lines)
    page = page_of(directory)
    shown = [node.text for node in page.all("h3")]
    assert "Model FLOPs utilisation" not in shown and "Gradient norm" in shown and "Throughput" in shown
    assert not re.search(r"\b(nan|inf)\b", page.by_id("learning").text + page.by_id("speed").text)
    assert all("nan" not in str(node.attributes) for node in page.all())


def test_the_quarantine_shows_the_first_samples_with_their_pictures(directory: Path) -> None:
    record = {"source": "shapes", "row": 5, "id": "x-1", "reason": "corrupt_image", "detail": "9 bytes", "image": 1}
    write_lines(directory / "quarantine.jsonl", [record | {"row": number} for number in range(300)])
    asked = []

    def image_of(config: Any, line: Any) -> bytes | None:
        asked.append((config["name"], line["row"]))
        return None

    page = page_of(directory, options=ReportOptions(image_of=image_of))
    assert asked == [("quickstart", number) for number in range(MAX_REJECTED)]
    assert row(page, "Rejected samples by reason", "corrupt_image") == ["300", "100 %"]
    assert row(page, f"The first {MAX_REJECTED} of 300", "shapes, row 7, id x-1") == ["corrupt_image", "9 bytes"]
    asked.clear()
    page_of(directory, options=ReportOptions(thumbnails=False, image_of=image_of))
    assert asked == []


@pytest.mark.processes
def test_pictures_are_those_of_the_run_alone(directory: Path, tmp_path: Path) -> None:
    picture(tmp_path / "secret.png")
    (directory / "link.png").symlink_to(tmp_path / "secret.png")
    names = ["../secret.png", str(tmp_path / "secret.png"), "link.png", "a\x00b"]
    sample = {"source": "s", "row": 1, "prompt": "p", "reference": "r", "text": "t", "images": names}
    inside = sample | {"row": 2, "images": ["generated/x.png"]}
    picture(directory / "generated" / "x.png")
    generated = [sample, inside]
    write_lines(
        directory / "events.jsonl", [started(), event("evaluation", 5, 5.0, name="e", loss=1.0, generated=generated)]
    )
    data = (directory / "generated" / "x.png").read_bytes()
    write_lines(directory / "quarantine.jsonl", [{"source": "s", "row": 1, "reason": "empty_answer"}])
    page = page_of(directory, options=ReportOptions(image_of=lambda config, line: data))
    assert [image.attributes["alt"] for image in page.all("img")] == ["Image 1 of e, row 2", "Image of s, row 1"]
    assert page_of(directory).all("img") == []


def test_generated_texts_of_one_sample_are_together(directory: Path) -> None:
    page = page_of(directory)
    first, second = page.all("article")
    assert first.all("h3")[0].text == "shapes, row 3" and "a red circle" in first.text
    write_lines(
        directory / "events.jsonl",
        [
            event("evaluation", step, float(step), name="e", loss=1.0, generated=[
                {"source": "s", "row": 1, "prompt": "p", "reference": "r", "text": f"text {step}", "images": []}
            ])
            for step in (10, 20, 30)
        ],
    )  # fmt: skip
    (card,) = page_of(directory).all("article")
    assert [node.text for node in card.all("dd")] == ["p", "r", "text 30", "text 20", "text 10"]
    assert second.name == "article"


def test_an_empty_answer_is_named(directory: Path) -> None:
    write_lines(
        directory / "events.jsonl",
        [
            event("evaluation", step, float(step), name="e", loss=1.0, generated=[
                {"source": "s", "row": 1, "prompt": "p", "reference": "r", "text": text, "images": []}
            ])
            for step, text in ((10, ""), (20, "seen"), (30, " \n"))
        ],
    )  # fmt: skip
    (card,) = page_of(directory).all("article")
    assert [node.text for node in card.all("dd")] == ["p", "r", "(empty)", "seen", "(empty)"]


def test_steps_of_the_timeline_that_the_trace_has_not_are_refused(directory: Path) -> None:
    page = page_of(directory, options=ReportOptions((5, 6), thumbnails=False))
    assert page.by_id("gantt-title").text == "Steps 5 to 6"
    with pytest.raises(ConfigError, match=r"steps 90 to 91 \(--steps\) are not in .*trace.json: it has steps 1 to 20"):
        build_report([directory], ReportOptions((90, 91)))
    window = directory / "traces" / "steps-29-32"
    window.mkdir(parents=True)
    write_trace(window / "trace.json", range(29, 33))
    page = page_of(directory, options=ReportOptions((30, 31), thumbnails=False))
    assert page.by_id("gantt-title").text == "Steps 30 to 31"
    assert "flowtrain report RUN --steps 29-32 shows" in page_of(directory).text
    for name in ("steps-41-50", "steps-41-50-2"):  # after a resume, the same steps again
        (window.parent / name).mkdir()
        write_trace(window.parent / name / "trace.json", range(41, 51))
    assert "recorded steps 29-32, 41-50: flowtrain report RUN --steps 41-50" in page_of(directory).text
    (directory / "trace.json").unlink()
    with pytest.raises(ConfigError, match="it has no whole step"):
        build_report([directory], ReportOptions((1, 1)))


def test_only_steps_that_a_window_has_are_advised(directory: Path) -> None:
    for name, steps in (("steps-41-50", range(41, 44)), ("steps-61-61", range(0))):  # the run ended meanwhile
        window = directory / "traces" / name
        window.mkdir(parents=True)
        write_trace(window / "trace.json", steps)
    assert "recorded steps 41-43: flowtrain report RUN --steps 41-43 shows" in page_of(directory).text
    page = page_of(directory, options=ReportOptions((41, 43), thumbnails=False))
    assert page.by_id("gantt-title").text == "Steps 41 to 43"
    shutil.rmtree(directory / "traces" / "steps-41-50")
    assert "flowtrain trace has recorded" not in page_of(directory).text


def test_a_window_that_is_too_large_for_a_page_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, steps in (("steps-29-32", range(29, 33)), ("steps-41-90", range(41, 91))):
        window = directory / "traces" / name
        window.mkdir(parents=True)
        write_trace(window / "trace.json", steps)
    monkeypatch.setattr(gantt, "MAX_TRACE_NBYTES", (directory / "traces/steps-41-90/trace.json").stat().st_size - 1)
    note = "steps-41-90/trace.json has 0 MiB, too much for a page; open it at ui.perfetto.dev"
    text = page_of(directory).text
    shown = "flowtrain report RUN --steps 29-32 shows the last that a page can show"
    assert f"recorded steps 29-32, 41-90: {shown}" in text and note in text
    with pytest.raises(ConfigError, match=rf"steps 50 to 51 \(--steps\) are not in .* it has steps 1 to 20; {note}"):
        build_report([directory], ReportOptions((50, 51)))
    shutil.rmtree(directory / "traces/steps-29-32")
    assert "recorded steps 41-90." in page_of(directory).text


def test_each_window_is_read_once_unless_it_is_drawn(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (21, 31, 41):
        window = directory / "traces" / f"steps-{first}-{first + 2}"
        window.mkdir(parents=True)
        write_trace(window / "trace.json", range(first, first + 3))
    read: list[str] = []

    def noted(path: Path, *rest: Any) -> list[gantt.Work]:
        read.append(path.parent.name)
        return read_trace(path, *rest)

    read_trace = gantt.read_trace
    monkeypatch.setattr("flowtrain.observability.report.build.read_trace", noted)
    page_of(directory, options=ReportOptions((31, 32), thumbnails=False))
    windows = [f"steps-{first}-{first + 2}" for first in (21, 31, 41)]
    assert sorted(read) == sorted([directory.name, *windows, windows[1]])


def test_what_was_planned_is_beside_what_came_out(directory: Path) -> None:
    modes = [{"mode": "decoupled", "tokens_per_s": 2000.0, "of_best": 1.0, "reason": "the fastest", "imbalance": 0.25}]
    planning = {"schema": 3, "tokens_per_s": 2000.0, "rate": 20.0, "modes": modes}
    (directory / "planning.json").write_text(json.dumps(planning))
    page = page_of(directory)
    planned, measured, over = row(page, "Plan and reality", "tokens/s")
    assert planned == "2,000" and measured.startswith("1,6") and over in ("84 %", "85 %")
    assert row(page, "Modes that the planner compared", "decoupled") == ["2.00 k tokens/s", "100 %", "the fastest"]
    plan = directory / "plan.yaml"
    plan.write_text(
        plan.read_text().replace("backbone:\n  data_parallel_size: 1", "backbone:\n  data_parallel_size: 2")
    )
    assert row(page_of(directory), "Plan and reality", "imbalance of ranks")[:2] == ["25 %", "0 %"]


def test_samples_by_source_come_from_the_ledger(directory: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ledger = directory / "ledger.parquet"
    ledger.mkdir()
    rows = {"source": ["shapes"] * 3 + ["openclipart"], "state": ["consumed", "consumed", "rejected", "consumed"]}
    pq.write_table(pa.table(rows), ledger / "part-00000001-00000060.parquet")
    (ledger / "part-00000061-00000070.parquet").write_bytes(b"torn")
    page = page_of(directory)
    assert row(page, "Samples by source", "shapes") == ["2", "67 %", "60 %", "1"]
    assert row(page, "Samples by source", "openclipart") == ["1", "33 %", "40 %", "0"]


def test_runs_side_by_side(tmp_path: Path, directory: Path) -> None:
    other = write_run(tmp_path, "faster", num_steps=80, seed=1, speed=2.0)
    page = page_of(directory, other, directory)
    assert headings(page) == [
        *("At a glance", "Paired differences", "Curves", "Configurations"),
        *("Run quickstart (1)", "Run faster", "Run quickstart (2)"),
    ]
    assert row(page, "Runs side by side", "steps") == ["60", "80", "60"]
    value, steps, difference, interval, plans = row(page, "Paired difference to quickstart (1)", "faster")
    assert (value, steps, plans) == ("training loss", "60", "60 of 60") and " to " in interval and difference
    (table,) = [t for t in page.all("table") if t.all("caption")[0].text.startswith("Paired")]
    better = [[cell.text for cell in line.all()][:3] for line in table.all("tr") if line.all(class_="better")]
    assert ["faster", "step time", "59"] in better and ["faster", "tokens/s", "59"] in better
    same = [cell.text for cell in table.all("tr")[-1].all()]
    assert same[0] == "quickstart (2)" and same[3] == "+0.0\u00a0%" and not table.all("tr")[-1].all(class_="better")
    assert row(page, "Keys that differ", "training.max_steps") == ["60", "80", "60"]


def test_runs_that_have_no_step_in_common(tmp_path: Path, directory: Path) -> None:
    other = tmp_path / "later"
    other.mkdir()
    rng = np.random.default_rng(0)
    write_lines(other / "metrics.jsonl", [step_record(step, rng) for step in range(100, 110)])
    page = page_of(directory, other)
    assert "The runs have no step in common." in page.by_id("differences").text
    assert row(page, "Runs side by side", "steps") == ["60", "109"]


def test_too_many_runs_and_none_are_refused(directory: Path) -> None:
    for count in (0, MAX_RUNS + 1):
        with pytest.raises(ConfigError, match=f"{count} runs: a report shows 1 to {MAX_RUNS} runs"):
            build_report([directory] * count)


def test_pictures_that_a_run_writes_once_stay_with_their_sample(directory: Path) -> None:
    def evaluation(step: int, prompt: str, images: list[str]) -> dict[str, Any]:
        sample = {"source": "s", "row": 1, "prompt": prompt, "reference": "r", "text": f"t{step}", "images": images}
        return event("evaluation", step, float(step), name="e", loss=1.0, generated=[sample])

    events = [evaluation(10, "p", ["x.png"]), evaluation(20, "p", []), evaluation(30, "", [])]
    write_lines(directory / "events.jsonl", events)
    (found,) = generated_of(read_run(directory))
    assert (found.prompt, found.images) == ("p", ("x.png",))
    assert found.texts == ((10, "t10"), (20, "t20"), (30, "t30"))


def test_on_emulated_devices_nothing_is_said_of_learning(tmp_path: Path, directory: Path) -> None:
    """Their losses are 0."""
    emulated = write_run(tmp_path / "emulated", num_steps=30)
    lines = [json.loads(line) for line in (emulated / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.update(emulated="emulated a100", loss=0.0, grad_norm=0.0, source_losses={}, host_s=0.1)
    write_lines(emulated / "metrics.jsonl", lines)
    events = [started(device="emulated a100"), event("evaluation", 20, 20.0, name="e", loss=0.0, generated=[])]
    write_lines(emulated / "events.jsonl", events)
    page = page_of(emulated)
    assert "mode decoupled \u00b7 emulated a100 \u00b7 " in classes(page, "lead")[0]
    assert "Learning" not in headings(page) and {"Speed", "Timeline"} <= set(headings(page))
    assert "loss" not in page.by_id("glance").text.lower()
    both = page_of(emulated, directory)
    assert row(both, "Runs side by side", "training loss, last twentieth")[0] == "\u2013"
    assert next(cells.text for cells in both.by_id("differences").all("td")) == "step time"
