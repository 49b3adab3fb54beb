from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowtrain.data.sources.base import BadSample, RawImage, Turn
from flowtrain.data.sources.block_cache import BlockCache
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError, SourceReadError
from flowtrain.types.samples import RejectReason, SampleRef

Write = Callable[..., Path]
Open = Callable[..., Any]
TEXTS = [{"user": "q", "assistant": "a"}]


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"images": [{"bytes": f"image {i}".encode(), "path": None}], "texts": [{"user": f"q{i}", "assistant": f"a{i}"}]}
        for i in range(start, start + count)
    ]


def assert_numbered(source: Any, row: int) -> None:
    sample = source.read(row)
    assert sample.images == (RawImage(data=f"image {row}".encode()),)
    assert sample.turns == (Turn("user", f"<image>\nq{row}"), Turn("assistant", f"a{row}"))


def test_rows_of_a_directory_in_any_order(tmp_path: Path, open_rows: Open, write_parquet: Write) -> None:
    (tmp_path / "sub").mkdir()
    write_parquet(tmp_path / "a.parquet", numbered(7))
    write_parquet(tmp_path / "b.parquet", numbered(4, start=7))
    write_parquet(tmp_path / "sub" / "c.parquet", numbered(2, start=11))
    (tmp_path / "README.md").write_text("no data")
    source = open_rows(tmp_path)
    assert len(source) == 13
    for row in [12, 0, 6, 7, 11, 3, 10, 5, 1]:
        assert_numbered(source, row)
    for row in (-1, 13):
        with pytest.raises(IndexError, match=f"row {row} "):
            source.read(row)


def test_images_as_bytes_and_more_columns_and_keys(tmp_path: Path, open_rows: Open, write_parquet: Write) -> None:
    text = pa.struct([("user", pa.string()), ("assistant", pa.string()), ("source", pa.string())])
    schema = pa.schema([("score", pa.int64()), ("images", pa.large_list(pa.large_binary())), ("texts", pa.list_(text))])
    row = {"score": 3, "images": [b"one", b"two"], "texts": [{"user": "q", "assistant": "a", "source": "x"}] * 2}
    source = open_rows(write_parquet(tmp_path / "x.parquet", [row], schema=schema))
    sample = source.read(0)
    assert sample.images == (RawImage(data=b"one"), RawImage(data=b"two"))
    assert [turn.text for turn in sample.turns] == ["<image><image>\nq", "a", "q", "a"]
    assert [turn.role for turn in sample.turns] == ["user", "assistant"] * 2


@pytest.mark.parametrize("images", [None, []])
def test_text_only_rows(tmp_path: Path, open_rows: Open, write_parquet: Write, images: list[Any] | None) -> None:
    source = open_rows(write_parquet(tmp_path / "x.parquet", [{"images": images, "texts": TEXTS}]))
    assert source.read(0).images == () and source.read(0).turns == (Turn("user", "q"), Turn("assistant", "a"))


def test_a_file_whose_images_are_all_null(tmp_path: Path, open_rows: Open) -> None:
    table = pa.Table.from_pylist([{"images": None, "texts": TEXTS}])
    assert pa.types.is_null(table.schema.field("images").type)
    pq.write_table(table, tmp_path / "x.parquet")
    assert open_rows(tmp_path / "x.parquet").read(0).images == ()


