"""Retries of reads from local and remote storage, and which errors are worth a retry."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from flowtrain.config.secrets import without_queries
from flowtrain.errors import DataError, FlowTrainError, SourceReadError

RETRY_DELAYS_S = (0.1, 0.5, 2.0)
"""Waits between attempts to read after an error that may pass."""

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that mean that the file does not exist; most others mean that the storage does not answer."""
DENIED = (errno.EACCES, errno.EPERM)

_REMOTE_PACKAGES = frozenset(
    [
        "aiobotocore",
        "aiohttp",
        "botocore",
        "fsspec",
        "gcsfs",
        "google",
        "http",
        "httpcore",
        "httpcore2",
        "httpx",
        "httpx2",
        "huggingface_hub",
        "requests",
        "s3fs",
        "urllib3",
    ]
)
"""Packages whose own exceptions mean that a server failed; few of them are OSErrors."""
_PASSING_STATUS = (408, 425, 429)
"""HTTP states below 500 that pass."""

_T = TypeVar("_T")


class RetryTally:
    """Counts the reads of this process that were tried again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self) -> None:
        """Count one."""
        with self._lock:
            self._count += 1

    def take(self) -> int:
        """Return the count since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


RETRIES = RetryTally()


def read_with_retries(read: Callable[[], _T], what: str) -> _T:
    """Call ``read``; retry a few times after an error that may pass.

    Raises SourceReadError that names ``what`` when it does not pass, DataError for a missing file or a denied
    permission. Errors that do not come from storage are raised unchanged.
    """
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            return read()
        except FlowTrainError:
            raise
        except Exception as error:
            if (lasting := _lasting_fault(error)) is not None:
                raise DataError(f"{what}: {lasting}") from error
            if not _may_pass(error):
                raise
            if delay_s is None:
                attempts = len(RETRY_DELAYS_S) + 1
                raise SourceReadError(
                    f"cannot read {what} after {attempts} attempts: {without_queries(str(error))}; check the storage, "
                    "then resume the run"
                ) from error
            RETRIES.add()
            time.sleep(delay_s)
    raise AssertionError("unreachable")


def is_missing(error: BaseException) -> bool:
    """Whether an error means that the file does not exist."""
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return not _is_unreachable(error.__cause__)
    return (isinstance(error, OSError) and error.errno in ABSENT) or _status(error) in (404, 410)


def is_denied(error: BaseException) -> bool:
    """Whether an error means that this user may not read the file."""
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno in DENIED):
        return True
    return _status(error) in (401, 403) or (_is_remote(error) and "Credentials" in type(error).__name__)


def _lasting_fault(error: Exception) -> str | None:
    """Say what is wrong if another attempt cannot help; None otherwise."""
    if is_missing(error):
        return "no such file or directory; restore it, or correct the path in data"
    if is_denied(error):
        return (
            "permission denied; grant read access to it (remote storage takes its credentials from the environment: "
            "AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN)"
        )
    return None


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None and 400 <= status < 500 and status not in _PASSING_STATUS:
        return False
    return isinstance(error, OSError) or _is_remote(error)


def _is_unreachable(cause: BaseException | None) -> bool:
    """Whether a server did not answer; fsspec calls a file missing then, too."""
    if cause is None or not _is_remote(cause) or "NotFound" in type(cause).__name__:
        return False
    status = _status(cause)
    return status is None or status >= 500 or status in _PASSING_STATUS


def _is_remote(error: BaseException) -> bool:
    return any(cls.__module__.split(".")[0] in _REMOTE_PACKAGES for cls in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a remote library carries, None without one."""
    if not _is_remote(error):
        return None
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return found if isinstance(found, int) else None
