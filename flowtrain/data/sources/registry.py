"""Finds the files and blocks of a configured source, and opens it; chooses the format."""

from __future__ import annotations

import logging
import os
from collections import Counter

from flowtrain.config.data import EvalConfig, SourceConfig
from flowtrain.data.sources.base import Source
from flowtrain.data.sources.blocks import Format, StoredSource, index_files
from flowtrain.data.sources.json_files import JsonFormat
from flowtrain.data.sources.parquet import ParquetFormat
from flowtrain.data.sources.storage import list_files, plain_path
from flowtrain.data.sources.webdataset import WebDatasetFormat
from flowtrain.errors import DataError
from flowtrain.types.sources import SourceIndex

logger = logging.getLogger(__name__)

_ENDINGS = {"parquet": (".parquet",), "webdataset": (".tar",), "json": (".jsonl", ".json")}
"""Endings of each format's files. A directory is taken in the first format of which it has files."""
_DATA_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that the datasets library writes beside its data."""


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
        left_out = [file for file in files if _format_name(config, file) != name]
        files = tuple(file for file in files if _format_name(config, file) == name)
        _warn_of(left_out, config.path, len(files), name)
    index = index_files(files, _format(config, files[0]).find_blocks)
    if index.num_rows == 0:
        which = "it is empty" if len(files) == 1 else f"its {len(files)} files are empty"
        raise DataError(f"data source {config.path}: has no rows, {which}; restore its data, or remove the source")
    return index


def open_source(config: SourceConfig | EvalConfig, index: SourceIndex) -> Source:
    """Return a source whose blocks are known; it opens no file before a block is read."""
    given_name = config.name if isinstance(config, SourceConfig) else None
    return StoredSource(given_name or config.path, index, _format(config, index.files[0]))


def _warn_of(left_out: list[str], path: str, num_files: int, name: str) -> None:
    """Warn once of files in other formats than the one that is taken, but for data about a data set."""
    endings = Counter(
        os.path.splitext(file)[1].lower() for file in left_out if os.path.basename(file) not in _DATA_ABOUT_DATA
    )
    if endings:
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        logger.warning(
            "data source %s: only its %d files of format %s are read, the others are left out (%s); to choose, set the "
            "source's format; to read all, give a source for each format",
            path, num_files, name, counts,
        )  # fmt: skip


def _format(config: SourceConfig | EvalConfig, file: str) -> Format:
    name = _format_name(config, file)
    image_root = None if config.image_root is None else plain_path(config.image_root)
    if name == "parquet":
        return ParquetFormat(config.columns, image_root)
    return WebDatasetFormat() if name == "webdataset" else JsonFormat(image_root)


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
