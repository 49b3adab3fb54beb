"""Compiles the scheduler's loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function for the types that it is called with, and keep the code on disk where there is room for it.

    The code on disk is known by the function's own file alone, so a compiled function calls only those of its file.
    """
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:  # neither the package's directory nor the user's can be written to: compile in every process
        return cast(F, njit(function))
