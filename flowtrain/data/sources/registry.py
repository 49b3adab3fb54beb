"""Finds the files and blocks of a configured source, and opens it; chooses the format."""

from __future__ import annotations

import os

from flowtrain.config.data import EvalConfig, SourceConfig
from flowtrain.data.sources.base import Source
from flowtrain.data.sources.blocks import Format, StoredSource, index_files
from flowtrain.data.sources.json_files import JsonFormat
from flowtrain.data.sources.parquet import ParquetFormat
from flowtrain.data.sources.storage import list_files
from flowtrain.errors import DataError
from flowtrain.types.sources import SourceIndex

_ENDINGS = {"parquet": (".parquet",), "webdataset": (".tar",), "json": (".jsonl", ".json")}
"""Endings of each format's files. A directory is taken in the first format of which it has files."""


def index_source(config: SourceConfig | EvalConfig) -> SourceIndex:
    """List the files of a source and find their blocks, in threads.

    Raises DataError if it is missing, empty, of an unknown format or an unexpected schema; SourceReadError if the
    storage does not answer.
    """
    endings = tuple(ending for name in _ENDINGS for ending in _ENDINGS[name])
    files = list_files(config.path, endings if config.format == "auto" else _ENDINGS[config.format])
    if config.format == "auto":
        found = {_format_name(config, file) for file in files}
        name = next(name for name in _ENDINGS if name in found)
        files = tuple(file for file in files if _format_name(config, file) == name)
    index = index_files(files, _format(config, files[0]).find_blocks)
    if index.num_rows == 0:
        raise DataError(f"data source {config.path}: has no rows")
    return index


def open_source(config: SourceConfig | EvalConfig, index: SourceIndex) -> Source:
    """Return a source whose blocks are known; it opens no file before a block is read."""
    given_name = config.name if isinstance(config, SourceConfig) else None
    return StoredSource(given_name or config.path, index, _format(config, index.files[0]))


def _format(config: SourceConfig | EvalConfig, file: str) -> Format:
    name = _format_name(config, file)
    if name == "parquet":
        return ParquetFormat(config.columns, config.image_root)
    return JsonFormat(config.image_root)


def _format_name(config: SourceConfig | EvalConfig, file: str) -> str:
    if config.format != "auto":
        return config.format
    for name, endings in _ENDINGS.items():
        if file.lower().endswith(endings):
            return name
    raise DataError(
        f"data source {config.path}: cannot tell the format from the ending {os.path.splitext(file)[1]!r} "
        f"({', '.join(ending for endings in _ENDINGS.values() for ending in endings)} are known); set its format"
    )
