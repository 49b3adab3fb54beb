"""The Llava family: one vision tower, a two-layer connector, a causal language model."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.connector import Connector
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.export import Processor, build_processor
from flowtrain.models.families.hf_family import HFFamily
from flowtrain.models.image_processing import (
    fixed_output_size,
    load_image_processor,
    pixel_values,
    resized_pixels,
)
from flowtrain.models.llava_config import feature_layer, read_llava_config
from flowtrain.models.towers import image_size, square_patch_size, tower_kind
from flowtrain.models.vision_stage import TowerShape, VisionStage
from flowtrain.models.weights import seeded
from flowtrain.types.samples import ImageLayout

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel


class LlavaFamily(HFFamily):
    """Models of HF's class ``LlavaForConditionalGeneration``: every image becomes the same number of tokens.

    The modules come from one HF checkpoint each, from configurations (random weights), or all from one HF Llava
    checkpoint (``model.path``), FlowTrain's own export included.
    """

    name: ClassVar[str] = "llava"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._tower_kind = tower_kind(self.vision_config, self._encoder_key)
        self._patch_size = square_patch_size(self.vision_config, self._encoder_key)

    def check(self) -> None:
        """See ``Family``."""
        hf_config, _ = self.hf_config, self.image_processor
        hf_config.image_seq_length = self._image_seq_length

    def _read_config(self) -> PreTrainedConfig:
        return read_llava_config(self.config)

    @cached_property
    def _given_processor(self) -> BaseImageProcessor:
        encoder = next(iter(self.config.encoders.values()))
        path = self.config.model.path or encoder.path
        return load_image_processor(path, self.vision_config, encoder.image_processor, self._encoder_key)

    @cached_property
    def image_processor(self) -> BaseImageProcessor:
        """The image processor as the family uses it. Raises ConfigError if it does not fit the tower."""
        return self._given_processor

    @property
    def _image_seq_length(self) -> int:
        """HF's number of tokens of an image."""
        return self._layout.num_tokens

    @cached_property
    def _layout(self) -> ImageLayout:
        """Check that the processor gives all images one size, and that it is the tower's; the layout of that size."""
        size, native_size = fixed_output_size(self.image_processor), image_size(self.vision_config)
        if size is None:
            raise ConfigError(
                f"{self._encoder_key}: {type(self.image_processor).__name__} gives images of varying size; set "
                f"{self._encoder_key}.image_processor.size to a height and a width, or model.family to variable_llava"
            )
        if self._tower_kind.interpolation == "flag" and size != native_size:
            raise ConfigError(
                f"{self._encoder_key}: the image processor gives {size[0]}x{size[1]} pixels (height x width), but the "
                f"tower's image_size is {native_size[0]}x{native_size[1]}; set {self._encoder_key}.image_processor"
            )
        return self._layout_of(*size)

    def _layout_of(self, height: int, width: int) -> ImageLayout:
        """Layout of an image that enters the tower at this size (pixels)."""
        shape, size = self.tower_shape, (height, width)
        num_rows = shape.num_rows(size)
        return ImageLayout(num_patches=shape.num_patches(size), num_rows=num_rows, num_tokens=num_rows)

    @property
    def tower_shape(self) -> TowerShape:
        """See ``Family``."""
        return TowerShape(self.vision_config, self._drops_first)

    @property
    def _drops_first(self) -> bool:
        return bool(self._initial.vision_feature_select_strategy == "default")

    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """The same for every image, since the image processor gives them one size."""
        pixels, limit = resized_pixels(self.image_processor, width, height), self.config.data.max_image_pixels
        if pixels > limit:
            raise ValueError(
                f"{self._encoder_key}.image_processor.size would resize it to {pixels} pixels, which are more than "
                f"data.max_image_pixels ({limit})"
            )
        return self._layout

    def entering_size(self, encoder: str, width: int, height: int) -> tuple[int, int]:
        """The image processor's size."""
        size = fixed_output_size(self.image_processor)
        assert size is not None, "check has refused a processor without one"
        return size

    def feature_dim(self, encoder: str) -> int:
        """The tower's hidden size."""
        return self.vision_config.hidden_size

    def num_encoder_layers(self, encoder: str) -> int:
        """Number of layers up to ``feature_layer``, as in HF's ``hidden_states``: 0 is the embedding."""
        num_layers: int = self.vision_config.num_hidden_layers
        return feature_layer(self._initial) % (num_layers + 1)

    def preprocess(self, encoder: str, image: Image.Image) -> np.ndarray:
        """Pixel values, float32 ``[C, H, W]``."""
        return pixel_values(self.image_processor, image)

    def load_encoder(self, encoder: str) -> VisionEncoder:
        """The tower up to its chosen layer, in the compute type."""
        return VisionEncoder(self._stage_of(self._load_tower().to(getattr(torch, self.config.model.dtype))))

    def encoder_skeleton(self, encoder: str) -> VisionStage:
        """See ``Family``."""
        return self._stage_of(self._tower_skeleton(), trainable=self.config.encoders[encoder].trainable)

    def _stage_of(self, tower: PreTrainedModel, *, trainable: bool = False) -> VisionStage:
        layer, shape = feature_layer(self._initial), self.tower_shape
        return VisionStage(
            tower, feature_layer=layer, drop_first=shape.drop_first, shuffle=shape.shuffle, trainable=trainable
        )

    def _tower_buffers(self, tower: PreTrainedModel) -> nn.Module:
        """Those of the embedding."""
        embedding_class = type(tower.get_submodule("embeddings"))
        return nn.ModuleDict({"embeddings": embedding_class(tower.config)})

    def _new_connector(self) -> Connector:
        """See ``HFFamily``."""
        return Connector(
            self.vision_config.hidden_size,
            self.text_config.hidden_size,
            hidden_act=self._initial.projector_hidden_act,
            bias=self._initial.multimodal_projector_bias,
        )

    def _drawn_connector(self) -> Connector:
        """See ``HFFamily``."""
        with seeded(self.config.seed, "connector"):
            connector = self._new_connector()
            connector.reset_parameters(std=getattr(self.text_config, "initializer_range", 0.02))
        return connector

    def _processor(self) -> Processor:
        """See ``HFFamily``."""
        return build_processor(
            self.hf_config,
            self.image_processor,
            self.tokenizer,
            patch_size=self._patch_size,
            num_prefix_tokens=self._tower_kind.num_prefix_tokens(self.vision_config),
            image_token=self.config.model.image_token,
        )
