"""The base of every configuration model: frozen, unknown keys refused, numbers that every part can hold."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MAX_INT = 2**53
"""Beyond it a number is not exact as a float, and a product of two leaves 64 bits."""
MAX_DURATION_S = 1e7
"""Of every limit on waiting: 115 days. Clocks, sockets and locks of the system refuse longer ones."""


def meant(value: object, choices: Iterable[str]) -> str:
    """End a message about a word that is none of ``choices`` with the one most like it; empty if none is like it."""
    near = difflib.get_close_matches(value, list(choices), n=1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


class ConfigModel(BaseModel):
    """A configuration section; unknown keys and infinite numbers are errors, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _fits_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse integers that no array and no clock could hold; a seed is no number to count with."""
        if isinstance(value, int) and value > MAX_INT and info.field_name != "seed":
            raise PydanticCustomError("less_than_equal", "too large", {"le": MAX_INT})
        return value
