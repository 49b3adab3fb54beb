"""What the documentation names is there: links, keys, commands, files, tables; what it shows to be run works."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from PIL import Image

import flowtrain
from flowtrain.allocator.model_file import read_model_file
from flowtrain.cli.app import app
from flowtrain.config.data import SourceConfig
from flowtrain.config.flow import LimitsConfig
from flowtrain.config.load import load_config, plain_values
from flowtrain.config.overrides import apply_overrides
from flowtrain.config.run import RunConfig
from flowtrain.config.schema import ANY, key_patterns
from flowtrain.config.yaml_text import dump_yaml, parse_yaml
from flowtrain.controller.planning.planned import is_model_file, planned_model
from flowtrain.data.sources.base import Record
from flowtrain.data.sources.registry import index_source, open_source
from flowtrain.observability.event_file import NAMES, NOT_WRITTEN
from flowtrain.types.metrics import StepMetrics
from flowtrain.types.run_events import GeneratedSample, RunEvent
from flowtrain.types.samples import RejectReason

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fenced(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Words of every line of an indented block, comments left out and continued lines joined."""
    for line in re.sub(r"\\\n\s+", " ", prose(page)).splitlines():
        if line.startswith("    "):
            try:
                yield shlex.split(line.replace("$PWD/", ""), comments=True)
            except ValueError:  # a drawing or an output, not a command
                continue


def anchors(page: Path) -> set[str]:
    """The anchors that headings get."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the tables below a heading, up to the next one; headers and rules left out."""
    section = re.split(rf"^#+ {re.escape(heading)}$", page.read_text(), flags=re.MULTILINE)[1]
    lines = re.split(r"^#+ ", section, flags=re.MULTILINE)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for index, row in enumerate(rows) if not _is_rule(row) and not _is_rule(rows[(index + 1) % len(rows)])]


def _is_rule(row: list[str]) -> bool:
    return all(re.fullmatch(r"-+", cell) for cell in row)


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for target in targets:
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@every_page
def test_configuration_blocks_load(page: Path, tmp_path: Path) -> None:
    for text in fenced(page, "yaml"):
        fragment, _ = parse_yaml(text)
        if "workload" in fragment:
            model = parse_yaml((ROOT / "configs" / "models" / "vlm_6b.yaml").read_text())[0]
            file = tmp_path / "model.yaml"
            file.write_text(dump_yaml({**model, **fragment}))
            read_model_file(file)
            continue
        values = plain_values(load_config(QUICKSTART))
        _merge(values, fragment)
        if fragment.get("model", {}).get("path"):  # a whole checkpoint, in the place of the modules
            for module in (*values["encoders"].values(), values["backbone"]):
                module.update(path=None, config=None)
        if "family" in fragment.get("model", {}):  # its features are other ones than the quickstart's
            for encoder in values["encoders"].values():
                del encoder["feature_layer"]
        RunConfig.model_validate(values)


def _merge(values: dict[str, Any], fragment: dict[str, Any]) -> None:
    """Put a fragment over a whole configuration; alternatives replace each other."""
    for one, other in (("path", "config"), ("num_epochs", "max_steps")):
        if one in fragment and other in values:
            values[other] = None
    for key, value in fragment.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict) and key != "eval":  # one set, or several
            _merge(values[key], value)
        else:
            values[key] = value


@every_page
def test_keys_in_the_text_are_keys_of_the_configuration(page: Path) -> None:
    sections = set(RunConfig.model_fields)
    for text in code(prose(page)):
        found = re.fullmatch(r"([a-z_]+(?:\.(?:[a-z_]+|\*|<name>))+)(?:[:=].*)?", text)
        path = found[1].replace("<name>", ANY).split(".") if found else []
        if path and path[0] in sections and not text.endswith((".yaml", ".py")):
            assert tuple(path) in key_patterns() or (path[-1] == ANY and path[0] in sections), text


