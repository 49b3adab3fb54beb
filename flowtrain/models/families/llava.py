"""The Llava family: one vision tower, a two-layer connector, a causal language model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import nn

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.attention import implementation_name, resolve_attention
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.device import default_device
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.export import (
    MAX_SHARD_NBYTES,
    Processor,
    build_processor,
    generation_config,
    join_model,
    joined_state,
    write_export,
)
from flowtrain.models.families.base import Family, encoder_prefix
from flowtrain.models.image_processing import (
    fixed_output_size,
    load_image_processor,
    pixel_values,
    resized_pixels,
)
from flowtrain.models.initial_weights import (
    BuiltWeights,
    DrawnWeights,
    InitialWeights,
    JoinedWeights,
    LazyTensors,
    whole_tensors,
)
from flowtrain.models.llava_config import feature_layer, read_llava_config, text_part, vision_part, with_tokenizer
from flowtrain.models.stored_weights import StoredWeights
from flowtrain.models.tensor_parallel import checked_styles
from flowtrain.models.tokenizer import ensure_image_token, load_tokenizer
from flowtrain.models.tower_plans import check_tower_split
from flowtrain.models.towers import image_size, square_patch_size, tower_kind
from flowtrain.models.vision_stage import TowerShape, VisionStage
from flowtrain.models.weight_files import WeightFiles
from flowtrain.models.weights import Origin, checkpoint_state, language_class, name_in_module, seeded, tower_class
from flowtrain.pipeline.actions import MemoryStrategy
from flowtrain.pipeline.configured import configured_strategy
from flowtrain.types.samples import ImageLayout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import (
        BaseImageProcessor,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )


def _embedding_of(tower: PreTrainedModel) -> nn.Module:
    """A new embedding of a tower's class, under its name in the tower."""
    embedding_class = type(tower.get_submodule("embeddings"))
    return nn.ModuleDict({"embeddings": embedding_class(tower.config)})


