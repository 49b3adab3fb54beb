"""The InternVL family: images in tiles, pixel shuffle on the encoder's side, a connector that begins with a norm."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from transformers import GotOcr2ImageProcessorPil

from flowtrain.config.model import ModelConfig
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.errors import ConfigError
from flowtrain.models.connector import Connector, NormedConnector
from flowtrain.models.families.llava import LlavaFamily
from flowtrain.models.image_processing import fixed_output_size, tile_values
from flowtrain.models.internvl_config import read_internvl_config, shuffle_factor
from flowtrain.models.processor_files import ProcessorFiles, image_settings, video_settings
from flowtrain.models.tokenizer import load_named_tokenizer
from flowtrain.models.towers import patch_grid
from flowtrain.models.vision_stage import TowerShape
from flowtrain.types.samples import ImageLayout

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
"""Names by which HF's processor knows the tokenizer's special tokens, and InternVL's own tokens."""
_TILED = {"crop_to_patches": True}
"""HF's ``InternVLProcessor`` asks for it, whatever the image processor's own setting is."""
_DEFAULT_IMAGE_TOKEN = ModelConfig().image_token


class InternVLFamily(LlavaFamily):
    """Models of HF's class ``InternVLForConditionalGeneration`` (InternVL3, InternVL3.5); no videos.

    An image is cut into tiles by its aspect ratio, as HF's processor does it, and a thumbnail of the whole is added.
    The encoder computes each tile like an image of its own; its feature rows are those after pixel shuffle. Tokens that
    frame an image (``<img>``, ``</img>``) are text.

    The modules come from one HF checkpoint each, from configurations (random weights), or all from one HF checkpoint
    (``model.path``), FlowTrain's own export included.
    """

    name: ClassVar[str] = "internvl"
    image_hint: ClassVar[str | None] = "image_processor: {max_patches: 6} # the most tiles of an image"

    def _read_config(self) -> PreTrainedConfig:
        return read_internvl_config(self.config)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # type: ignore[override]  # read at the first use
        """See ``Family``; it has all special tokens that HF's processor asks for."""
        tokenizer = load_named_tokenizer(self._tokenizer_path(), self.config.model, _TOKENS)
        given, own = self.config.model.image_token, str(tokenizer.context_image_token)
        if given not in (_DEFAULT_IMAGE_TOKEN, own):
            raise ConfigError(
                f"model.image_token ({given!r}) is not the tokenizer's context_image_token ({own!r}), which is the one "
                "that InternVL's processor expands; leave the key out"
            )
        return tokenizer

    @property
    def image_token(self) -> str:
        """See ``HFFamily``; the tokenizer's own."""
        return str(self.tokenizer.context_image_token)

    @property
    def image_text(self) -> str:
        """See ``Family``."""
        start, end = self.tokenizer.start_image_token, self.tokenizer.end_image_token
        return f"{start}{self.image_token}{end}"

    @property
    def prompt_image(self) -> str:
        """See ``Family``."""
        return str(self.tokenizer.context_image_token)

    @cached_property
    def image_processor(self) -> GotOcr2ImageProcessorPil:
        """See ``LlavaFamily``; raises ConfigError if it cuts no tiles, or tiles that pixel shuffle cannot join."""
        processor, key = self._given_processor, f"{self._encoder_key}.image_processor"
        if not isinstance(processor, GotOcr2ImageProcessorPil):
            raise ConfigError(
                f"{key}: {type(processor).__name__} cuts no tiles; InternVL needs a GotOcr2ImageProcessor"
            )
        if self.config.encoders[self.encoder_names[0]].image_processor.get("crop_to_patches") is False:
            raise ConfigError(
                f"{key}.crop_to_patches (false): HF's InternVLProcessor always cuts tiles; set {key}.max_patches to 1 "
                "instead, for one tile an image"
            )
        if not processor.do_resize:
            raise ConfigError(f"{key}.do_resize (false): all tiles have one size, to which images are resized")
        size, factor = fixed_output_size(processor), self.tower_shape.shuffle
        rows, columns = (0, 0) if size is None else patch_grid(self.vision_config, *size)
        if not rows or rows != columns or rows % factor:
            raise ConfigError(
                f"{key}.size ({size}) gives tiles of {rows} x {columns} patches; pixel shuffle needs squares whose "
                f"sides are multiples of {factor} patches"
            )
        return processor

    @property
    def tower_shape(self) -> TowerShape:
        """See ``Family``."""
        return TowerShape(self.vision_config, self._drops_first, shuffle_factor(self._initial))

    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """Sizes of all the image's tiles, by the HF processor's own rule."""
        tile, count = self._layout, self.image_processor.get_number_of_image_patches(height, width, _TILED)
        return ImageLayout(tile.num_patches * count, tile.num_rows * count, tile.num_tokens * count, num_tiles=count)

    def tile_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        """See ``Family``."""
        return self._layout_of(height, width)

    def feature_dim(self, encoder: str) -> int:
        """Width of a row after pixel shuffle."""
        return self.tower_shape.feature_width

    def _shapes(self) -> ModelSpec:
        spec, name = super()._shapes(), self.encoder_names[0]
        vision = replace(spec.encoders[name], patches_per_row=self.tower_shape.shuffle**2)
        return replace(spec, encoders={name: vision}, connector=replace(spec.connector, norm=True))

    def preprocess(self, encoder: str, image: Image.Image) -> np.ndarray:
        """Pixel values of the tiles, float32 ``[T, C, H, W]``: line by line, then the thumbnail if several."""
        return tile_values(self.image_processor, image, **_TILED)

    def _new_connector(self) -> Connector:
        feature_dim, act = self.tower_shape.feature_width, self._initial.projector_hidden_act
        return NormedConnector(feature_dim, self.text_config.hidden_size, hidden_act=act)

    def _processor(self) -> ProcessorFiles:
        """See ``HFFamily``; without a start's settings the video processor has the image processor's."""
        own = ("image_processor_type", "crop_to_patches", "min_patches", "max_patches")
        usual = {name: value for name, value in image_settings(self.image_processor).items() if name not in own}
        usual["video_processor_type"] = "InternVLVideoProcessor"
        video = video_settings(self.config.model.path, usual)
        settings = {"image_seq_length": self._image_seq_length}
        return ProcessorFiles("InternVLProcessor", self.image_processor, self.tokenizer, video, settings)
