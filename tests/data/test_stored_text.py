"""What people are shown of a row that is no sample, in each format."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flowtrain.config.data import SourceConfig
from flowtrain.data.sources.base import Record
from flowtrain.data.sources.registry import index_source, open_source


def record_of(path: Path) -> Record:
    config = SourceConfig(path=str(path))
    return open_source(config, index_source(config)).read_block(0)[0]


def test_parquet_shows_what_it_can_of_each_column(tmp_path: Path) -> None:
    no_text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe")]
    )
    images = pa.array([[{"bytes": b"12345", "path": None}, None, {"bytes": None, "path": "a.png"}]])
    pq.write_table(pa.table({"images": images, "messages": no_text, "id": ["cat-1"]}), tmp_path / "a.parquet")
    stored = json.loads(record_of(tmp_path / "a.parquet").stored_text())
    assert stored["images"] == [
        {"bytes": "5 bytes", "path": None},
        {"bytes": None, "path": None},
        {"bytes": None, "path": "a.png"},
    ]
    assert stored["messages"].startswith("cannot be read: ") and stored["id"] == "cat-1"


def test_a_tar_shows_its_members_and_their_text(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("1.json", b'{"a": [\xff'), ("1.jpg", bytes(7)), ("1.txt", "é".encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert record_of(tmp_path / "a.tar").stored_text() == '1.json: {"a": [\\xff\n1.jpg: 7 bytes\n1.txt: é'


def test_json_that_is_none_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": \xff}\n')
    assert record_of(tmp_path / "a.jsonl").stored_text() == '{"a": \\xff}'
