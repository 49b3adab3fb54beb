"""The trainable projector between a vision encoder and the backbone."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN


class Connector(nn.Module):
    """Two linear layers with an activation; parameter names and arithmetic of HF's ``LlavaMultiModalProjector``."""

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
