"""Parquet files, in row groups: images as bytes or paths, and turns as ``texts`` or ``messages``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from flowtrain.config.data import ColumnsConfig
from flowtrain.data.sources.bad_sample import BadSample, errors_of_row, malformed
from flowtrain.data.sources.base import RawSample, Record, Turn, image_beneath
from flowtrain.data.sources.blocks import Block
from flowtrain.data.sources.json_rows import json_fault
from flowtrain.data.sources.parquet_images import ImageColumn
from flowtrain.data.sources.parquet_schema import Selection, select
from flowtrain.data.sources.retries import read_with_retries
from flowtrain.data.sources.storage import directory_of, filesystem_of, is_remote
from flowtrain.data.sources.stored_text import text_of_values
from flowtrain.data.sources.turns import ImageItem, join_images, parse_turns, paths_in
from flowtrain.errors import DataError

_BATCH_ROWS, _MOST_BATCH_ROWS, _BATCH_NBYTES = 16, 4096, 4 << 20
"""Rows that are decoded at once: as many as have these bytes on average, within the limits."""
_BUFFER_NBYTES = 1 << 16
_KEPT_NBYTES = 4 << 20
"""After so many bytes, Arrow gives back what it freed: it keeps a third more than it uses otherwise."""
_MAX_EXPANSION, _FREE_NBYTES = 4, 256 << 20
"""A row group whose values repeat may take this many times its stored bytes, and these bytes on top."""


class ParquetFormat:
    """Parquet files. Only the needed columns are read, a row group at once.

    Relative paths in the images' ``path`` field start from ``image_root`` (None: the file's directory).
    """

    def __init__(self, columns: ColumnsConfig, image_root: str | None) -> None:
        self._columns = columns
        self._image_root = image_root

    def find_blocks(self, path: str) -> Sequence[Block]:
        """Return the row groups of a file; raises DataError if it has other columns, or cannot be read."""
        metadata = read_with_retries(lambda: _metadata(path), f"data file {path}")
        with _decoding(path):
            selection = select(path, metadata.schema.to_arrow_schema(), self._columns)
            columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
            paths = {column.path for column in columns if column.logical_type.type == "STRING"}
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            return [_block(group, index, selection, paths) for index, group in enumerate(groups)]

    def read_block(self, path: str, block: Block) -> Sequence[Record]:
        """Return the rows of a row group; their images are views of Arrow's memory, which live as long as they do."""
        what = f"row group {block.place} of {path}"
        batches, selection = read_with_retries(lambda: self._read(path, block.place), what)
        pa.default_memory_pool().release_unused()
        num_rows = sum(batch.num_rows for batch in batches)
        if num_rows != block.num_rows:
            raise DataError(
                f"{what} has {num_rows} rows, where {block.num_rows} were found at the start of the run; "
                "do not change the data during a run"
            )
        root = directory_of(path) if self._image_root is None else self._image_root
        decoded = [_Batch(batch, selection, root) for batch in batches]
        return [_ParquetRecord(batch, row) for batch in decoded for row in range(batch.num_rows)]

    def _read(self, path: str, group: int) -> tuple[list[pa.RecordBatch], Selection]:
        with _opened(path, pre_buffer=is_remote(path)) as file:
            if group >= file.num_row_groups:
                return [], select(path, file.schema_arrow, self._columns)
            selection = select(path, file.metadata.schema.to_arrow_schema(), self._columns)
            chunks = _column_chunks(file.metadata.row_group(group), selection.columns)
            stored_nbytes = sum(chunk.total_uncompressed_size for chunk in chunks)
            batches, nbytes, released_nbytes = [], 0, 0
            pool = pa.default_memory_pool()
            pool.release_unused()  # what the block before this one took
            # By a few rows: one array of a nested column cannot hold 2 GiB, and a value that is stored once for many
            # rows is seen before they fill the memory.
            fitting = _BATCH_NBYTES * file.metadata.row_group(group).num_rows // max(1, stored_nbytes)
            num_rows = min(max(fitting, _BATCH_ROWS), _MOST_BATCH_ROWS)
            for batch in file.iter_batches(num_rows, [group], list(selection.columns), use_threads=False):
                batches.append(batch)
                nbytes += batch.nbytes
                if nbytes - released_nbytes > _KEPT_NBYTES:
                    pool.release_unused()
                    released_nbytes = nbytes
                if nbytes > _MAX_EXPANSION * stored_nbytes + _FREE_NBYTES:
                    raise DataError(
                        f"row group {group} of {path} grows from {stored_nbytes} to more than {nbytes} bytes: values "
                        "are stored once for many rows; write it with smaller row groups, or remove it"
                    )
            return batches, selection


