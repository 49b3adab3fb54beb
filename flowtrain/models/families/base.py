"""A family adapter: the interface through which FlowTrain uses a vision-language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from PIL import Image

from flowtrain.config.run import RunConfig
from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.costs.trained import with_frozen
from flowtrain.costs.training_setup import DTYPE_NBYTES
from flowtrain.models.export import MAX_SHARD_NBYTES
from flowtrain.models.initial_weights import InitialWeights, materialize
from flowtrain.types.samples import ImageLayout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from flowtrain.models.backbone import Backbone
    from flowtrain.models.encoder import VisionEncoder
    from flowtrain.models.encoder_stage import EncoderShape, EncoderStage


def encoder_prefix(encoder: str) -> str:
    """Return what the names of an encoder's weights begin with in a checkpoint."""
    return f"encoders.{encoder}."


class Family(ABC):
    """Splits an HF vision-language model into encoders, connector and backbone, and joins them again.

    An adapter is cheap to build: it reads HF configurations, never weights. Tokenizer and image processor are read when
    they are first used, so a process opens only what its module needs; ``check`` reads both.
    """

    name: ClassVar[str]
    image_hint: ClassVar[str | None] = None
    """What bounds an image's tokens: a key of an encoder with a value and a comment, for a starting configuration."""
    encoder_names: tuple[str, ...]
    """Names of the run's encoders."""
    tokenizer: PreTrainedTokenizerBase
    """Has the image token and the chat template."""
    image_token_id: int
    text_config: PreTrainedConfig
    """HF configuration of the backbone, as trained."""
    vision_config: PreTrainedConfig
    """HF configuration of the encoder, as trained."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.encoder_names = tuple(config.encoders)

    @abstractmethod
    def check(self) -> None:
        """Read tokenizer and image processor; raises ConfigError if parts of the configuration do not fit together."""

    @property
    def image_text(self) -> str:
        """What ``<image>`` becomes before it is expanded: the image token, perhaps between tokens that frame it."""
        return str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))

    @property
    def prompt_image(self) -> str:
        """What HF's processor takes for an image in a prompt: ``image_text``, unless it adds the frame itself."""
        return self.image_text

    @abstractmethod
    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """Patches, feature rows and tokens of an image of this size (pixels); nothing is decoded.

        Raises ValueError, which names the rule, for a size that ``preprocess`` cannot take.
        """

    @abstractmethod
    def entering_size(self, encoder: str, width: int, height: int) -> tuple[int, int]:
        """Height and width (pixels) at which an image of this size, or each of its tiles, enters the tower."""

    def tile_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """Layout of what enters the tower at this size (pixels): an image, or one of its tiles."""
        return self.image_layout(encoder, width, height)

    @property
    @abstractmethod
    def tower_shape(self) -> EncoderShape:
        """What images become in the encoder."""

    @abstractmethod
    def feature_dim(self, encoder: str) -> int:
        """Width of one feature row."""

    @abstractmethod
    def num_encoder_layers(self, encoder: str) -> int:
        """Number of the tower's layers that are computed: up to the hidden state that becomes the features."""

    @property
    def model_spec(self) -> ModelSpec:
        """The model's shapes for the cost model, and what is trained; a tower counts only its computed layers."""
        spec, freeze = self._shapes(), self.config.model.freeze
        if not freeze:
            return spec
        trains_encoders = self.config.trains_encoders
        return with_frozen(spec, self.weight_shapes(), self.tied_weights(), freeze, trains_encoders=trains_encoders)

    def _shapes(self) -> ModelSpec:
        """The model's shapes, as if all of it were trained."""
        backbone = from_hf_text_config(self.text_config.to_dict())
        vision = from_hf_vision_config(self.vision_config.to_dict())
        name = self.encoder_names[0]
        vision = replace(vision, num_layers=self.num_encoder_layers(name))
        connector = ConnectorSpec(self.feature_dim(name), backbone.hidden_size, backbone.hidden_size)
        return ModelSpec({name: vision}, connector, backbone)

    def pooled_dim(self, encoder: str) -> int:
        """Width of a feature row in the pool: all of it, unless emulated devices have ``emulated.feature_share``."""
        emulation = self.config.emulation
        share = 1.0 if emulation is None else emulation.feature_share
        return max(1, round(self.feature_dim(encoder) * share))

    def row_nbytes(self, encoder: str) -> int:
        """Bytes of one feature row in the pool, in the compute type."""
        return self.pooled_dim(encoder) * DTYPE_NBYTES[self.config.model.dtype]

    @abstractmethod
    def preprocess(self, encoder: str, image: Image.Image) -> np.ndarray:
        """Pixel values of one image, float32, as HF's processor gives it: ``[C, H, W]``, or tiles ``[T, C, H, W]``."""

    @abstractmethod
    def load_encoder(self, encoder: str) -> VisionEncoder:
        """The frozen encoder in the compute type, on the CPU."""

    @abstractmethod
    def encoder_skeleton(self, encoder: str) -> EncoderStage:
        """What is computed of an encoder, float32, on the device ``meta``; trainable if the configuration says so."""

    @abstractmethod
    def encoder_weights(self, encoder: str) -> InitialWeights:
        """The first values of that skeleton, the same that ``load_encoder`` has, in float32."""

    @abstractmethod
    def backbone_skeleton(self) -> Backbone:
        """Connector and language model, float32, on the device ``meta`` (without memory), in training mode.

        What ``model.freeze`` stands for does not require gradients.
        """

    @abstractmethod
    def backbone_weights(self) -> InitialWeights:
        """The skeleton's first values; random ones depend on ``config.seed`` and the names alone."""

    @abstractmethod
    def check_stored_weights(self) -> None:
        """Raise ConfigError if weights of local directories are missing or have another shape; reads headers alone.

        Directories without any weights are left out: the machines that load them may have more there.
        """

    def merged_connector(self) -> Mapping[str, Tensor]:
        """First values of a frozen connector that runs with the encoder, float32, as ``connector.<name>``.

        Each is read when it is looked up. Empty if the connector is in the backbone.
        """
        return {}

    def load_backbone(self) -> Backbone:
        """The whole of connector and language model with float32 master weights, on the CPU, in training mode."""
        backbone = self.backbone_skeleton()
        materialize(backbone, torch.device("cpu"), self.backbone_weights(), from_checkpoint=False)
        return backbone

    @abstractmethod
    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError, naming the key of ``backbone``, if ``size`` ranks cannot share the layers.

        In ``mode: monolithic`` these are the encoder's layers too.
        """

    @abstractmethod
    def shallow(self, num_layers: int) -> Self:
        """The same model with ``num_layers`` decoder layers and random weights, for measuring; loads no checkpoint."""

    @abstractmethod
    def load_joined(self, state: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
        """The whole model as its HF class in float32, with the initial weights or these, as for ``export``."""

    @abstractmethod
    def weight_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the backbone's weights under the names of ``Backbone.state_dict()``; nothing is loaded."""

    @abstractmethod
    def tied_weights(self) -> dict[str, str]:
        """Further names of those of ``weight_shapes`` that have several: ``{name: first name}``; nothing is loaded."""

    @abstractmethod
    def export(
        self,
        state: Mapping[str, Tensor],
        to: Path,
        dtype: torch.dtype = torch.float32,
        max_shard_nbytes: int = MAX_SHARD_NBYTES,
    ) -> None:
        """Write an HF directory (safetensors, processor, tokenizer) with these weights.

        state: full tensors under the names of ``Backbone.state_dict()``, and those of a trained encoder's skeleton
        after ``encoder_prefix``; each is looked up once, just before it is written.
        """
