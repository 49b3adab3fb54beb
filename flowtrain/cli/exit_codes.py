"""How commands end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from flowtrain.errors import ConfigError, FlowTrainError

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


@contextmanager
def errors_to_exit_codes() -> Iterator[None]:
    """Print one message on standard error and exit: 2 if the input was refused, 1 if the command failed."""
    try:
        yield
    except FlowTrainError as error:
        typer.echo(f"flowtrain: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        typer.echo("flowtrain: interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error
