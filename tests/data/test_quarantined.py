"""Images of quarantined rows, read again for a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowtrain.data import quarantined
from flowtrain.data.quarantined import QuarantinedImages

TURNS = [{"user": "<image><image>?", "assistant": "two"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"images": [{"bytes": b"%d-%d" % (row, image)} for image in range(2)], "texts": TURNS} for row in range(6)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def config_of(path: Path, **changes: Any) -> dict[str, Any]:
    return {"data": {"sources": [{"name": "one", "path": str(path), "format": "auto", **changes}], "eval": None}}


def line(file: Path, row: int, image: int | None = None, source: str = "one") -> dict[str, Any]:
    return {"source": source, "row": 100 + row, "file": str(file), "file_row": row, "image": image}


def test_the_image_at_fault_or_the_first_one(file: Path) -> None:
    images, config = QuarantinedImages(), config_of(file.parent)
    assert images.image_of(config, line(file, 3, 2)) == b"3-1"
    assert images.image_of(config, line(file, 3)) == b"3-0"
    assert images.image_of(config, line(file, 5, 9)) == b"5-0"
    assert images.image_of({}, line(file, 0)) == b"0-0", "a configuration of another version"


def test_columns_and_roots_are_those_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(b"cat")
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a cat"}]
    file = tmp_path / "rows" / "llava.json"
    file.parent.mkdir()
    file.write_text(json.dumps([{"image": "cat.png", "conversations": turns}]))
    images = QuarantinedImages()
    rooted = config_of(file, image_root=str(tmp_path / "pictures"))
    assert images.image_of(rooted, line(file, 0)) == b"cat"
    assert images.image_of(config_of(file), line(file, 0)) is None, "there is no such file beside the JSON"
    held_out = {"data": {"sources": [], "eval": rooted["data"]["sources"][0]}}
    assert images.image_of(held_out, line(file, 0, source="eval")) == b"cat"
    several = {"data": {"sources": [], "eval": {"cats": rooted["data"]["sources"][0]}}}
    assert images.image_of(several, line(file, 0, source="eval/cats")) == b"cat"


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "s3://bucket/a.parquet"},
        {"file": "/absent/a.parquet"},
        {"file": 7},
        {"file_row": 99},
        {"file_row": "3"},
        {"file_row": -1},
    ],
)
def test_what_cannot_be_read_has_no_image(file: Path, changes: dict[str, Any]) -> None:
    assert QuarantinedImages().image_of(config_of(file), line(file, 0) | changes) is None


def test_damaged_files_and_odd_configurations_have_no_image(file: Path) -> None:
    assert QuarantinedImages().image_of(config_of(file, format="nonsense"), line(file, 0)) is None
    assert QuarantinedImages().image_of({"data": {"sources": 3, "eval": [1]}}, line(file, 0, source="x")) is not None
    file.write_bytes(file.read_bytes()[:-30])
    assert QuarantinedImages().image_of(config_of(file), line(file, 0)) is None


def test_neither_large_blocks_nor_much_time_are_spent(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantined, "MAX_BLOCK_NBYTES", 1)
    assert QuarantinedImages().image_of(config_of(file), line(file, 0)) is None
    monkeypatch.undo()
    monkeypatch.setattr(quarantined, "BUDGET_S", -1.0)
    assert QuarantinedImages().image_of(config_of(file), line(file, 0)) is None
