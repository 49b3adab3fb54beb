"""What pyproject.toml promises: bounds that the tested versions meet, and extras that messages may name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TESTED = {
    name.lower(): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


def requirement(name: str) -> Requirement:
    every = [Requirement(text) for text in [*PROJECT["dependencies"], *(text for e in EXTRAS.values() for text in e)]]
    return next(each for each in every if each.name == name)


@pytest.mark.parametrize("name", ["torch", "transformers", "ray", "nixl-cu12", "nixl-cu13"])
def test_the_tested_release_is_the_newest_minor_that_is_allowed(name: str) -> None:
    tested = TESTED["nixl-cu12" if name == "nixl-cu13" else name]
    allowed = requirement(name).specifier
    assert tested in allowed
    assert Version(f"{tested.major}.{tested.minor + 1}") not in allowed


def test_only_its_own_extra_needs_flash_attn_and_only_plots_need_matplotlib() -> None:
    plain = [Requirement(text).name for text in PROJECT["dependencies"]]
    assert "flash-attn" not in plain and "matplotlib" not in plain
    by_extra = {extra: {Requirement(text).name for text in texts} for extra, texts in EXTRAS.items()}
    assert [extra for extra, names in by_extra.items() if "flash-attn" in names] == ["flash-attn"]
    assert [extra for extra, names in by_extra.items() if "matplotlib" in names] == ["plot"]
    (own,) = (Requirement(text) for text in EXTRAS["dev"] if text.startswith("flowtrain["))
    assert own.extras == {"gurobi", "nixl-cu12", "plot", "s3", "tensorboard"}


def test_every_extra_that_a_message_or_a_page_names_is_there() -> None:
    files = [*(ROOT / "flowtrain").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {
        name
        for file in files
        for name in re.findall(r"pip install [^\n]*'(?:flowtrain|\.)\[([\w-]+)\]", file.read_text())
    }
    assert {"nixl-cu12", "nixl-cu13", "flash-attn", "plot"} <= named <= set(EXTRAS)
