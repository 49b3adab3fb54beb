"""Files of local and remote storage by fsspec: listed, opened, and read by ranges. A path without ``://`` is local."""

from __future__ import annotations

import io
import os
from functools import lru_cache
from glob import has_magic
from typing import Any, BinaryIO, cast

import fsspec
from fsspec import AbstractFileSystem

from flowtrain.config.paths import looks_like_hub_data
from flowtrain.config.secrets import without_queries
from flowtrain.data.sources.retries import is_missing, read_with_retries
from flowtrain.errors import DataError

REMOTE_BUFFER_NBYTES = 1 << 20
"""Bytes that a sequential read of a remote file asks for at once."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The extra of this package that a protocol needs."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def plain_path(path: str) -> str:
    """Return a ``file://`` URL as a local path; anything else as it is."""
    return path.removeprefix("file://")


def list_files(path: str, endings: tuple[str, ...]) -> tuple[str, ...]:
    """List the files that a path, directory or pattern names, in the order of their names.

    endings: of the files that are taken from a directory (with everything beneath it, but nothing hidden) or a pattern
    that also matches others. Raises DataError if there is none, SourceReadError if the storage does not answer.
    """
    path = plain_path(path)
    files = read_with_retries(lambda: _list(path, endings), f"data source {path}")
    if not files:
        what = "pattern matches no file" if has_magic(path) else "directory has no file"
        raise DataError(f"data source {path}: the {what} that ends in {', '.join(endings)}")
    return files


def open_file(path: str) -> BinaryIO:
    """Open a file for sequential reading; raises whatever the storage raises."""
    if not is_remote(path):
        return open(path, "rb")
    file = filesystem_of(path).open(path, "rb", block_size=REMOTE_BUFFER_NBYTES, cache_type="readahead")
    # fsspec's own readline is slow.
    return io.BufferedReader(cast("io.RawIOBase", file), REMOTE_BUFFER_NBYTES)


def read_range(path: str, start: int, nbytes: int) -> bytes:
    """Return ``nbytes`` bytes from ``start`` of a file, after retries; raises DataError if the file is shorter."""

    def read() -> bytes:
        if is_remote(path):
            return cast(bytes, filesystem_of(path).cat_file(path, start=start, end=start + nbytes))
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(nbytes)

    data = read_with_retries(read, f"bytes {start} to {start + nbytes} of {path}")
    if len(data) < nbytes:
        raise DataError(
            f"{path}: {len(data)} bytes at {start}, where {nbytes} were found at the start of the run; "
            "do not change the data during a run"
        )
    return data


def filesystem_of(path: str) -> AbstractFileSystem:
    """Return the file system of a path or URL; raises DataError for an unknown protocol or a missing package."""
    protocol = path.split("://", 1)[0] if is_remote(path) else "file"
    return _filesystem(protocol, os.getpid())


def directory_of(path: str) -> str:
    """Return the directory of a file."""
    return path.rpartition("/")[0] if is_remote(path) else os.path.dirname(os.path.abspath(path))


@lru_cache
def _filesystem(protocol: str, process_id: int) -> AbstractFileSystem:
    """One file system for all threads of a process: a remote one keeps connections. A fork may not use its parent's."""
    try:
        return fsspec.filesystem(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        way_out = f"pip install 'flowtrain[{extra}]'" if extra else "install it"
        raise DataError(f"{protocol}:// needs a package that is not installed ({error}): {way_out}") from error
    except ValueError as error:
        raise DataError(f"{protocol}:// is no known protocol ({without_queries(str(error))})") from error


def _list(path: str, endings: tuple[str, ...]) -> tuple[str, ...]:
    if "::" in path:
        raise DataError(f"data source {path}: chained URLs (::) are not supported; name the file itself")
    fs = filesystem_of(path)
    info = _info(fs, path)
    if info is not None and info["type"] == "directory":
        root = fs._strip_protocol(path)
        found = [name for name in fs.find(path) if not _is_hidden(name[len(root) :])]
    elif info is not None:
        return (path if is_remote(path) else os.path.abspath(path),)
    elif has_magic(path):
        found = [name for name, info in fs.glob(path, detail=True).items() if info["type"] != "directory"]
        if not _is_hidden(path.rpartition("/")[2]):
            found = [name for name in found if not _is_hidden(name.rpartition("/")[2])]
    elif looks_like_hub_data(path):
        raise DataError(
            f"data source {path}: no such file or directory; for the hub's data set of this name write "
            f"hf://datasets/{path}"
        )
    else:
        raise FileNotFoundError(path)
    return tuple(_full(fs, path, name) for name in sorted(found) if name.lower().endswith(endings))


def _info(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    try:
        return cast("dict[str, Any]", fs.info(path))
    except Exception as error:
        if is_missing(error):
            return None
        raise


def _full(fs: AbstractFileSystem, path: str, name: str) -> str:
    """Return a listed name as it can be opened."""
    return f"{path.split('://', 1)[0]}://{name.lstrip('/')}" if is_remote(path) else name


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))
