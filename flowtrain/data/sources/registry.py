"""Opens the sources of the configuration: chooses the format and shares one cache between a process's sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowtrain.config.data import EvalConfig, SourceConfig
from flowtrain.data.sources.base import Source
from flowtrain.data.sources.llava import LlavaSource
from flowtrain.data.sources.parquet import ParquetSource
from flowtrain.data.sources.row_group_cache import RowGroupCache
from flowtrain.errors import DataError

_FORMAT_OF_SUFFIX = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def open_source(config: SourceConfig | EvalConfig, cache: RowGroupCache | None = None) -> Source:
    """Open one source; raises DataError if it is missing, empty, of an unknown format or an unexpected schema."""
    path = Path(config.path)
    if not path.exists():
        raise DataError(f"data source {config.path}: no such file or directory")
    given_name = config.name if isinstance(config, SourceConfig) else None
    name = given_name or config.path
    image_root = None if config.image_root is None else Path(config.image_root)
    source: Source
    if _format(config, path) == "parquet":
        source = ParquetSource(path, name, image_root, cache)
    else:
        source = LlavaSource(path, name, image_root)
    if len(source) == 0:
        raise DataError(f"data source {config.path}: has no rows")
    return source


def open_sources(configs: Sequence[SourceConfig | EvalConfig]) -> list[Source]:
    """Open sources with one shared cache, so that memory does not grow with their number; raises as ``open_source``."""
    cache = RowGroupCache()
    return [open_source(config, cache) for config in configs]


def _format(config: SourceConfig | EvalConfig, path: Path) -> str:
    if config.format != "auto":
        return config.format
    if path.is_dir():
        return "parquet"
    found = _FORMAT_OF_SUFFIX.get(path.suffix.lower())
    if found is None:
        raise DataError(
            f"data source {config.path}: cannot tell the format from the ending {path.suffix!r} "
            f"({', '.join(_FORMAT_OF_SUFFIX)} are known); set its format to parquet or json"
        )
    return found
