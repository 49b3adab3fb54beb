"""The shapes of a benchmark's own model, by which the trainer partitions it."""

from __future__ import annotations

from flowtrain.costs.hf_config import from_hf_text_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.models.backbone import Backbone


class TextSource:
    """Base of a ``BackboneSource`` whose model has no encoder."""

    def backbone_skeleton(self) -> Backbone:
        """See ``BackboneSource``."""
        raise NotImplementedError

    @property
    def model_spec(self) -> ModelSpec:
        """See ``BackboneSource``."""
        skeleton = self.backbone_skeleton()
        assert skeleton.connector is not None
        backbone = from_hf_text_config(skeleton.language_model.config.to_dict())
        width = skeleton.connector.linear_1.in_features
        return ModelSpec({}, ConnectorSpec(width, backbone.hidden_size, backbone.hidden_size), backbone)
