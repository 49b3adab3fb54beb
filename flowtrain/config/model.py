"""What is trained: the model's family, its encoders, connector and backbone."""

from __future__ import annotations

import difflib
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from flowtrain.config.base import ConfigModel, meant
from flowtrain.config.parameter_names import ENCODERS, MODULES, is_pattern
from flowtrain.errors import ConfigError, FaultCode

Dtype = Literal["float32", "bfloat16"]
LayerCheckpointing = Literal["none", "full", "selective", "offload"]
Checkpointing = Literal[LayerCheckpointing, "every_n", "adaptive"]
GRID_FAMILIES = frozenset({"qwen3_vl"})
"""Families whose tokens have positions of three axes: images then have a grid."""


class ModelConfig(ConfigModel):
    """The model as a whole."""

    family: Literal["llava", "variable_llava", "internvl", "qwen3_vl"] = "llava"
    """The adapter that splits a Hugging Face VLM into encoders, connector and backbone."""
    path: str | None = None
    """A whole Hugging Face checkpoint of that family (directory or hub id). If given, the modules take no ``path`` or
    ``config`` of their own."""
    tokenizer: str | None = None
    """Directory or hub id; None: the backbone's, or that of the whole checkpoint."""
    chat_template: str | None = None
    """A file, or the template itself; None: the tokenizer's."""
    image_token: str = "<image>"
    """The token that stands for a vision token; it is added if the tokenizer lacks it. ``internvl`` has its tokenizer's
    instead, and ``qwen3_vl`` has ``<|image_pad|>`` in the place of the default."""
    dtype: Dtype = "float32"
    """Compute type of encoders and backbone. Master weights are always float32."""
    freeze: tuple[str, ...] = ()
    """Modules (``connector``, ``backbone``) and patterns of parameter names that are not trained
    (``config/parameter_names.py``). Encoders are not either, unless they are ``trainable``."""
    device: Literal["auto", "cpu", "emulated"] = "auto"
    """``auto``: accelerators if the cluster has some; ``cpu``: none; ``emulated``: actors wait for as long as the
    devices of section ``emulated`` would compute (docs/emulated.md)."""

    @field_validator("freeze")
    @classmethod
    def _modules_or_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse words that are no modules; only the model tells what a pattern matches."""
        for index, key in enumerate(value):
            if not is_pattern(key) and key not in MODULES:
                near = difflib.get_close_matches(key, MODULES, n=1)
                way_out = f"did you mean {near[0]!r}?" if near else "or a pattern of parameter names, with a * or a dot"
                if key == ENCODERS:
                    way_out = "encoders are frozen unless encoders.<name>.trainable is true"
                place = f"model.freeze.{index}"
                said = f"{place} = {key!r}: must be 'connector' or 'backbone'; {way_out}"
                raise ConfigError.of(place, FaultCode.VALUE, said)
        return value


class EncoderConfig(ConfigModel):
    """One vision encoder and, in modes that have them, the actors that run it."""

    path: str | None = None
    """Hugging Face vision model (directory or hub id)."""
    config: dict[str, Any] | None = None
    """Or its Hugging Face configuration, a mapping with ``model_type``; weights are then random."""
    image_processor: dict[str, Any] = Field(default_factory=dict)
    """Keys that override the image processor's (``size``, ``image_mean``, ...)."""
    feature_layer: int = Field(-2, ge=-4096, le=4096)
    """Hidden state whose rows are the features; -1 is the last."""
    feature_select: Literal["default", "full"] | None = None
    """``default`` drops a leading class token, ``full`` keeps it; None: chosen by the tower's type."""
    trainable: bool = False
    """Train it with the rest of the model; only in ``mode: monolithic``."""
    activation_checkpointing: Checkpointing | tuple[LayerCheckpointing, ...] | None = None
    """What the backward pass of a trained encoder recomputes, as ``backbone.activation_checkpointing``; a list has one
    word for each layer that is computed. None: the backbone's word; nothing if the backbone has a list."""
    data_parallel_size: int = Field(1, ge=1, le=4096)
    """Number of replicas. ``mode: colocated`` has one on each device of the backbone instead."""
    tensor_parallel_size: int = Field(1, ge=1, le=4096)
    """Actors that split the layers of one replica, on one node."""
    max_batch_patches: int = Field(4096, ge=1, le=1 << 26)
    """The most patches in one forward. Batches depend on positions and sizes alone."""
    segment_nbytes: int = Field(256 << 20, ge=1 << 16)
    """Memory that each replica gives to the pool."""
    num_cpus: float = Field(1.0, ge=0, le=1e6)
    """CPUs that Ray reserves for each actor; may be a fraction."""
    num_devices: float = Field(1.0, gt=0, le=1)
    """Share of an accelerator that each actor takes, if the cluster has some; below 1 others may share it."""
    accelerator_type: str | None = None
    """Type of accelerator, by Ray's name (``H200``); None: any."""
    num_threads: int = Field(1, ge=1, le=4096)
    """Torch threads of each actor."""
    decode_threads: int = Field(1, ge=1, le=4096)
    """Additional threads of each replica that decode images."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _one_word_or_a_list(cls, value: Any) -> Any:
        """Name what is wrong; pydantic would name each of the types."""
        return value if value is None else _words("encoders.*.activation_checkpointing", value, "encoder layer")


class ConnectorConfig(ConfigModel):
    """The projector between an encoder and the backbone: two linear layers with an activation."""

    hidden_act: str = "gelu"
    bias: bool = True


class BackboneConfig(ConfigModel):
    """The language model and its parallel degrees. Fields that an encoder has too mean the same here."""

    path: str | None = None
    config: dict[str, Any] | None = None
    data_parallel_size: int = Field(1, ge=1, le=1 << 20)
    tensor_parallel_size: int = Field(1, ge=1, le=4096)
    pipeline_parallel_size: int = Field(1, ge=1, le=4096)
    context_parallel_size: int = Field(1, ge=1)
    attention: Literal["auto", "flash_attn", "torch_varlen", "sdpa"] = "auto"
    """The kernel that runs packed sequences; ``auto`` chooses by device."""
    activation_checkpointing: Checkpointing | tuple[LayerCheckpointing, ...] = "none"
    """What the backward pass recomputes: nothing, every layer, everything except matrix products and attention
    (``selective``), or each ``checkpoint_every``-th layer (``every_n``). ``offload`` recomputes nothing: what layers
    keep waits in pinned host memory until their backward pass. ``adaptive``: on each pipeline rank as few layers as
    the memory allows, chosen at the start (docs/memory.md). A list has one word for each decoder layer."""
    checkpoint_every: int = Field(2, ge=2, le=1 << 16)
    usable_memory_nbytes: int | None = Field(None, ge=1)
    """The most device memory that a rank's training step may take, as far as it is predicted: for ``adaptive`` and the
    two ``auto`` below. None: 92 % of the device's."""
    sequence_parallel: bool = True
    """Ranks of a tensor parallel group split norms and residuals by tokens, those of a trained encoder too, with the
    same amount of communication. Without it every rank holds them whole."""
    sharding: Literal["auto", "full", "gradients", "hybrid"] = "auto"
    """What data-parallel ranks shard in addition to gradients and optimizer state. ``full``: parameters between uses
    too. ``gradients``: parameters stay whole from a step's first forward on. ``hybrid``: as ``full`` among
    ``hybrid_shard_size`` ranks, which hold a whole model together; groups of them are replicas, whose gradients are
    summed with a step's last microbatch. ``auto``: ``gradients`` if that fits, else ``full``; the bits are the same."""
    hybrid_shard_size: int | None = Field(None, ge=2)
    """Data-parallel ranks that share one set of shards under ``sharding: hybrid``; None: those on one node."""
    gradient_reduction: Literal["auto", "microbatch", "step"] = "auto"
    """When data-parallel ranks sum gradients. ``microbatch``: after each, so gradients stay in shards. ``step``: after
    the last microbatch, so each rank holds whole float32 gradients until then. ``auto``: once a step if that fits."""
    compile: bool = False
    """Run ``torch.compile`` on the decoder layers."""
    num_cpus: float = Field(1.0, ge=0, le=1e6)
    num_devices: float = Field(1.0, gt=0, le=1)
    accelerator_type: str | None = None
    num_threads: int = Field(1, ge=1, le=4096)
    prefetch_microbatches: int = Field(3, ge=1, le=1 << 16)
    """Microbatches that a rank reads from the pool ahead of training; it asks for half of them at once. With hundreds
    of replicas a larger number spares the coordinator questions."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _one_word_or_a_list(cls, value: Any) -> Any:
        """Name what is wrong; pydantic would name each of the two types."""
        return _words("backbone.activation_checkpointing", value, "decoder layer")


def _words(key: str, value: Any, layer_name: str) -> Any:
    """Return memory strategies, a word or a list with one for each layer; ConfigError names what is none."""
    words, each = get_args(Checkpointing), get_args(LayerCheckpointing)
    if not isinstance(value, list | tuple):
        if value in words:
            return value
        said = f"{key} = {value!r}: must be one of {', '.join(words)}, or a list with a word for each {layer_name}"
        raise ConfigError.of(key, FaultCode.VALUE, said + meant(value, words))
    for layer, word in enumerate(value):
        if word not in each:
            said = f"{key}.{layer} = {word!r}: a list has one of {', '.join(each)} for each {layer_name}"
            raise ConfigError.of(key, FaultCode.VALUE, said + meant(word, each))
    return tuple(value)