class _Batch:
    """Some rows that Arrow decoded together."""

    def __init__(self, batch: pa.RecordBatch, selection: Selection, root: str) -> None:
        self.num_rows = batch.num_rows
        self._batch = batch
        self._selection = selection
        self._root = root
        self._images = ImageColumn(batch.column(selection.images), root)

    def id_of(self, row: int) -> str | None:
        """Return a row's own id, if there is one."""
        id = self._batch.column(self._selection.id)[row].as_py() if self._selection.id is not None else None
        return None if id is None else str(id)

    def sample(self, row: int, id: str | None) -> RawSample:
        """Return a row; raises BadSample, and other errors for text that is not UTF-8."""
        selection = self._selection
        images = self._images.of_row(row)
        value = self._batch.column(selection.turns)[row].as_py()
        items: list[ImageItem] = []
        if selection.are_texts:
            turns = _turns_of_texts(value, selection.turns)
        else:
            messages = _parsed(value, selection.turns) if isinstance(value, str) else value
            turns, items = parse_turns(messages, selection.turns)
        if not images:
            paths = enumerate(paths_in(items))
            images = [image_beneath(self._root, path, f"content[{index}]") for index, path in paths]
        return join_images(images, turns, items, id)

    def stored_text(self, row: int) -> str:
        """Return the columns that are read."""
        values: dict[str, object] = {}
        for name in self._selection.columns:
            try:
                is_images = name == self._selection.images
                values[name] = self._images.described(row) if is_images else self._batch.column(name)[row].as_py()
            except (ValueError, pa.ArrowException) as error:  # text that is not UTF-8
                values[name] = f"cannot be read: {error}"
        return text_of_values(values)


@dataclass(frozen=True, slots=True)
class _ParquetRecord:
    batch: _Batch
    row: int

    def sample(self) -> RawSample:
        id = None
        try:
            id = self.batch.id_of(self.row)
            with errors_of_row(id):
                return self.batch.sample(self.row, id)
        except BadSample:
            raise
        except (ValueError, TypeError, KeyError, RecursionError, pa.ArrowException) as error:
            with errors_of_row(id):
                raise malformed(f"{type(error).__name__}: {error}"[:300]) from error

    def stored_text(self) -> str:
        return self.batch.stored_text(self.row)


def _metadata(path: str) -> pq.FileMetaData:
    with _opened(path) as file:
        return file.metadata


@contextmanager
def _opened(path: str, pre_buffer: bool = False) -> Iterator[pq.ParquetFile]:
    """Open a file without mapping it into memory; what Arrow cannot decode is a DataError."""
    source: Any = filesystem_of(path).open(path, "rb", cache_type="none") if is_remote(path) else pa.OSFile(path)
    with source, _decoding(path):
        # Opened for each block: a ParquetFile is not thread-safe, and open files are limited.
        # A buffered stream frees a compressed page once it is decompressed; storage elsewhere gets fewer requests.
        buffer_nbytes = 0 if pre_buffer else _BUFFER_NBYTES
        with pq.ParquetFile(
            source, pre_buffer=pre_buffer, buffer_size=buffer_nbytes, page_checksum_verification=True
        ) as file:
            yield file


@contextmanager
def _decoding(path: str) -> Iterator[None]:
    """Turn what Arrow raises for a damaged file into DataError."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:  # a damaged name of a column is no UTF-8
        # Arrow also raises OSErrors for damaged pages, without a number.
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        raise DataError(
            f"{path}: not a parquet file that can be decoded: {' '.join(str(error).split())}; "
            "restore the file or remove it"
        ) from error


def _block(group: pq.RowGroupMetaData, index: int, selection: Selection, paths: set[str]) -> Block:
    """paths: columns of text, which hold no image."""
    nbytes = sum(chunk.total_compressed_size for chunk in _column_chunks(group, selection.columns))
    images = [chunk for chunk in _column_chunks(group, (selection.images,)) if chunk.path_in_schema not in paths]
    return Block(index, nbytes, sum(chunk.total_uncompressed_size for chunk in images), group.num_rows)


def _column_chunks(group: pq.RowGroupMetaData, columns: tuple[str, ...]) -> list[pq.ColumnChunkMetaData]:
    """Return what is stored of these columns, also of the fields inside them."""
    inside = tuple(f"{column}." for column in columns)
    chunks = (group.column(number) for number in range(group.num_columns))
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(inside)]


def _parsed(text: str, key: str) -> object:
    try:
        return cast(object, json.loads(text))
    except (ValueError, RecursionError) as error:
        found = f"{text[:80]!r} ({json_fault(error)})"
        raise malformed(f"column {key!r}: expected turns as JSON text, found {found}") from error


def _turns_of_texts(texts: list[dict[str, str | None] | None] | None, key: str) -> list[Turn]:
    if not texts or None in texts:
        raise malformed(f"{key} is empty or has an empty entry")
    turns = []
    for text in texts:
        assert text is not None
        turns += [Turn("user", text["user"] or ""), Turn("assistant", text["assistant"] or "")]
    return turns
