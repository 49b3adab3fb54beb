"""The Qwen3-VL family: images at their own size, deepstack rows, positions of three axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from transformers.models.auto.video_processing_auto import get_video_processor_config

from flowtrain.config.model import ModelConfig
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.errors import ConfigError
from flowtrain.models.connector import ConnectorModule
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.families.hf_family import HFFamily
from flowtrain.models.image_processing import processor_or
from flowtrain.models.initial_weights import LazyTensors
from flowtrain.models.processor_files import ProcessorFiles
from flowtrain.models.qwen3_vl_config import QWEN3_VL_NAMES, read_qwen3_vl_config
from flowtrain.models.qwen3_vl_connector import MergedLevels, Mergers
from flowtrain.models.qwen3_vl_images import UnitImages, check_processor, usual_processor
from flowtrain.models.qwen3_vl_vision import Qwen3VisionShape, Qwen3VisionStage
from flowtrain.models.tokenizer import ensure_image_token, load_tokenizer
from flowtrain.models.weights import PartNames, seeded
from flowtrain.types.samples import ImageLayout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

_FRAME = ("<|vision_start|>", "<|vision_end|>")
"""Tokens around an image; they are text."""
_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
_DEFAULT_IMAGE_TOKEN = ModelConfig().image_token


class Qwen3VLFamily(HFFamily):
    """Dense models of HF's class ``Qwen3VLForConditionalGeneration``; no videos, and no mixtures of experts.

    An image keeps its aspect ratio, and about its size, as HF's processor resizes it. A feature row is one merge unit
    of patches and becomes one token. The connector is the merger and the deepstack mergers, in the backbone's first
    stage, whose first decoder layers the deepstack rows enter. A frozen connector runs with the encoder instead, except
    in ``mode: monolithic``, so that narrower rows travel.

    The modules come from configurations (random weights) or all from one HF checkpoint (``model.path``), FlowTrain's
    own export included.
    """

    name: ClassVar[str] = "qwen3_vl"
    image_hint: ClassVar[str | None] = (
        "image_processor: {size: {shortest_edge: 65_536, longest_edge: 2_097_152}} # pixels of an image"
    )
    part_names: ClassVar[PartNames] = QWEN3_VL_NAMES

    def _read_config(self) -> PreTrainedConfig:
        return read_qwen3_vl_config(self.config)

    def check(self) -> None:
        """See ``Family``."""
        _ = self.hf_config, self.image_processor

    # --- tokens -------------------------------------------------------------------------------------------------------

    @property
    def image_token(self) -> str:
        """``model.image_token`` if it is set, else Qwen's own."""
        token = self.config.model.image_token
        return _IMAGE if token == _DEFAULT_IMAGE_TOKEN else token

    @property
    def image_text(self) -> str:
        """See ``Family``."""
        return self.image_token.join(_FRAME)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # type: ignore[override]  # read at the first use
        """See ``Family``; it has all special tokens that HF's processor asks for."""
        tokenizer = load_tokenizer(self._tokenizer_path(), self.config.model, self.image_token)
        own = getattr(tokenizer, "image_token", _IMAGE)
        if self.image_token != own:
            raise ConfigError(
                f"model.image_token is {self.image_token!r}, and Qwen3-VL's processor expands the tokenizer's {own!r}; "
                + ("leave the key out" if own == _IMAGE else f"set it to {own!r}")
            )
        for token in (*_FRAME, _VIDEO):
            ensure_image_token(tokenizer, token)
        return tokenizer

    @cached_property
    def hf_config(self) -> Any:
        """See ``HFFamily``; a whole checkpoint keeps its other special tokens."""
        whole = super().hf_config
        if self.config.model.path is None:
            names = {"vision_start_token_id": _FRAME[0], "vision_end_token_id": _FRAME[1], "video_token_id": _VIDEO}
            for name, token in names.items():
                setattr(whole, name, self.tokenizer.convert_tokens_to_ids(token))
        return whole

    # --- images -------------------------------------------------------------------------------------------------------

    @cached_property
    def image_processor(self) -> Qwen2VLImageProcessorPil:
        """HF's image processor; raises ConfigError if it does not fit the tower."""
        settings = self.config.encoders[self.encoder_names[0]].image_processor
        processor = processor_or(
            lambda: usual_processor(self.vision_config), self.config.model.path, settings, self._encoder_key
        )
        check_processor(processor, self.vision_config, self._encoder_key, self.config.data.max_image_pixels)
        return cast("Qwen2VLImageProcessorPil", processor)

    @cached_property
    def _images(self) -> UnitImages:
        return UnitImages(self.image_processor)

    @property
    def tower_shape(self) -> Qwen3VisionShape:
        """See ``Family``."""
        merged = int(self.vision_config.out_hidden_size) if self._merges_in_encoder else None
        return Qwen3VisionShape(self.vision_config, merged)

    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """See ``Family``; by the HF processor's own rule."""
        return self._layout_of(self._images.resized(width, height))

    def tile_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """See ``Family``."""
        return self._layout_of((height, width))

    def _layout_of(self, size: tuple[int, int]) -> ImageLayout:
        """Layout of an image that enters the tower at this height and width."""
        shape, merge = self.tower_shape, self.vision_config.spatial_merge_size
        rows, columns = shape.grid(size)
        num_rows = shape.num_rows(size)
        return ImageLayout(shape.num_patches(size), num_rows, num_rows, grid=(rows // merge, columns // merge))

    def entering_size(self, encoder: str, width: int, height: int) -> tuple[int, int]:
        """See ``Family``."""
        return self._images.resized(width, height)

    def preprocess(self, encoder: str, image: Image.Image) -> np.ndarray:
        """See ``Family``: float32 ``[C, H, W]``, which the tower cuts into patches."""
        return self._images.pixels(image)

    # --- modules ------------------------------------------------------------------------------------------------------

    @property
    def _merges_in_encoder(self) -> bool:
        """Whether the connector, being frozen, runs with the encoder."""
        return "connector" in self.config.model.freeze and self.config.settled_mode != "monolithic"

    def feature_dim(self, encoder: str) -> int:
        """See ``Family``."""
        return self.tower_shape.feature_width

    def num_encoder_layers(self, encoder: str) -> int:
        """All of the tower's layers."""
        return int(self.vision_config.num_hidden_layers)

    def _shapes(self) -> ModelSpec:
        spec, shape, name = super()._shapes(), self.tower_shape, self.encoder_names[0]
        hidden, out, levels = int(self.vision_config.hidden_size), spec.backbone.hidden_size, shape.num_levels
        width = shape.unit * hidden
        vision = replace(spec.encoders[name], patches_per_row=shape.unit, levels=levels)
        # The first merger's norm is over patches, those of the others over units.
        norms = 2 * (hidden + (levels - 1) * width)
        connector = ConnectorSpec(levels * width, width, out, norm=True, norm_parameters=norms, levels=levels)
        if self._merges_in_encoder:
            outside = vision.outside_parameters + connector.num_parameters
            merging = levels * width * (width + out)
            vision = replace(vision, outside_parameters=outside, merging_matmul_parameters=merging)
            connector = ConnectorSpec(shape.feature_width, 0, 0, bias=False)
        backbone = replace(spec.backbone, deepstack_layers=min(levels - 1, spec.backbone.num_layers))
        return ModelSpec({name: vision}, connector, backbone)

    def load_encoder(self, encoder: str) -> VisionEncoder:
        """The tower in the compute type, with the connector if that is frozen."""
        tower, connector = self._load_tower(), self._load_mergers() if self._merges_in_encoder else None
        return VisionEncoder(Qwen3VisionStage(tower), connector).to(getattr(torch, self.config.model.dtype))

    def encoder_skeleton(self, encoder: str) -> Qwen3VisionStage:
        """See ``Family``."""
        return Qwen3VisionStage(self._tower_skeleton(), trainable=self.config.encoders[encoder].trainable)

    def _new_connector(self) -> ConnectorModule:
        if self._merges_in_encoder:
            return MergedLevels(self.tower_shape.num_levels)
        return Mergers(self._tower_skeleton())

    def _load_connector(self) -> ConnectorModule:
        assert not self._merges_in_encoder, "it has no weights"
        return self._load_mergers()

    def _load_mergers(self) -> Mergers:
        """The connector with its first values, float32, on the CPU."""
        origin = self._origin("connector", "model", None)
        mergers = Mergers(self._tower_skeleton()).to_empty(device="cpu")
        if origin.is_random:
            with seeded(origin.seed, origin.module):
                mergers.reset_parameters(std=self.vision_config.initializer_range)
        else:
            mergers.load_state_dict(origin.checkpoint_state())
        return mergers

    # --- the whole ----------------------------------------------------------------------------------------------------

    def _joined_weights(self, state: Mapping[str, Tensor]) -> LazyTensors:
        """See ``HFFamily``; a frozen connector has no weights in the backbone."""
        if self._merges_in_encoder:
            own = {f"connector.{name}": tensor for name, tensor in self._load_mergers().state_dict().items()}
            trained = state
            state = LazyTensors([*trained, *own], lambda name: own[name] if name in own else trained[name])
        return super()._joined_weights(state)

    def _processor(self) -> ProcessorFiles:
        """See ``HFFamily``."""
        path = self.config.model.path
        video = {} if path is None else get_video_processor_config(path)
        if "video_processor_type" not in video:
            names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
            video = {name: getattr(self.image_processor, name) for name in names}
            video["video_processor_type"] = "Qwen3VLVideoProcessor"
        return ProcessorFiles("Qwen3VLProcessor", self.image_processor, self.tokenizer, video)
