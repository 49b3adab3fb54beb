"""The base of every configuration model: frozen, unknown keys refused, numbers that every part can hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MAX_INT = 2**53
"""Beyond it a number is not exact as a float, and a product of two leaves 64 bits."""
MAX_DURATION_S = 1e7
"""Of every limit on waiting: 115 days. Clocks, sockets and locks of the system refuse longer ones."""


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
