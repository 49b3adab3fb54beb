"""Compiles the scheduler's loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function for the types of its arguments, and cache the code on disk where a directory is writable.

    The cache notices changes of the function's own file only, so a compiled function calls only functions of its file.
    """
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:  # neither the package's nor the user's cache directory is writable: compile in every process
        return cast(F, njit(function))
