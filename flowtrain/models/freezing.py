"""Which parameters of a backbone are trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flowtrain.config.parameter_names import ParameterNames
from flowtrain.models.stage import tied_names


def freeze_parameters(backbone: nn.Module, freeze: Sequence[str]) -> None:
    """Let the parameters that ``model.freeze`` stands for require no gradients, in a whole backbone.

    Entries that match nothing are ignored: a start refuses them (``config/parameter_checks.py``), and a shallow twin
    has fewer layers. Call it before the backbone is cut into stages, whose parameters stay as they are.
    """
    parameters = dict(backbone.named_parameters())
    for name in ParameterNames.of(parameters, tied_names(backbone)).frozen(freeze):
        parameters[name].requires_grad_(False)