@every_page
def test_commands_and_their_options_exist(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in shell_lines(page):
        if "flowtrain" not in words[:-1] or "CONFIG" in words:
            continue
        command, *arguments = words[words.index("flowtrain") + 1 :]
        assert command in commands, words
        found = commands[command]
        while hasattr(found, "commands"):  # a group of commands
            command, *arguments = arguments
            assert command in found.commands, words
            found = found.commands[command]
        parameters = found.params
        known = {option for parameter in parameters for option in parameter.opts}
        valued = {
            option for parameter in parameters if not getattr(parameter, "is_flag", True) for option in parameter.opts
        }
        assert {word for word in arguments if word.startswith("--")} <= known, words
        files = [word for word in arguments if word.endswith(".yaml")]
        before = dict(zip(arguments[1:], arguments, strict=False))
        overrides = [word for word in arguments if "=" in word and before.get(word) not in valued]
        if files and command in ("plan", "simulate") and is_model_file(ROOT / files[0]):
            planned_model(ROOT / files[0], overrides)
        elif files:
            values = plain_values(load_config(ROOT / files[0], check_paths=False))
            apply_overrides(values, overrides)
            RunConfig.model_validate(values)


@every_page
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^    make ([\w-]+)|`make ([\w-]+)", page.read_text(), re.MULTILINE)
    assert {one or other for one, other in named} <= set(targets)


@every_page
def test_files_in_the_text_exist(page: Path) -> None:
    for name in code(prose(page)):
        if re.fullmatch(r"[\w.]+(/[\w.]+)+\.(py|toml|yaml|jinja|md)|\w+(/\w+)*/", name) and "runs/" not in name:
            places = (ROOT / name, ROOT / "flowtrain" / name)
            assert any(place.exists() for place in places) or name in (
                "export/",
                "generated/",
                "ledger.parquet/",
                "stacks/",
            ), name


@every_page
def test_python_is_valid(page: Path) -> None:
    for text in fenced(page, "python"):
        ast.parse(text)


def test_the_data_formats_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 3)).save("cat.png")

    def records(name: str) -> Sequence[Record]:
        config = SourceConfig(path=name)
        return open_source(config, index_source(config)).read_block(0)

    page = ROOT / "docs" / "data.md"
    exec(fenced(page, "python")[0], {})
    assert [len(record.sample().turns) for record in records("mine.parquet")] == [4, 2]
    (tmp_path / "llava.json").write_text(fenced(page, "json")[0])
    assert [len(record.sample().images) for record in records("llava.json")] == [1, 2, 0]


def test_tables_name_what_there_is() -> None:
    running, data = ROOT / "docs" / "running.md", ROOT / "docs" / "data.md"
    documented = {name for row in table_rows(running, "What a run writes") for name in code(row[0])}
    metrics = {field.name for field in dataclasses.fields(StepMetrics)} - {"schema"}
    assert metrics <= documented
    assert {name for name in documented if re.fullmatch(r"[a-z_]+", name)} <= metrics
    limits = {
        code(row[0])[0]: None if row[1] in ("by size", "none") else float(row[1])
        for row in table_rows(running, "Limits")
    }
    assert limits == LimitsConfig().model_dump()
    reasons = {code(row[0])[0] for row in table_rows(data, "What is rejected")}
    assert reasons == {reason.value for reason in RejectReason}


def test_the_table_of_events_names_what_is_written() -> None:
    classes = (*get_args(RunEvent), GeneratedSample)
    written = {field.name for each in classes for field in dataclasses.fields(each)} - NOT_WRITTEN
    rows = table_rows(ROOT / "docs" / "trackers.md", "events.jsonl")
    assert [code(row[0])[0] for row in rows] == list(NAMES.values())
    named = {name for row in rows for name in code(row[1])} | {"step", "timestamp"}
    values = {"info", "warning", "done", "stopped", "failed"}
    assert written - {"metrics"} == named - values


def test_the_table_of_packs_json_names_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("num_image_tiles,num_tokens\n" + "1,20\n" * 8)
    record = flowtrain.pack(file, ["training.global_batch_size=8"]).as_record()
    documented = [name for row in table_rows(ROOT / "docs" / "scheduling.md", "JSON") for name in code(row[0])]
    assert sorted(documented) == sorted([*record, *record["methods"][0]])
    cells = {name: code(row[1]) for row in table_rows(ROOT / "docs" / "scheduling.md", "JSON") for name in code(row[0])}
    assert set(record["settings"]) <= set(cells["settings"]) and set(record["steps"][0]) <= set(cells["steps"])


def test_the_picture_is_well_formed() -> None:
    ElementTree.parse(ROOT / "docs" / "architecture.svg")


def test_the_readme_names_the_command_that_ci_runs() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "    make test " in (ROOT / "README.md").read_text()
