"""The Qwen3-VL family: images at their own size, deepstack rows, positions of three axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image

from flowtrain.config.model import ModelConfig
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.errors import ConfigError
from flowtrain.models.connector import ConnectorModule
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.families.hf_family import HFFamily
from flowtrain.models.image_processing import processor_or
from flowtrain.models.initial_weights import JoinedWeights, LazyTensors, materialize, whole_tensors
from flowtrain.models.processor_files import ProcessorFiles, video_settings
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
_CPU = torch.device("cpu")


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
        backbone = replace(spec.backbone, deepstack_layers=min(levels - 1, spec.backbone.num_layers))
        whole = ModelSpec({name: vision}, connector, backbone)
        return whole.with_merging_encoder() if self._merges_in_encoder else whole

    def load_encoder(self, encoder: str) -> VisionEncoder:
        """The tower in the compute type, with the connector if that is frozen."""
        stage = Qwen3VisionStage(self._tower_skeleton())
        materialize(stage, _CPU, self.encoder_weights(encoder), from_checkpoint=False)
        connector: Mergers | None = None
        if self._merges_in_encoder:
            connector = self._connector_skeleton()
            materialize(connector, _CPU, self._connector_weights(), from_checkpoint=False)
        return VisionEncoder(stage, connector).to(getattr(torch, self.config.model.dtype))

    def encoder_skeleton(self, encoder: str) -> Qwen3VisionStage:
        """See ``Family``."""
        return Qwen3VisionStage(self._tower_skeleton(), trainable=self.config.encoders[encoder].trainable)

    def _new_connector(self) -> ConnectorModule:
        if self._merges_in_encoder:
            return MergedLevels(self.tower_shape.num_levels)
        return self._connector_skeleton()

    def _connector_skeleton(self) -> Mergers:
        return Mergers(self._tower_skeleton())

    def _drawn_connector(self) -> Mergers:
        mergers = self._connector_skeleton().to_empty(device=_CPU)
        with seeded(self.config.seed, "connector"):
            mergers.reset_parameters(std=self.vision_config.initializer_range)
        return mergers

    def merged_connector(self) -> Mapping[str, Tensor]:
        """See ``Family``."""
        if not self._merges_in_encoder:
            return {}
        shapes = {f"connector.{name}": each.shape for name, each in self._connector_skeleton().state_dict().items()}
        return whole_tensors(JoinedWeights({"connector": self._connector_weights()}), shapes)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def _joined_weights(self, state: Mapping[str, Tensor]) -> LazyTensors:
        """See ``HFFamily``. state: may lack a connector that is not in the backbone."""
        merged = self.merged_connector()
        return super()._joined_weights(
            LazyTensors([*state, *merged], lambda name: state[name] if name in state else merged[name])
        )

    def _processor(self) -> ProcessorFiles:
        """See ``HFFamily``."""
        names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
        usual = {name: getattr(self.image_processor, name) for name in names}
        usual["video_processor_type"] = "Qwen3VLVideoProcessor"
        video = video_settings(self.config.model.path, usual)
        return ProcessorFiles("Qwen3VLProcessor", self.image_processor, self.tokenizer, video)
