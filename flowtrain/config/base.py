"""The base of every configuration model: frozen, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A configuration section; unknown keys and infinite numbers are errors, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True, allow_inf_nan=False
    )
