from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowtrain.observability.files import read_json_lines
from flowtrain.observability.quarantine import QuarantineWriter
from flowtrain.types.samples import EVAL_POSITION_BASE, Rejection, RejectReason, SampleRef
from flowtrain.types.sources import SourceIndex


def index_of(*files: str) -> SourceIndex:
    """Files with two blocks of three rows each."""
    numbers = np.zeros(2 * len(files), np.int64)
    block_files = np.repeat(np.arange(len(files), dtype=np.int32), 2)
    return SourceIndex(files, block_files, numbers, numbers, numbers, np.arange(2 * len(files) + 1) * 3)


INDEXES = [index_of("a/1.tar", "a/2.tar"), index_of("b.json", "c.json"), index_of("held/out.parquet", "d.parquet")]


def rejection(position: int, source: int = 0) -> Rejection:
    return Rejection(
        SampleRef(position, source, row=7, epoch=2), RejectReason.CORRUPT_IMAGE, f"schön kaputt {position}"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quarantine.jsonl"


def positions(path: Path) -> list[int]:
    return [record["position"] for record in read_json_lines(path)]


def test_a_line_says_where_the_sample_is_from_and_why_it_is_bad(path: Path) -> None:
    writer = QuarantineWriter(path, ["first", "second", "eval/cats"], INDEXES)
    writer.write(replace(rejection(3, source=1), id="a-17", image=2, path="b/c.jpg"))
    writer.write(rejection(EVAL_POSITION_BASE + 1, source=2))
    train, held_out = map(json.loads, path.read_text().splitlines())
    assert train == {
        "schema": 1,
        "position": 3,
        "source": "second",
        "row": 7,
        "file": "c.json",
        "file_row": 1,
        "epoch": 2,
        "id": "a-17",
        "reason": "corrupt_image",
        "image": 2,
        "path": "b/c.jpg",
        "detail": "schön kaputt 3",
    }
    assert (held_out["source"], held_out["file"], held_out["file_row"]) == ("eval/cats", "d.parquet", 1)
    assert held_out["id"] is held_out["image"] is held_out["path"] is None


def test_a_resume_drops_what_it_will_see_again_whatever_the_order(path: Path) -> None:
    base = EVAL_POSITION_BASE
    writer = QuarantineWriter(path, ["data"], INDEXES)
    for position in (9, 2, base + 5, 12, 4, base + 1):
        writer.write(rejection(position))
    writer.close()
    with path.open("a") as file:
        file.write('{"schema": 1, "posi')

    resumed = QuarantineWriter(path, ["data"], INDEXES)
    assert resumed.keep(lambda position: position < 10 or base <= position < base + 4) == 3
    resumed.write(rejection(10))
    assert positions(path) == [9, 2, 4, base + 1, 10]


def test_a_run_that_starts_again_keeps_nothing(path: Path) -> None:
    writer = QuarantineWriter(path, ["data"], INDEXES)
    for position in (0, 1, 2):
        writer.write(rejection(position))
    assert writer.keep(lambda position: False) == 0
    assert positions(path) == []
