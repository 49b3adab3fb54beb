from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowtrain.data.sources import parquet
from flowtrain.data.sources.base import BadSample, RawImage, Turn
from flowtrain.data.sources.block_cache import BlockCache
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.errors import DataError, SourceReadError
from flowtrain.types.samples import RejectReason, SampleRef

Write = Callable[..., Path]
Open = Callable[..., Any]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
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
    pq.write_table(pa.Table.from_pylist([{"images": ["1.png"] * 3, "texts": TEXTS}]), tmp_path / "y.parquet")
    rows = open_rows(tmp_path / "y.parquet")
    assert rows.index.image_nbytes.tolist() == [0] and rows.read(0).images[2].path == str(tmp_path / "1.png")


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


def test_a_rejected_row_keeps_its_id(tmp_path: Path, open_rows: Open) -> None:
    good = {"id": 7, "images": ["1.png"], "texts": TEXTS}
    rows = [{**good, "texts": []}, {**good, "images": ["/1.png"]}, {**good, "images": [None]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    source = open_rows(tmp_path / "x.parquet")
    for row, path in enumerate([None, "/1.png", None]):
        with pytest.raises(BadSample) as caught:
            source.read(row)
        assert (caught.value.sample_id, caught.value.path) == ("7", path)


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


ITEM = pa.struct([("index", pa.int64()), ("text", pa.string()), ("type", pa.string())])
LIST = [{"index": None, "text": "q", "type": "text"}, {"index": 0, "text": None, "type": "image"}]


@pytest.mark.parametrize(
    ("content", "asked", "expected"),
    [
        (pa.string(), "q<image>", "q<image>"),
        (pa.string(), "q", "<image>\nq"),
        (pa.large_string(), "q<image>", "q<image>"),
        (pa.list_(ITEM), LIST, "q<image>"),
    ],
)
@pytest.mark.parametrize(
    ("images", "image"),
    [
        (pa.list_(IMAGE), [{"bytes": b"one", "path": None}]),
        (IMAGE, {"bytes": b"one", "path": "x.png"}),
        (pa.binary(), b"one"),
        (pa.large_list(pa.large_binary()), [b"one"]),
    ],
)
def test_messages(
    tmp_path: Path, open_rows: Open, content: pa.DataType, asked: Any, expected: str, images: pa.DataType, image: Any
) -> None:
    answer = [{"index": None, "text": "a", "type": "text"}] if asked is LIST else "a"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    table = pa.table(
        {
            "id": pa.array([7]),
            "images": pa.array([image], images),
            "messages": pa.array([messages], pa.list_(pa.struct([("role", pa.string()), ("content", content)]))),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    sample = open_rows(tmp_path / "x.parquet").read(0)
    assert sample.turns == (Turn("user", expected), Turn("assistant", "a")) and sample.id == "7"
    assert [image.data for image in sample.images] == [b"one"]


def test_messages_as_json_text_and_other_names_of_columns(tmp_path: Path, open_rows: Open) -> None:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    ask = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}]
    texts = [json.dumps(talk), json.dumps(ask), "[" * 100_000, '{"a": 1', '[{"role": "user", "content": "\\ud800"}]']
    table = pa.table({"picture": pa.array(["x.png"] * 5), "chat": pa.array(texts)})
    pq.write_table(table, tmp_path / "x.parquet")
    columns = {"images": "picture", "messages": "chat"}
    rows = open_rows(tmp_path / "x.parquet", columns=columns, image_root="/root")
    assert rows.read(0).turns == (Turn("user", "<image>\nq"), Turn("assistant", "a"))
    assert rows.read(1).turns == (Turn("user", "<image>q"),)
    assert rows.read(1).images == (RawImage(path="/root/x.png"),)
    said = r"column 'chat': expected turns as JSON text, found '\{\"a\": 1' \(Expecting .* at character 7\)"
    for row, detail in ((2, r"'chat': .*\(nested too deep\)"), (3, said), (4, "surrogates not allowed")):
        with pytest.raises(BadSample, match=detail) as caught:
            rows.read(row)
        assert caught.value.reason is RejectReason.MALFORMED_SAMPLE
    with pytest.raises(DataError, match="column 'images' is missing .*name another column under the source's columns"):
        open_rows(tmp_path / "x.parquet")


def test_text_that_is_not_utf_8_spoils_its_row_alone(tmp_path: Path, open_rows: Open) -> None:
    users = pa.array([b"q0", b"\xff\xfe", b"q2"], pa.binary()).view(pa.string())
    texts = pa.StructArray.from_arrays([users, pa.array(["a"] * 3)], ["user", "assistant"])
    table = pa.table({"images": pa.nulls(3), "texts": pa.ListArray.from_arrays([0, 1, 2, 3], texts)})
    pq.write_table(table, tmp_path / "x.parquet")
    rows = open_rows(tmp_path / "x.parquet")
    with pytest.raises(BadSample, match="UnicodeDecodeError") as caught:
        rows.read(1)
    assert caught.value.reason is RejectReason.MALFORMED_SAMPLE
    assert [rows.read(row).turns[0].text for row in (0, 2)] == ["q0", "q2"]


def test_columns_of_one_name_are_refused(tmp_path: Path, open_rows: Open) -> None:
    column = pa.array([[b"x"]])
    texts = pa.array([TEXTS])
    pq.write_table(pa.Table.from_arrays([column, column, texts], ["images", "images", "texts"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: 2 columns are named 'images'"):
        open_rows(tmp_path / "x.parquet")


def test_a_damaged_page_is_named(tmp_path: Path, open_rows: Open) -> None:
    rows = [{"images": [{"bytes": b"x" * 1000, "path": None}], "texts": TEXTS}]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    opened = open_rows(path)
    for place in (4, data.index(b"x" * 1000) + 10):  # the page's header, and its content
        damaged = data.copy()
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.parquet: not a parquet file that can be decoded.*restore the file"):
            opened.source.read_block(0)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"x\.parquet"):
        open_rows(path)


def test_a_value_stored_once_for_many_rows_does_not_fill_the_memory(
    tmp_path: Path, open_rows: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"images": [{"bytes": b"x" * 50_000, "path": None}], "texts": TEXTS}
    pq.write_table(pa.Table.from_pylist([row] * 100), tmp_path / "x.parquet")
    rows = open_rows(tmp_path / "x.parquet")
    assert rows.index.image_nbytes[0] < 100_000
    assert rows.read(99).images[0].data == b"x" * 50_000
    monkeypatch.setattr(parquet, "_FREE_NBYTES", 1_000_000)
    with pytest.raises(DataError, match=r"row group 0 of .*x\.parquet grows from \d+ to more than \d+ bytes"):
        rows.source.read_block(0)


def test_images_are_views_of_what_was_read(tmp_path: Path, open_rows: Open, write_parquet: Write) -> None:
    rows = open_rows(write_parquet(tmp_path / "x.parquet", numbered(40), rows_per_group=40))
    gc.collect()
    nbytes = pa.total_allocated_bytes()
    records = rows.source.read_block(0)
    views = [record.sample().images[0].data for record in records]
    assert all(isinstance(view, memoryview) for view in views)
    del records
    gc.collect()
    assert pa.total_allocated_bytes() > nbytes  # a copy would be Python's
    assert views == [f"image {i}".encode() for i in range(40)]
    del views
    gc.collect()
    assert pa.total_allocated_bytes() <= nbytes


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
    original = pq.ParquetFile.iter_batches

    def counted(self: pq.ParquetFile, batch_size: int, row_groups: list[int], *rest: Any, **options: Any) -> Any:
        reads.extend(row_groups)
        return original(self, batch_size, row_groups, *rest, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
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
    original = pq.ParquetFile.iter_batches

    def flaky(self: pq.ParquetFile, *given: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(self, *given, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", flaky)
    assert_numbered(source, 1)
    failures += [OSError(5, "Input/output error")] * 3
    other = open_rows(tmp_path / "x.parquet")
    with pytest.raises(SourceReadError, match=r"row group 0 of .*x\.parquet after 3 attempts"):
        other.read(1)
