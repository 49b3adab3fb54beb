"""The projector between a vision encoder and the backbone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN


class ConnectorModule(nn.Module):
    """Maps feature rows to embeddings. It belongs to the backbone's first stage, and always runs, maybe on no rows.

    Its forward takes features ``[R, D]`` and returns embeddings ``[R, H]``, which replace image tokens; or a tuple of
    these and of further rows ``[R, H]``, which are added at the same tokens after the first decoder layer, the second,
    and so on.
    """

    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {}
    """How tensor parallel ranks split its linear layers (``colwise``, ``rowwise``), by name, with ``*`` for numbers.
    What is not named computes the same on all ranks."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of its parameters, in which it takes features; None without parameters: any."""
        first = next(self.parameters(), None)
        return None if first is None else first.dtype


class Connector(ConnectorModule):
    """Two linear layers with an activation; parameter names and arithmetic of HF's ``LlavaMultiModalProjector``."""

    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {"linear_1": "colwise", "linear_2": "rowwise"}

    def __init__(self, feature_dim: int, hidden_size: int, *, hidden_act: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(feature_dim, hidden_size, bias=bias)
        self.act = ACT2FN[hidden_act]
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=bias)

    def reset_parameters(self, std: float) -> None:
        """Draw the weights as HF does: normal with deviation ``std``, zero biases."""
        for linear in (self.linear_1, self.linear_2):
            nn.init.normal_(linear.weight, std=std)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``[R, D]`` to embeddings ``[R, H]``; R may be 0."""
        return self.linear_2(self.act(self.linear_1(features)))


class NormedConnector(Connector):
    """A norm before the two layers; parameter names and arithmetic of HF's ``InternVLMultiModalProjector``."""

    def __init__(self, feature_dim: int, hidden_size: int, *, hidden_act: str = "gelu") -> None:
        super().__init__(feature_dim, hidden_size, hidden_act=hidden_act)
        self.layer_norm = nn.LayerNorm(feature_dim)

    def forward(self, features: Tensor) -> Tensor:
        """See ``Connector``."""
        return super().forward(self.layer_norm(features))
