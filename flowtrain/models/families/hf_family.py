"""What all families of HF models share: where weights come from, skeletons, and the way to an export."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from flowtrain.config.parameter_names import is_pattern
from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.attention import implementation_name, resolve_attention
from flowtrain.models.backbone import Backbone
from flowtrain.models.chat_format import exported_template
from flowtrain.models.device import default_device
from flowtrain.models.export import (
    MAX_SHARD_NBYTES,
    Processor,
    generation_config,
    join_model,
    joined_state,
    write_export,
)
from flowtrain.models.families.base import Family, encoder_prefix
from flowtrain.models.freezing import freeze_parameters
from flowtrain.models.initial_weights import (
    BuiltWeights,
    DrawnWeights,
    InitialWeights,
    JoinedWeights,
    LazyTensors,
    whole_tensors,
)
from flowtrain.models.stage import tied_names
from flowtrain.models.stored_weights import StoredWeights
from flowtrain.models.tensor_parallel import checked_styles
from flowtrain.models.tokenizer import ensure_image_token, load_tokenizer
from flowtrain.models.tower_plans import check_tower_split
from flowtrain.models.weight_files import WeightFiles, holds_weights
from flowtrain.models.weights import LLAVA_NAMES, Origin, PartNames, language_class, tower_class
from flowtrain.models.whole_config import text_part, vision_part, with_tokenizer
from flowtrain.pipeline.actions import MemoryStrategy
from flowtrain.pipeline.configured import configured_strategy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from flowtrain.models.connector import ConnectorModule


class HFFamily(Family):
    """A vision tower, a connector and a causal language model, which one HF class joins.

    A family says how the HF configuration of the whole is read, what the weights of the parts are called there, how its
    connector and processor are built, and all that concerns images.
    """

    part_names: ClassVar[PartNames] = LLAVA_NAMES

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._encoder_key = f"encoders.{self.encoder_names[0]}"
        self._initial: Any = self._read_config()
        self._initial_vocab_size: int = text_part(self._initial).vocab_size
        self.vision_config = vision_part(self._initial)

    # --- what a family adds -------------------------------------------------------------------------------------------

    @abstractmethod
    def _read_config(self) -> PreTrainedConfig:
        """HF configuration of the whole, before the tokenizer is known."""

    @abstractmethod
    def _new_connector(self) -> ConnectorModule:
        """A connector with any values, where torch's default device is."""

    @abstractmethod
    def _drawn_connector(self) -> ConnectorModule:
        """The connector with random first values, which depend on the seed, float32, on the CPU."""

    @abstractmethod
    def _processor(self) -> Processor:
        """What writes the processor's files."""

    def _tower_buffers(self, tower: PreTrainedModel) -> nn.Module:
        """A module with the buffers that files lack and the class computes, under their names in the tower."""
        return nn.Module()

    # --- tokenizer ----------------------------------------------------------------------------------------------------

    @property
    def image_token(self) -> str:
        """The tokenizer's spelling of the token that stands for one vision token."""
        return self.config.model.image_token

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # type: ignore[override]  # read at the first use
        """See ``Family``."""
        return load_tokenizer(self._tokenizer_path(), self.config.model, self.image_token)

    @cached_property
    def image_token_id(self) -> int:  # type: ignore[override]
        """See ``Family``."""
        return ensure_image_token(self.tokenizer, self.image_token)

    @cached_property
    def hf_config(self) -> Any:
        """HF configuration of the whole; its vocabulary holds the tokenizer's."""
        token = str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))
        return with_tokenizer(self._initial, self.tokenizer, token, self.image_token_id, self.config)

    @cached_property
    def text_config(self) -> PreTrainedConfig:  # type: ignore[override]
        """See ``Family``."""
        return text_part(self.hf_config)

    def _tokenizer_path(self) -> str:
        path = self.config.model.tokenizer or self.config.model.path or self.config.backbone.path
        if path is None:
            raise ConfigError("model.tokenizer is not given, and backbone.config has no tokenizer; set model.tokenizer")
        return path

    # --- tower --------------------------------------------------------------------------------------------------------

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
        origin = self._tower_origin
        if origin.source is None:
            return BuiltWeights(self._load_tower)
        skeleton = self._tower_skeleton()
        buffers = BuiltWeights(partial(self._tower_buffers, skeleton))
        return StoredWeights(
            partial(WeightFiles, *origin.source),
            skeleton,
            buffers,
            file_vocab_size=None,
            module_name=origin.module_name,
        )

    def _load_tower(self) -> PreTrainedModel:
        """The whole tower in float32."""
        origin = self._tower_origin
        return origin.build(tower_class(self.vision_config), self.vision_config)

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

    # --- backbone -----------------------------------------------------------------------------------------------------

    def backbone_skeleton(self) -> Backbone:
        """See ``Family``; attention and activation checkpointing are as configured."""
        memory = configured_strategy(self.config.backbone)
        device, dtype = default_device(self.config.model.device), getattr(torch, self.config.model.dtype)
        attention = resolve_attention(self.config.backbone.attention, device, dtype)
        backbone = self._skeleton(implementation_name(attention), memory)
        freeze_parameters(backbone, self.config.model.freeze)
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
        """See ``Family``; repeats the model's kinds of layers in turn, and ignores patterns of ``model.freeze``."""
        twin, config = copy.copy(self), self.config
        modules = tuple(key for key in config.model.freeze if not is_pattern(key))
        model = config.model.model_copy(update={"path": None, "freeze": modules})
        backbone = config.backbone.model_copy(update={"path": None})
        twin.config = config.model_copy(update={"model": model, "backbone": backbone})
        twin.text_config = copy.deepcopy(self.text_config)
        twin.text_config.num_hidden_layers = num_layers
        if types := getattr(self.text_config, "layer_types", None):
            twin.text_config.layer_types = [types[number % len(types)] for number in range(num_layers)]
        return twin

    def _skeleton(self, attention: str, memory: MemoryStrategy = MemoryStrategy.KEEP) -> Backbone:
        """Connector and language model on ``meta``; attention: name of the implementation in transformers."""
        with torch.device("meta"):
            return Backbone(self._new_connector(), self._new_language_model(attention), memory)

    def _new_language_model(self, attention: str) -> PreTrainedModel:
        config = copy.deepcopy(self.text_config)
        return language_class(config)._from_config(config, dtype=torch.float32, attn_implementation=attention)

    def _connector_skeleton(self) -> ConnectorModule:
        """The connector on ``meta``, wherever it runs."""
        with torch.device("meta"):
            return self._new_connector()

    def _connector_weights(self) -> InitialWeights:
        """The connector's first values, under its own names; random ones are built whole."""
        origin = self._connector_origin
        if origin.source is None:
            return BuiltWeights(self._drawn_connector)
        files, skeleton = partial(WeightFiles, *origin.source), self._connector_skeleton()
        return StoredWeights(files, skeleton, None, file_vocab_size=None, module_name=origin.module_name)

    def backbone_weights(self) -> InitialWeights:
        """See ``Family``; stored weights come tensor by tensor."""
        return JoinedWeights({"connector": self._connector_weights(), "language_model": self._language_weights()})

    def _language_weights(self) -> InitialWeights:
        """The language model's first values, under its own names."""
        origin = self._language_origin
        skeleton = self._skeleton(implementation_name("sdpa")).language_model
        drawn = DrawnWeights(skeleton, origin.seed, origin.module)
        if origin.source is None:
            return drawn
        return StoredWeights(
            partial(WeightFiles, *origin.source),
            skeleton,
            drawn,
            file_vocab_size=self._initial_vocab_size,
            module_name=origin.module_name,
        )

    def weight_shapes(self) -> dict[str, torch.Size]:
        """See ``Family``."""
        skeleton = self._skeleton(implementation_name("sdpa"))
        return {name: tensor.shape for name, tensor in skeleton.state_dict().items()}

    def tied_weights(self) -> dict[str, str]:
        """See ``Family``."""
        return tied_names(self._skeleton(implementation_name("sdpa")))

    # --- the whole ----------------------------------------------------------------------------------------------------

    def check_stored_weights(self) -> None:
        """See ``Family``."""
        parts = [
            (self._connector_origin, self._connector_weights),
            (self._language_origin, self._language_weights),
        ]
        if self.config.mode != "llm_only":  # there no tower is loaded
            parts.insert(0, (self._tower_origin, self._tower_weights))
        for origin, weights_of in parts:
            if origin.source is None or not holds_weights(origin.source[0]):
                continue
            weights = weights_of()
            assert isinstance(weights, StoredWeights), weights
            weights.check()

    def load_joined(self, state: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
        """The whole model as its HF class, float32, with HF's own attention."""
        state = self.load_backbone().state_dict() if state is None else state
        return join_model(self.hf_config, self._joined_weights(state))

    def _joined_weights(self, state: Mapping[str, Tensor]) -> LazyTensors:
        """All weights under the names of HF's class. state: as ``export`` takes it."""
        prefix = language_class(self.text_config).base_model_prefix
        return joined_state(state, self._tower_state(state), prefix, self.part_names)

    def export(
        self,
        state: Mapping[str, Tensor],
        to: Path,
        dtype: torch.dtype = torch.float32,
        max_shard_nbytes: int = MAX_SHARD_NBYTES,
    ) -> None:
        """See ``Family``; ``AutoModelForImageTextToText`` and ``AutoProcessor`` load it with ``from_pretrained``."""
        image_token = str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))
        write_export(
            self.hf_config,
            self._joined_weights(state),
            self._processor(),
            exported_template(self.tokenizer, image_token, self.prompt_image),
            generation_config(self.config.model.path or self.config.backbone.path, self.tokenizer),
            to,
            dtype=dtype,
            max_shard_nbytes=max_shard_nbytes,
        )

    @property
    def _tower_origin(self) -> Origin:
        return self._origin("vision", self._encoder_key, self.config.encoders[self.encoder_names[0]].path)

    @property
    def _connector_origin(self) -> Origin:
        return self._origin("connector", "model", None)

    @property
    def _language_origin(self) -> Origin:
        return self._origin("language", "backbone", self.config.backbone.path)

    def _origin(self, module: str, key: str, path: str | None) -> Origin:
        return Origin(module, self.config.seed, key, path, self.config.model.path, self.part_names)
