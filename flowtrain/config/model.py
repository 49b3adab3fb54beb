"""What is trained: the model's family, its encoders, connector and backbone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from flowtrain.config.base import ConfigModel

Dtype = Literal["float32", "bfloat16"]


class ModelConfig(ConfigModel):
    """The model as a whole.

    family: the adapter that splits an HF VLM into encoders, connector and backbone. path: a whole HF checkpoint
    (directory or hub id) of that family; then the modules need no path or config of their own. tokenizer: directory or
    hub id; by default the backbone's (or the whole checkpoint's). freeze: modules that are not trained.
    dtype: compute type of encoders and backbone (master weights are always float32).
    """

    family: Literal["llava", "variable_llava"] = "llava"
    path: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    image_token: str = "<image>"
    dtype: Dtype = "float32"
    freeze: tuple[Literal["connector", "backbone"], ...] = ()
    device: Literal["auto", "cpu"] = "auto"


class EncoderConfig(ConfigModel):
    """One frozen vision encoder and the pool of actors that run it.

    path: HF vision model (directory or hub id), or config: its HF config as a mapping with ``model_type`` (random
    init). image_processor: keys that override the processor's (``size``, ``image_mean``, ...). feature_layer: hidden
    state that is taken (-1 is the last). feature_select: ``default`` drops a leading class token, ``full`` keeps it;
    None picks by tower. max_batch_patches: patches that one forward takes at most; batches are a function of positions
    and sizes. data_parallel_size: replicas; tensor_parallel_size: actors that share out the layers of each, on one
    node. segment_nbytes: memory each replica gives to the pool. num_cpus: what Ray reserves for each actor (a fraction
    is allowed). num_devices: its share of an accelerator where the cluster has some; below 1 others may share that.
    accelerator_type: which kind, as Ray calls it (``H200``), None for any. num_threads: torch threads of each actor;
    decode_threads: image decoding beside them, of each replica.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    image_processor: dict[str, Any] = Field(default_factory=dict)
    feature_layer: int = -2
    feature_select: Literal["default", "full"] | None = None
    data_parallel_size: int = Field(1, ge=1, le=4096)
    tensor_parallel_size: int = Field(1, ge=1)
    max_batch_patches: int = Field(4096, ge=1)
    segment_nbytes: int = Field(256 << 20, ge=1 << 16)
    num_cpus: float = Field(1.0, ge=0)
    num_devices: float = Field(1.0, gt=0, le=1)
    accelerator_type: str | None = None
    num_threads: int = Field(1, ge=1)
    decode_threads: int = Field(1, ge=1)


class ConnectorConfig(ConfigModel):
    """The projector between an encoder and the backbone: two linear layers with an activation."""

    hidden_act: str = "gelu"
    bias: bool = True


class BackboneConfig(ConfigModel):
    """The language model and its parallel degrees.

    path or config as for an encoder. attention: which kernel runs packed sequences; ``auto`` chooses by device.
    activation_checkpointing: what is recomputed in the backward pass: nothing, every layer, all but matrix products and
    attention (``selective``), or each ``checkpoint_every``-th layer (``every_n``). sharding: what data parallel ranks
    share out: ``full`` parameters too between uses, ``gradients`` keeps those whole from a step's first forward on.
    Where a step has several microbatches, either way gradients stay whole, in float32, until the last one's backward.
    pipeline_schedule: ``interleaved_1f1b`` gives each pipeline rank ``chunks_per_rank`` slices of the layers.
    compile: torch.compile for the decoder layers. num_cpus, num_devices, accelerator_type: as of an encoder.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    data_parallel_size: int = Field(1, ge=1)
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    context_parallel_size: int = Field(1, ge=1)
    attention: Literal["auto", "flash_attn", "torch_varlen", "sdpa"] = "auto"
    activation_checkpointing: Literal["none", "full", "selective", "every_n"] = "none"
    checkpoint_every: int = Field(2, ge=2)
    sharding: Literal["full", "gradients"] = "full"
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b"] = "1f1b"
    chunks_per_rank: int = Field(1, ge=1)
    compile: bool = False
    num_cpus: float = Field(1.0, ge=0)
    num_devices: float = Field(1.0, gt=0, le=1)
    accelerator_type: str | None = None
    num_threads: int = Field(1, ge=1)
    prefetch_microbatches: int = Field(2, ge=1)
