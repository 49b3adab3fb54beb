"""Whatever the format: the rows of all blocks together are the rows of the file, in order."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.data.sources import json_files, webdataset
from flowtrain.data.sources.blocks import spans_of
from flowtrain.types.sources import SourceIndex

Open = Callable[..., Any]

SPACE = st.text(" \t\n\r", max_size=4)
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


def assert_invariants(index: SourceIndex, max_rows: int, max_nbytes: int) -> None:
    rows = np.diff(index.first_rows)
    assert index.first_rows[0] == 0 and (rows >= 1).all() and (rows <= max_rows).all()
    assert len(index.block_places) == len(index.block_nbytes) == len(index.image_nbytes) == index.num_blocks
    assert ((index.block_nbytes <= max_nbytes) | (rows == 1)).all()
    assert (np.diff(index.block_files) >= 0).all()
    for file in range(len(index.files)):
        mine = index.block_files == file
        ends = (index.block_places + index.block_nbytes)[mine]
        if not index.files[file].endswith(".parquet"):  # its places are the numbers of row groups
            assert (index.block_places[mine][1:] >= ends[:-1]).all(), "spans do not overlap"
    for row in range(index.num_rows):
        block = index.block_of(row)
        assert index.first_rows[block] <= row < index.first_rows[block + 1]


def texts(rows: Any) -> list[str]:
    return [record.sample().turns[-1].text for block in range(rows.index.num_blocks)
            for record in rows.source.read_block(block)]  # fmt: skip


@given(st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=4))
def test_a_row_is_found_in_its_file(files: list[list[int]]) -> None:
    """files: rows of each block; a file may have none."""
    names = tuple(f"{number}.tar" for number in range(len(files)))
    rows = np.array([rows for blocks in files for rows in blocks], np.int64)
    block_files = np.repeat(np.arange(len(files), dtype=np.int32), [len(blocks) for blocks in files])
    index = SourceIndex(names, block_files, rows, rows, rows, np.concatenate(([0], np.cumsum(rows))))
    expected = [(name, row) for name, blocks in zip(names, files, strict=True) for row in range(sum(blocks))]
    assert [index.place_of(row) for row in range(index.num_rows)] == expected


@given(
    files=st.lists(st.lists(st.tuples(TEXT, SPACE, SPACE), max_size=12), min_size=1, max_size=3),
    is_array=st.booleans(),
    has_mark=st.booleans(),
    is_ascii=st.booleans(),
    sizes=st.tuples(st.integers(1, 5), st.integers(60, 400), st.integers(1, 200)),
)
def test_json(
    files: list[list[tuple[str, str, str]]],
    is_array: bool,
    has_mark: bool,
    is_ascii: bool,
    sizes: tuple[int, int, int],
    open_rows: Open,
) -> None:
    files[0].append(("end", "", ""))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        for key, value in zip(("SPAN_ROWS", "SPAN_NBYTES", "_READ_NBYTES"), sizes, strict=True):
            patch.setattr(json_files, key, value)
        for number, rows in enumerate(files):
            parts = []
            for text, before, after in rows:
                turns = [{"from": "human", "value": "é"}, {"from": "gpt", "value": text}]
                row = json.dumps({"conversations": turns, "score": 12}, ensure_ascii=is_ascii)
                parts.append(f"{before}{row}{after}" if is_array else f"{row}{after if after.isspace() else ''}")
            whole = f"[{','.join(parts)}]" if is_array else "\n".join(parts)
            if rows or is_array:
                file = Path(name) / f"{number}.{'json' if is_array else 'jsonl'}"
                file.write_text(whole, encoding="utf-8-sig" if has_mark else "utf-8")
        opened = open_rows(name)
        assert texts(opened) == [text for rows in files for text, _, _ in rows]
        assert_invariants(opened.index, sizes[0], sizes[1])


@given(
    files=st.lists(st.lists(TEXT, max_size=40), min_size=1, max_size=3),
    rows_per_group=st.integers(1, 50),
)
def test_parquet(files: list[list[str]], rows_per_group: int, open_rows: Open) -> None:
    files[0].append("end")
    with tempfile.TemporaryDirectory() as name:
        for number, rows in enumerate(files):
            turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in rows]
            kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
            table = pa.table({"images": pa.nulls(len(rows)), "messages": pa.array(turns, kind)})
            pq.write_table(table, Path(name) / f"{number}.parquet", row_group_size=rows_per_group)
        opened = open_rows(name)
        assert texts(opened) == [text for rows in files for text in rows]
        assert_invariants(opened.index, rows_per_group, 1 << 30)


@given(
    shards=st.lists(st.lists(st.integers(0, 3000), max_size=8), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 5), st.integers(3000, 20_000)),
    format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_tar(shards: list[list[int]], sizes: tuple[int, int], format: int, open_rows: Open) -> None:
    shards[0].append(5)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        for key, value in zip(("SPAN_ROWS", "SPAN_NBYTES"), sizes, strict=True):
            patch.setattr(webdataset, key, value)
        for number, rows in enumerate(shards):
            with tarfile.open(Path(name) / f"{number}.tar", "w", format=format) as tar:
                for row, nbytes in enumerate(rows):
                    for ending, data in ((".jpg", b"x" * nbytes), (".txt", b"%d" % row)):
                        info = tarfile.TarInfo(f"{'long' * (30 * (row % 2))}{row}{ending}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
        opened = open_rows(name)
        assert texts(opened) == [str(row) for rows in shards for row in range(len(rows))]
        assert_invariants(opened.index, *sizes)
        assert opened.index.image_nbytes.sum() == sum(map(sum, shards))


@given(
    rows=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=40),
    max_rows=st.integers(1, 6),
    max_nbytes=st.integers(1, 80),
)
def test_spans(rows: list[tuple[int, int]], max_rows: int, max_nbytes: int) -> None:
    ends = np.cumsum([0, *(nbytes for nbytes, _ in rows)]).tolist()
    given_rows = [(start, end, image) for start, end, (_, image) in zip(ends[:-1], ends[1:], rows, strict=True)]
    blocks = list(spans_of(iter(given_rows), max_rows, max_nbytes))
    assert sum(block.num_rows for block in blocks) == len(rows)
    assert sum(block.image_nbytes for block in blocks) == sum(image for _, image in rows)
    place = 0
    for block in blocks:
        assert block.place == place and 1 <= block.num_rows <= max_rows
        assert block.nbytes <= max_nbytes or block.num_rows == 1
        place += block.nbytes
    assert place == ends[-1]
    for block, following in pairwise(blocks):  # as few as can be
        first = given_rows[sum(b.num_rows for b in blocks[: blocks.index(following)])]
        assert block.num_rows == max_rows or block.nbytes + first[1] - first[0] > max_nbytes


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_a_large_json_is_never_held(tmp_path: Path, open_rows: Open, name: str) -> None:
    row = json.dumps({"conversations": [{"from": "gpt", "value": "x" * 2000}]})
    separator, ends = (",\n", ("[", "]")) if name == "x.json" else ("\n", ("", ""))
    with (tmp_path / name).open("w") as file:
        file.write(ends[0])
        for number in range(20_000):
            file.write(f"{separator if number else ''}{row}")
        file.write(ends[1])
    tracemalloc.start()
    rows = open_rows(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 20_000 and peak < (tmp_path / name).stat().st_size / 4
    assert rows.index.block_nbytes.max() <= json_files.SPAN_NBYTES
    assert len(rows.source.read_block(3)) == 128