class LlavaFamily(Family):
    """Models of HF's class ``LlavaForConditionalGeneration``: every image becomes the same number of tokens.

    The modules come from one HF checkpoint each, from configurations (random weights), or all from one HF Llava
    checkpoint (``model.path``), FlowTrain's own export included.
    """

    name: ClassVar[str] = "llava"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        encoder_name = next(iter(config.encoders))
        self._encoder_key = f"encoders.{encoder_name}"
        self._initial = self._read_config()
        self._initial_vocab_size: int = text_part(self._initial).vocab_size
        self.vision_config = vision_part(self._initial)
        self._tower_kind = tower_kind(self.vision_config, self._encoder_key)
        self._patch_size = square_patch_size(self.vision_config, self._encoder_key)

    def check(self) -> None:
        """See ``Family``."""
        llava_config, _ = self.llava_config, self.image_processor
        llava_config.image_seq_length = self._image_seq_length

    def _read_config(self) -> PreTrainedConfig:
        """The model's HF configuration, before the tokenizer is known."""
        return read_llava_config(self.config)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # type: ignore[override]  # read at the first use
        """See ``Family``."""
        tokenizer = load_tokenizer(self._tokenizer_path(), self.config.model)
        ensure_image_token(tokenizer, self.config.model.image_token)
        return tokenizer

    @cached_property
    def image_token_id(self) -> int:  # type: ignore[override]
        """See ``Family``."""
        return ensure_image_token(self.tokenizer, self.config.model.image_token)

    @cached_property
    def llava_config(self) -> PreTrainedConfig:
        """The model's HF configuration; its vocabulary holds the tokenizer's."""
        token = str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))
        return with_tokenizer(self._initial, self.tokenizer, token, self.image_token_id, self.config)

    @cached_property
    def text_config(self) -> PreTrainedConfig:  # type: ignore[override]
        """See ``Family``."""
        return text_part(self.llava_config)

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
        tower = self._load_tower().to(getattr(torch, self.config.model.dtype))
        layer, shape = feature_layer(self._initial), self.tower_shape
        return VisionEncoder(tower, feature_layer=layer, drop_first=shape.drop_first, shuffle=shape.shuffle)

    def encoder_skeleton(self, encoder: str) -> VisionStage:
        """See ``Family``."""
        trainable = self.config.encoders[encoder].trainable
        layer, shape, tower = feature_layer(self._initial), self.tower_shape, self._tower_skeleton()
        return VisionStage(
            tower, feature_layer=layer, drop_first=shape.drop_first, shuffle=shape.shuffle, trainable=trainable
        )

    def encoder_weights(self, encoder: str) -> InitialWeights:
        """See ``Family``; random weights are built whole, others come tensor by tensor."""
        return JoinedWeights({"tower": self._tower_weights()})

    def _tower_skeleton(self) -> PreTrainedModel:
        """The whole tower on ``meta``, float32."""
        with torch.device("meta"):
            config = copy.deepcopy(self.vision_config)
            return tower_class(config)._from_config(config, dtype=torch.float32)

    def _tower_weights(self) -> InitialWeights:
        """The whole tower's weights, under its own names."""
        origin = self._origin("vision", self._encoder_key, next(iter(self.config.encoders.values())).path)
        source = origin.path or origin.checkpoint
        if source is None:
            return BuiltWeights(self._load_tower)
        skeleton = self._tower_skeleton()
        return StoredWeights(
            partial(WeightFiles, source, f"{origin.key}.path" if origin.path else "model.path"),
            skeleton,
            # The files lack buffers that the class computes; they are the embedding's.
            BuiltWeights(partial(_embedding_of, skeleton)),
            file_vocab_size=None,
            module_name=partial(name_in_module, module=origin.module) if origin.checkpoint else str,
        )

    def _load_tower(self) -> PreTrainedModel:
        """The whole tower in float32."""
        origin = self._origin("vision", self._encoder_key, next(iter(self.config.encoders.values())).path)
        return origin.build(tower_class(self.vision_config), self.vision_config)

    def backbone_skeleton(self) -> Backbone:
        """See ``Family``; attention and activation checkpointing are as configured."""
        memory = configured_strategy(self.config.backbone)
        device, dtype = default_device(self.config.model.device), getattr(torch, self.config.model.dtype)
        attention = resolve_attention(self.config.backbone.attention, device, dtype)
        backbone = self._skeleton(implementation_name(attention), memory)
        for module in self.config.model.freeze:
            frozen = backbone.connector if module == "connector" else backbone.language_model
            assert frozen is not None
            frozen.requires_grad_(False)
        if self.config.backbone.compile:
            words = self.config.backbone.activation_checkpointing
            if "selective" in ((words,) if isinstance(words, str) else words):
                raise ConfigError(
                    "backbone.activation_checkpointing: selective cannot see into layers compiled by backbone.compile "
                    "(these recompute cheap operations anyway); set it to none, full, every_n or offload, or compile "
                    "to false"
                )
            backbone.compile_layers()
        return backbone.train()

    def check_tensor_parallel(self, size: int) -> None:
        """See ``Family``; uses transformers' plan for the language model's type."""
        skeleton = self._skeleton(implementation_name("sdpa"))
        checked_styles(skeleton, size, sequence_parallel=self.config.backbone.sequence_parallel)
        if self.config.mode == "monolithic":
            check_tower_split(self._tower_skeleton(), size, "backbone")

    def shallow(self, num_layers: int) -> Self:
        """See ``Family``; repeats the model's kinds of layers in turn."""
        twin, config = copy.copy(self), self.config
        model, backbone = (each.model_copy(update={"path": None}) for each in (config.model, config.backbone))
        twin.config = config.model_copy(update={"model": model, "backbone": backbone})
        twin.text_config = copy.deepcopy(self.text_config)
        twin.text_config.num_hidden_layers = num_layers
        if types := getattr(self.text_config, "layer_types", None):
            twin.text_config.layer_types = [types[number % len(types)] for number in range(num_layers)]
        return twin

    def _new_connector(self) -> Connector:
        return Connector(
            self.vision_config.hidden_size,
            self.text_config.hidden_size,
            hidden_act=self._initial.projector_hidden_act,
            bias=self._initial.multimodal_projector_bias,
        )

    def _load_connector(self) -> Connector:
        origin = self._origin("connector", "model", None)
        with seeded(origin.seed, origin.module):
            connector = self._new_connector()
            connector.reset_parameters(std=getattr(self.text_config, "initializer_range", 0.02))
        if origin.checkpoint is not None:
            connector.load_state_dict(dict(checkpoint_state(origin.checkpoint, origin.module)))
        return connector

    def _skeleton(self, attention: str, memory: MemoryStrategy = MemoryStrategy.KEEP) -> Backbone:
        """Connector and language model on ``meta``; attention: name of the implementation in transformers."""
        with torch.device("meta"):
            return Backbone(self._new_connector(), self._new_language_model(attention), memory)

    def _new_language_model(self, attention: str) -> PreTrainedModel:
        config = copy.deepcopy(self.text_config)
        return language_class(config)._from_config(config, dtype=torch.float32, attn_implementation=attention)

    def backbone_weights(self) -> InitialWeights:
        """See ``Family``; the connector is built whole, the language model's weights come tensor by tensor."""
        origin = self._origin("language", "backbone", self.config.backbone.path)
        skeleton = self._skeleton(implementation_name("sdpa")).language_model
        language: InitialWeights = DrawnWeights(skeleton, origin.seed, origin.module)
        source = origin.path or origin.checkpoint
        if source is not None:
            language = StoredWeights(
                partial(WeightFiles, source, f"{origin.key}.path" if origin.path else "model.path"),
                skeleton,
                language,
                file_vocab_size=self._initial_vocab_size,
                module_name=partial(name_in_module, module=origin.module) if origin.checkpoint else str,
            )
        return JoinedWeights({"connector": BuiltWeights(self._load_connector), "language_model": language})

    def load_joined(self, state: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
        """The whole model as HF's class, float32, with HF's own attention."""
        return join_model(
            self.llava_config,
            self.load_backbone().state_dict() if state is None else state,
            self._tower_state(state or {}),
            language_class(self.text_config).base_model_prefix,
        )

    def weight_shapes(self) -> dict[str, torch.Size]:
        """See ``Family``."""
        skeleton = self._skeleton(implementation_name("sdpa"))
        return {name: tensor.shape for name, tensor in skeleton.state_dict().items()}

    def export(
        self,
        state: Mapping[str, Tensor],
        to: Path,
        dtype: torch.dtype = torch.float32,
        max_shard_nbytes: int = MAX_SHARD_NBYTES,
    ) -> None:
        """See ``Family``; ``AutoModelForImageTextToText`` and ``AutoProcessor`` load it with ``from_pretrained``."""
        generation = generation_config(self.config.model.path or self.config.backbone.path, self.tokenizer)
        weights = joined_state(state, self._tower_state(state), language_class(self.text_config).base_model_prefix)
        write_export(
            self.llava_config,
            weights,
            self._processor(),
            generation,
            to,
            dtype=dtype,
            max_shard_nbytes=max_shard_nbytes,
        )

    def _processor(self) -> Processor:
        """What writes the processor's files."""
        return build_processor(
            self.llava_config,
            self.image_processor,
            self.tokenizer,
            patch_size=self._patch_size,
            num_prefix_tokens=self._tower_kind.num_prefix_tokens(self.vision_config),
            image_token=self.config.model.image_token,
        )

    def _tower_state(self, trained: Mapping[str, Tensor]) -> LazyTensors:
        """The whole tower in float32, read tensor by tensor; a random tower is built whole.

        trained: a checkpoint's weights, of which those of the encoder take the place of the first ones.
        """
        weights = self._tower_weights()
        shapes = {name: tensor.shape for name, tensor in self._tower_skeleton().state_dict().items()}
        first, prefix = whole_tensors(weights, shapes), f"{encoder_prefix(self.encoder_names[0])}tower."

        def read(name: str) -> Tensor:
            return trained[prefix + name] if prefix + name in trained else first[name]

        return LazyTensors(shapes, read)

    def _origin(self, module: str, key: str, path: str | None) -> Origin:
        return Origin(module, self.config.seed, key, path=path, checkpoint=self.config.model.path)

    def _tokenizer_path(self) -> str:
        path = self.config.model.tokenizer or self.config.model.path or self.config.backbone.path
        if path is None:
            raise ConfigError("model.tokenizer is not given, and backbone.config has no tokenizer; set model.tokenizer")
        return path
