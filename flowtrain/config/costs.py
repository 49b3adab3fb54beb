"""Rules by which times are predicted where nothing was measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from flowtrain.config.base import ConfigModel
from flowtrain.config.formula import NAMES, Formula

_ONE_OF_EACH = dict.fromkeys(NAMES, 1.0)


def _is_formula(text: str) -> str:
    try:
        value = float(Formula(text)(_ONE_OF_EACH))
    except (ArithmeticError, TypeError) as error:
        raise ValueError(f"{text!r} has no value where all names are 1 ({error})") from error
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{text!r} is {value:g} where all names are 1; a time must be above 0 and finite")
    return text


Share = Annotated[float, Field(gt=0, le=1)]
Rule = Annotated[str, AfterValidator(_is_formula)]


class EfficienciesConfig(ConfigModel):
    """Shares of a device's figures that operators reach; None: as assumed (docs/allocator.md)."""

    matmul: Share | None = None
    encoder_matmul: Share | None = None
    attention: Share | None = None
    norm: Share | None = None
    optimizer: Share | None = None
    collective: Share | None = None
    point_to_point: Share | None = None


class RulesConfig(ConfigModel):
    """Seconds of an operator, as a formula of ``flops``, ``nbytes``, ``sent_nbytes``, ``F``, ``B_mem``, ``B_net`` and
    ``efficiency``; None: ``max(flops / F, nbytes / B_mem, sent_nbytes / B_net) / efficiency``."""

    matmul: Rule | None = None
    encoder_matmul: Rule | None = None
    attention: Rule | None = None
    norm: Rule | None = None
    optimizer: Rule | None = None
    collective: Rule | None = None
    point_to_point: Rule | None = None


class CostsConfig(ConfigModel):
    """How plans, simulations and emulated devices count time; a profile's measured times come before them."""

    efficiency: EfficienciesConfig = EfficienciesConfig()
    rules: RulesConfig = RulesConfig()
