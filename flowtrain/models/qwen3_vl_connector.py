"""The connector of Qwen3-VL: the mergers, which HF has in the tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from flowtrain.models.connector import ConnectorModule


class Mergers(ConnectorModule):
    """The connector of Qwen3-VL: HF's merger and deepstack mergers of a tower, under their names in it."""

    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {
        f"{merger}.{linear}": style
        for merger in ("merger", "deepstack_merger_list.*")
        for linear, style in (("linear_fc1", "colwise"), ("linear_fc2", "rowwise"))
    }

    def __init__(self, tower: PreTrainedModel) -> None:
        super().__init__()
        self._width, self._unit = int(tower.config.hidden_size), int(tower.config.spatial_merge_size**2)
        self.merger = tower.get_submodule("merger")
        self.deepstack_merger_list = tower.get_submodule("deepstack_merger_list")

    def reset_parameters(self, std: float) -> None:
        """Draw the weights as HF does: normal with deviation ``std``, zero biases, norms of one."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Map rows ``[R, levels * unit * D]`` to embeddings, and the rows of each deepstack level: ``[R, H]`` each."""
        last, *levels = features.split(self._unit * self._width, dim=1)
        mergers = cast(nn.ModuleList, self.deepstack_merger_list)
        merged = self.merger(last.reshape(-1, self._width))
        return (merged, *(merger(level) for merger, level in zip(mergers, levels, strict=True)))


class MergedLevels(ConnectorModule):
    """The connector's place in the backbone if the encoder's side merges: it only separates the levels."""

    def __init__(self, num_levels: int) -> None:
        super().__init__()
        self._num_levels = num_levels

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Separate rows ``[R, levels * H]`` as ``Mergers`` returns them."""
        return features.chunk(self._num_levels, dim=1)
