"""Times of single operators: the longest of arithmetic, memory traffic and bytes sent, by a rule for each class.

``max(FLOPs / F, bytes / B_mem, bytes / B_net) / efficiency``, with one efficiency for each class. A configuration may
set efficiencies, and a formula of its own for any class (``costs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from flowtrain.config.costs import CostsConfig
from flowtrain.config.formula import Formula
from flowtrain.costs.cluster import DeviceType
from flowtrain.costs.flops import FloatArray

OperatorClass = Literal["matmul", "encoder_matmul", "attention", "norm", "optimizer", "collective", "point_to_point"]
"""``encoder_matmul``: those inside encoders, whose matrices are narrower. ``norm``: also activations, residuals, rotary
positions and the softmax of the loss: all that only moves memory."""
OPERATOR_CLASSES: tuple[OperatorClass, ...] = get_args(OperatorClass)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the device's figures that each class of operators reaches: assumptions where nothing was measured."""

    matmul: float = 0.68
    encoder_matmul: float = 0.52
    attention: float = 0.55
    norm: float = 0.8
    """Of the memory bandwidth."""
    optimizer: float = 0.8
    """Of the memory bandwidth."""
    collective: float = 0.8
    """Of the links' bandwidth."""
    point_to_point: float = 0.8
    """Of the links' bandwidth."""

    @classmethod
    def perfect(cls) -> Efficiency:
        """Return what the device's own figures are."""
        return cls(*(1.0 for _ in fields(cls)))

    def of(self, kind: OperatorClass) -> float:
        """Return that of a class."""
        value: float = getattr(self, kind)
        return value


@dataclass(frozen=True, slots=True)
class Operator:
    """The work of one operator on one device; numbers, or arrays of one shape."""

    kind: OperatorClass
    flops: Any = 0.0
    nbytes: Any = 0.0
    """Read and written in device memory."""
    sent_nbytes: Any = 0.0
    """Sent over a link."""


@dataclass(frozen=True)
class OperatorRules:
    """How long an operator takes on a device. formulas: of classes for which a configuration has one of its own."""

    efficiency: Efficiency = field(default_factory=Efficiency)
    formulas: Mapping[str, Formula] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: CostsConfig, assumed: Efficiency | None = None) -> OperatorRules:
        """Return the rules of a configuration. assumed: efficiencies of classes for which it gives none."""
        given = {kind: share for kind, share in costs.efficiency.model_dump().items() if share is not None}
        formulas = {kind: Formula(text) for kind, text in costs.rules.model_dump().items() if text is not None}
        return cls(replace(assumed or Efficiency(), **given), formulas)

    def seconds(self, operator: Operator, device: DeviceType, link: float | FloatArray | None = None) -> Any:
        """Return seconds of an operator. link: bytes/s of the link that it uses; None: the node's."""
        bandwidth = device.links.node if link is None else link
        share = self.efficiency.of(operator.kind)
        formula = self.formulas.get(operator.kind)
        if formula is not None:
            values = {
                "flops": operator.flops,
                "nbytes": operator.nbytes,
                "sent_nbytes": operator.sent_nbytes,
                "F": device.flops,
                "B_mem": device.bandwidth,
                "B_net": bandwidth,
                "efficiency": share,
            }
            return formula(values, np.maximum, np.minimum)
        amounts = (operator.flops, device.flops), (operator.nbytes, device.bandwidth), (operator.sent_nbytes, bandwidth)
        # Most operators have one or two of the three; planning asks for very many.
        slowest: Any = None
        for amount, speed in amounts:
            if isinstance(amount, float) and amount == 0.0:
                continue
            slowest = amount / speed if slowest is None else np.maximum(slowest, amount / speed)
        return 0.0 if slowest is None else slowest / share

    def link_share(self, kind: Literal["collective", "point_to_point"]) -> float:
        """Return the share of a link's bandwidth that a class reaches, for callers that count bytes themselves."""
        formula, share = self.formulas.get(kind), self.efficiency.of(kind)
        if formula is None:
            return share
        work = {"flops": 0.0, "nbytes": 0.0, "sent_nbytes": 1.0}
        return 1.0 / float(formula({**work, "F": 1.0, "B_mem": 1.0, "B_net": 1.0, "efficiency": share}))
