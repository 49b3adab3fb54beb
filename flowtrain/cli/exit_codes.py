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
        typer.echo(f"flowtrain: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED) from error
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        typer.echo(f"flowtrain: {error}: the disk is full or broken; make room on it, or use another", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        typer.echo("flowtrain: interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error
