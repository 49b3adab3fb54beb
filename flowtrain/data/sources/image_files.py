"""Image files that rows name by their paths: beneath their root, regular, and of bounded size."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import cast
from urllib.parse import unquote

from flowtrain.data.sources.bad_sample import BadSample
from flowtrain.data.sources.retries import is_denied, is_missing, read_with_retries
from flowtrain.data.sources.storage import filesystem_of, is_remote
from flowtrain.types.samples import RejectReason

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z]:|(?:data|file|http|https):", re.IGNORECASE)
_IS_URL, _IS_ABSOLUTE = "it is a URL or has a drive letter", "it is absolute"


def path_beneath(root: str, path: str, what: str) -> str:
    """Join an image's path to its root, a directory or a URL; links beneath the root are followed.

    what: names the image in the message. Raises BadSample (MALFORMED_SAMPLE) if the path could lead out of the root:
    absolute paths, ``..``, drive letters, URLs, NUL bytes.
    """
    root = root.rstrip("/")
    fault = _fault_of(path)
    if fault is not None:
        shown = shown_path(path)
        detail = f"{what} = {shown!r}: {fault}; image paths must stay beneath image_root: {_way_out(root, path, fault)}"
        raise BadSample(RejectReason.MALFORMED_SAMPLE, detail, shown)
    return f"{root}/{path}"


def shown_path(path: str, limit: int = 200) -> str:
    """Return a path from data as messages show it: not all of a long one, and a URL without what may be a signature."""
    if "://" in path:
        path, mark, _ = path.partition("?")
        path = f"{path}?..." if mark else path
    return path[:limit]


def read_image_file(path: str, max_nbytes: int | None, root: str | None = None) -> bytes:
    """Return the bytes of an image file, of which never more than ``max_nbytes`` are read (None: all of them).

    root: where the row's path starts from, for the message. Raises BadSample: MISSING_IMAGE if it is no readable
    regular file, OVERSIZED_SAMPLE above ``max_nbytes``; SourceReadError if the storage does not answer.
    """
    try:
        return read_with_retries(lambda: _read(path, max_nbytes), f"image {shown_path(path)}")
    except BadSample as error:
        if root is None or error.reason is not RejectReason.MISSING_IMAGE:
            raise
        hint = f"; image paths start from image_root = {root}"
        raise BadSample(error.reason, error.detail + hint, error.path) from error


def check_image_nbytes(nbytes: int, max_nbytes: int | None) -> None:
    """Raise BadSample (OVERSIZED_SAMPLE) if an encoded image has more bytes than allowed."""
    if max_nbytes is not None and nbytes > max_nbytes:
        raise BadSample(
            RejectReason.OVERSIZED_SAMPLE, f"{nbytes} encoded bytes are more than data.max_image_nbytes ({max_nbytes})"
        )


def _read(path: str, max_nbytes: int | None) -> bytes:
    try:
        return _read_remote(path, max_nbytes) if is_remote(path) else _read_local(path, max_nbytes)
    except BadSample:
        raise
    except Exception as error:
        # ValueError: a name that the file system cannot spell. ENXIO: a socket.
        unusable = isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno == errno.ENXIO)
        if not (unusable or is_missing(error) or is_denied(error)):
            raise
        why = "permission denied for" if is_denied(error) else "no"
        raise _missing(f"{why} image", path) from error


def _read_local(path: str, max_nbytes: int | None) -> bytes:
    # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _missing("not a regular", path)
        check_image_nbytes(found.st_size, max_nbytes)
        data = file.read() if max_nbytes is None else file.read(max_nbytes + 1)
    check_image_nbytes(len(data), max_nbytes)  # the file may have grown
    return data


def _read_remote(path: str, max_nbytes: int | None) -> bytes:
    fs = filesystem_of(path)
    found = fs.info(path)
    if found["type"] != "file":
        raise _missing("not a regular", path)
    check_image_nbytes(found["size"], max_nbytes)
    return cast(bytes, fs.cat_file(path, end=max_nbytes)) if found["size"] else b""


def _missing(what: str, path: str) -> BadSample:
    return BadSample(RejectReason.MISSING_IMAGE, f"{what} file: {shown_path(path)!r}", shown_path(path))


def _fault_of(path: str) -> str | None:
    if "\0" in path:
        return "it has a NUL byte"
    if _SCHEME.match(path) or "://" in path or "::" in path:
        return _IS_URL
    if path.startswith(("/", "\\")):
        return _IS_ABSOLUTE
    if ".." in re.split(r"[/\\]", unquote(path)):  # a web server takes %2e for a dot
        return "it has '..'"
    return None


def _way_out(root: str, path: str, fault: str) -> str:
    plain = path.removeprefix("file://")
    beneath = plain[len(root) :].lstrip("/")
    if plain.startswith(f"{root}/") and path == shown_path(path) and _fault_of(beneath) is None:
        return f"write {beneath!r}, relative to {root or '/'}"
    if fault == _IS_URL:
        return f"put the image there, and write its path relative to {root or '/'}"
    return f"write it relative to {root or '/'}"
