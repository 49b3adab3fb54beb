"""docs/architecture.md's table of what happens when something dies: that of ``deaths.py``, shown by tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flowtrain.controller.local_ray import SHUTDOWN_LIMIT_S
from flowtrain.controller.state import MIN_SAMPLES_TO_JUDGE
from tests.deaths import DEATHS, Death, rendered

ROOT = Path(__file__).parents[1]
HEADING = "## When something dies\n"


def found_in(file: Path) -> dict[str, bool]:
    """Names of a file's tests, and whether ``nightly`` marks them or the whole file."""
    tree = ast.parse(file.read_text())
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    all_nightly = any("mark.nightly" in ast.unparse(mark) for mark in marks)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {
        test.name: all_nightly or any(ast.unparse(mark) == "pytest.mark.nightly" for mark in test.decorator_list)
        for test in found
    }


def test_the_table_is_that_of_the_records() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split(HEADING)[1]
    table = re.search(r"(^\|.*\n)+", section, re.MULTILINE)
    assert table is not None and table[0] == rendered(), (
        f"docs/architecture.md, {HEADING.strip()}, differs from tests/deaths.py, which renders to:\n{rendered()}"
    )


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.what)
def test_a_row_has_tests_that_exist_of_which_one_always_runs(death: Death) -> None:
    is_nightly = {}
    for node_id in death.tests:
        path, _, name = node_id.partition("::")
        there = found_in(ROOT / path) if (ROOT / path).is_file() else {}
        assert name in there, f"{node_id} shows what happens to {death.what}, but there is no such test"
        is_nightly[node_id] = there[name]
    assert not all(is_nightly.values()), f"{death.what}: the default suite has none of {death.tests}"


def test_no_row_is_there_twice_and_none_names_a_test_twice() -> None:
    assert len({death.what for death in DEATHS}) == len(DEATHS)
    assert all(len(set(death.tests)) == len(death.tests) for death in DEATHS)


def test_numbers_in_rows_are_those_of_the_code() -> None:
    text = rendered()
    assert f"After {SHUTDOWN_LIMIT_S:g} s a warning names the raylet" in text
    assert f"({MIN_SAMPLES_TO_JUDGE} at least)" in text
