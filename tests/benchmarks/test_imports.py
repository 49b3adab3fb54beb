"""Every benchmark still finds what it uses of FlowTrain; whether its figures are right is not tested."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PEERS = ("trl",)
"""Packages that ``end_to_end.py`` installs for the peers."""


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in PEERS:
            raise
        pytest.skip(f"{error.name} is not installed")
