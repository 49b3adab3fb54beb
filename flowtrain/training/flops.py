"""Model FLOPs of a microbatch, by the cost model, from the network that is really trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from flowtrain.costs.flops import backbone_training_flops, connector_training_flops
from flowtrain.costs.hf_config import from_hf_text_config
from flowtrain.costs.model_spec import ConnectorSpec
from flowtrain.training.batch import PackedBatch

if TYPE_CHECKING:
    from flowtrain.models.backbone import Backbone


class FlopsCounter:
    """Counts training FLOPs of connector and language model; freeze: modules that are not trained."""

    def __init__(self, model: Backbone, freeze: Collection[str]) -> None:
        first, second = model.connector.linear_1, model.connector.linear_2
        self.connector = ConnectorSpec(first.in_features, first.out_features, second.out_features)
        self.backbone = from_hf_text_config(model.language_model.config.to_dict())
        self.freeze = freeze

    def count(self, batch: PackedBatch) -> float:
        """FLOPs of forward and backward; the weightless microbatch counts none."""
        if batch.num_samples == 0:
            return 0.0
        num_rows = batch.features.shape[0]
        return backbone_training_flops(self.backbone, batch.sequence_lengths, self.freeze) + connector_training_flops(
            self.connector, num_rows, self.freeze
        )