def test_images_by_path(tmp_path: Path, open_rows: Open, write_parquet: Write) -> None:
    row = {"images": [{"bytes": None, "path": "pictures/1.png"}], "texts": TEXTS}
    file = write_parquet(tmp_path / "x.parquet", [row])
    assert open_rows(file).read(0).images[0].path == str(tmp_path / "pictures/1.png")
    assert open_rows(file, image_root="/root").read(0).images[0].path == "/root/pictures/1.png"


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"images": [{"bytes": None, "path": None}], "texts": TEXTS}, RejectReason.MISSING_IMAGE, r"images\[0\]"),
        ({"images": [None], "texts": TEXTS}, RejectReason.MISSING_IMAGE, r"images\[0\]"),
        ({"images": [], "texts": []}, RejectReason.MALFORMED_SAMPLE, "texts"),
        ({"images": [], "texts": None}, RejectReason.MALFORMED_SAMPLE, "texts"),
        ({"images": [], "texts": [None]}, RejectReason.MALFORMED_SAMPLE, "texts"),
        (
            {"images": [], "texts": [{"user": "<image>", "assistant": "a"}]},
            RejectReason.PLACEHOLDER_MISMATCH,
            "0 images but 1 ",
        ),
    ],
)
def test_rows_that_are_rejected(
    tmp_path: Path, open_rows: Open, write_parquet: Write, row: dict[str, Any], reason: RejectReason, detail: str
) -> None:
    source = open_rows(write_parquet(tmp_path / "x.parquet", [row, *numbered(1)]))
    with pytest.raises(BadSample, match=detail) as caught:
        source.read(0)
    assert caught.value.reason is reason
    assert source.read(1).turns


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"texts": pa.list_(pa.struct([("user", pa.string())]))}, ["'texts'", "list<", "user: string", "assistant"]),
        ({"texts": pa.string()}, ["'texts'", "has type string"]),
        ({"images": pa.list_(pa.int64())}, ["'images'", "int64", "list of binary"]),
        ({"images": pa.list_(pa.struct([("data", pa.binary())]))}, ["'images'", "data: binary", "bytes: binary"]),
        ({"images": pa.int64()}, ["'images'", "has type int64"]),
        ({"images": None}, ["'images' is missing", "found texts"]),
    ],
)
def test_a_wrong_schema_is_named(tmp_path: Path, open_rows: Open, columns: dict[str, Any], said: list[str]) -> None:
    good = {
        "images": pa.list_(pa.binary()),
        "texts": pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())])),
    }
    fields = {name: found for name, found in {**good, **columns}.items() if found is not None}
    pq.write_table(pa.schema(fields).empty_table(), tmp_path / "x.parquet")
    with pytest.raises(DataError) as caught:
        open_rows(tmp_path / "x.parquet")
    for words in [*said, "x.parquet"]:
        assert words in str(caught.value)


def test_no_parquet_inside(tmp_path: Path, open_rows: Open) -> None:
    with pytest.raises(DataError, match=r"no file that ends in \.parquet"):
        open_rows(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"x\.parquet"):
        open_rows(tmp_path)


def test_the_cache_keeps_blocks_within_its_bytes(tmp_path: Path, open_rows: Open, write_parquet: Write) -> None:
    rows = [{"images": [{"bytes": bytes([i]) * 1000, "path": None}], "texts": TEXTS} for i in range(30)]
    opened = [open_rows(write_parquet(tmp_path / f"{n}.parquet", rows)).source for n in "ab"]
    nbytes = int(max(opened[0].index.image_nbytes))  # of 3 rows
    cache = BlockCache(3 * nbytes)
    sources = SourceSet(opened, cache=cache)
    for row in [0, 29, 15, 3, 28, 0, 7, 21]:
        for source in (0, 1):
            assert sources.read(SampleRef(0, source, row, 0)).images[0].data == bytes([row]) * 1000
            assert cache.nbytes <= 3 * nbytes
    assert len(cache) == 3
    tight = SourceSet(opened, cache=BlockCache(1))
    for row in (0, 29, 1):
        assert tight.read(SampleRef(0, 0, row, 0)).images[0].data == bytes([row]) * 1000


def test_a_row_group_is_read_once_for_all_threads(
    tmp_path: Path, open_rows: Open, write_parquet: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_rows(write_parquet(tmp_path / "x.parquet", numbered(60), rows_per_group=20))
    reads: list[int] = []
    original = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, index: int, **options: Any) -> pa.Table:
        reads.append(index)
        return original(self, index, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    barrier = threading.Barrier(4)

    def read_all(_: int) -> None:
        barrier.wait(timeout=30)
        for row in range(60):
            assert_numbered(source, row)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read_all, range(4)))
    assert sorted(reads) == [0, 1, 2]


def test_a_read_that_fails_for_a_while_is_tried_again(
    tmp_path: Path, open_rows: Open, write_parquet: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowtrain.data.sources.retries.RETRY_DELAYS_S", (0.0, 0.0))
    source = open_rows(write_parquet(tmp_path / "x.parquet", numbered(3)))
    failures = [OSError(5, "Input/output error")] * 2
    original = pq.ParquetFile.read_row_group

    def flaky(self: pq.ParquetFile, index: int, **options: Any) -> pa.Table:
        if failures:
            raise failures.pop()
        return original(self, index, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", flaky)
    assert_numbered(source, 1)
    failures += [OSError(5, "Input/output error")] * 3
    other = open_rows(tmp_path / "x.parquet")
    with pytest.raises(SourceReadError, match=r"row group 0 of .*x\.parquet after 3 attempts"):
        other.read(1)
