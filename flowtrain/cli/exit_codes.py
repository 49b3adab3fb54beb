"""How commands end."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from flowtrain.errors import ConfigError, FlowTrainError

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""A disk that is full or broken can fail any read or write, so that no traceback helps."""


@contextmanager
def errors_to_exit_codes() -> Iterator[None]:
    """Print one message on standard error and exit: 2 if the input was refused, 1 if the command failed."""
    try:
        yield
    except FlowTrainError as error:
        _show(error, str(error))
        raise typer.Exit(EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED) from error
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _show(error, f"{error}: the disk is full or broken; make room on it, or use another")
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        _show(error, "interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from error


def _show(error: BaseException, text: str) -> None:
    """Print a message, and the notes that were added to its error."""
    for line in (text, *getattr(error, "__notes__", ())):
        typer.echo(f"flowtrain: {line}", err=True)
