"""Parquet in the schema of the Cauldron and FineVision: ``images`` and ``texts`` columns, rows in any order."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flowtrain.data.sources.base import BadSample, RawImage, RawSample, Turn, normalise, read_with_retries
from flowtrain.data.sources.row_group_cache import RowGroupCache
from flowtrain.errors import DataError
from flowtrain.types.samples import RejectReason

IMAGES, TEXTS = "images", "texts"

_EXPECTED = {
    IMAGES: "list of binary, or list of struct<bytes: binary, path: string>",
    TEXTS: "list of struct<user: string, assistant: string>",
}
_STREAM_BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class _RowGroup:
    path: Path
    index: int
    nbytes: int


class ParquetSource:
    """One parquet file, or all ``*.parquet`` files under a directory in the order of their names.

    Only the two columns are read, one row group at a time, into ``cache``, which several sources may share. A row group
    larger than the whole cache is streamed up to the requested row instead, so that memory stays bounded. Relative
    paths in the images' ``path`` field start from ``image_root`` (default: the file's directory).
    """

    def __init__(
        self, path: Path, name: str, image_root: Path | None = None, cache: RowGroupCache | None = None
    ) -> None:
        self.name = name
        self._image_root = image_root
        self._cache = RowGroupCache() if cache is None else cache
        self._groups: list[_RowGroup] = []
        sizes = []
        for file in _parquet_files(path):
            metadata = _checked_metadata(file)
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                self._groups.append(_RowGroup(file, index, _decoded_nbytes(group)))
                sizes.append(group.num_rows)
        self._starts = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, row: int) -> RawSample:
        """Return a row; raises BadSample, SourceReadError, or DataError if the file is damaged."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside {self.name} ({len(self)} rows)")
        position = bisect_right(self._starts, row) - 1
        group = self._groups[position]
        record = self._record(group, row - self._starts[position])
        root = group.path.parent if self._image_root is None else self._image_root
        images = [_image(value, index, root) for index, value in enumerate(record[IMAGES] or ())]
        return normalise(images, _turns(record[TEXTS]))

    def _record(self, group: _RowGroup, row: int) -> dict[str, Any]:
        what = f"row group {group.index} of {group.path}"
        try:
            if group.nbytes > self._cache.max_nbytes:
                table, row = read_with_retries(lambda: _stream_to(group, row), what)
            else:
                key = (str(group.path), group.index)
                table = self._cache.get(key, lambda: read_with_retries(lambda: _read_group(group), what))
        except pa.ArrowException as error:
            raise DataError(f"{what} cannot be decoded: {error}; restore the file or remove it") from error
        return {column: table.column(column)[row].as_py() for column in (IMAGES, TEXTS)}


def _parquet_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(f"{path}: no *.parquet file in this directory; name a file, or a directory that has some")
    return files


def _checked_metadata(path: Path) -> pq.FileMetaData:
    try:
        metadata = read_with_retries(lambda: pq.read_metadata(path), f"data file {path}")
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    schema = metadata.schema.to_arrow_schema()
    for column, accepts in ((IMAGES, _accepts_images), (TEXTS, _accepts_texts)):
        if column not in schema.names:
            raise DataError(
                f"{path}: column {column!r} is missing (found {', '.join(schema.names)}); expected {_EXPECTED[column]}"
            )
        found = schema.field(column).type
        if not accepts(found):
            raise DataError(f"{path}: column {column!r} has type {found}; expected {_EXPECTED[column]}")
    return metadata


def _is_list(found: pa.DataType) -> bool:
    return bool(pa.types.is_list(found) or pa.types.is_large_list(found))


def _is_binary(found: pa.DataType) -> bool:
    return bool(pa.types.is_binary(found) or pa.types.is_large_binary(found) or pa.types.is_null(found))


def _is_string(found: pa.DataType) -> bool:
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_null(found))


def _accepts_images(found: pa.DataType) -> bool:
    if pa.types.is_null(found):
        return True  # a file of text-only samples
    if not _is_list(found):
        return False
    item = found.value_type
    if not pa.types.is_struct(item):
        return _is_binary(item)
    fields = {field.name: field.type for field in item}
    return "bytes" in fields and _is_binary(fields["bytes"]) and _is_string(fields.get("path", pa.null()))


def _accepts_texts(found: pa.DataType) -> bool:
    if not _is_list(found) or not pa.types.is_struct(found.value_type):
        return False
    fields = {field.name: field.type for field in found.value_type}
    return all(key in fields and _is_string(fields[key]) for key in ("user", "assistant"))


def _decoded_nbytes(group: pq.RowGroupMetaData) -> int:
    """Return the estimated bytes of both columns of a row group in memory."""
    columns = (group.column(index) for index in range(group.num_columns))
    return sum(
        column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] in (IMAGES, TEXTS)
    )


def _read_group(group: _RowGroup) -> pa.Table:
    # Opened for each row group: a ParquetFile is not thread-safe, and thousands of open files exceed a process's limit.
    with pq.ParquetFile(group.path) as file:
        return file.read_row_group(group.index, columns=[IMAGES, TEXTS], use_threads=False)


def _stream_to(group: _RowGroup, row: int) -> tuple[pa.RecordBatch, int]:
    """Return the batch that contains the row group's ``row``, and the row's index in the batch."""
    with pq.ParquetFile(group.path, pre_buffer=False, buffer_size=1 << 20) as file:
        batches = file.iter_batches(
            _STREAM_BATCH_ROWS, row_groups=[group.index], columns=[IMAGES, TEXTS], use_threads=False
        )
        for batch in batches:
            if row < batch.num_rows:
                return batch, row
            row -= batch.num_rows
    raise DataError(f"row group {group.index} of {group.path} has fewer rows than its footer says")


def _image(value: Any, index: int, root: Path) -> RawImage:
    data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if data is not None:
        return RawImage(data=data)
    if path:
        return RawImage(path=root / path)
    raise BadSample(RejectReason.MISSING_IMAGE, f"images[{index}] has neither bytes nor a path")


def _turns(texts: list[dict[str, str | None] | None] | None) -> list[Turn]:
    if not texts or None in texts:
        raise BadSample(RejectReason.MALFORMED_SAMPLE, "texts is empty or has an empty entry")
    turns = []
    for text in texts:
        assert text is not None
        turns += [Turn("user", text["user"] or ""), Turn("assistant", text["assistant"] or "")]
    return turns
