"""Joining encoder, connector and backbone into one HF class, and writing it as a directory that HF loads.

By default an export holds the float32 master weights. It loses nothing, so it is a valid start for further training.
Weights are read and written shard by shard; the whole model is never in memory.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BaseImageProcessor,
    GenerationConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from flowtrain.errors import CheckpointError
from flowtrain.models.initial_weights import LazyTensors
from flowtrain.models.weights import LLAVA_NAMES, PartNames, load_pretrained, whole_class

MAX_SHARD_NBYTES = 5_000_000_000
_PATTERN, _INDEX_FILE = "model{suffix}.safetensors", "model.safetensors.index.json"
_TEMPLATE_FILE = "chat_template.jinja"


class Processor(Protocol):
    """Writes a processor's files: HF's class, or what writes the same files."""

    def save_pretrained(self, save_directory: Path) -> object:
        """Write processor and tokenizer into a directory."""


def join_model(config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Put the parts together in float32, as the HF class of a whole model's configuration.

    weights: from ``joined_state``.
    """
    state = dict(weights)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return load_pretrained(whole_class(config), copy.deepcopy(config), source=None, state=state, key="export")


def joined_name(name: str, language_prefix: str, names: PartNames = LLAVA_NAMES) -> str:
    """The name in HF's class of a weight of ``Backbone``."""
    renamed = {
        "connector.": names.connector,
        f"language_model.{language_prefix}.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
    }
    prefix = next((prefix for prefix in renamed if name.startswith(prefix)), None)
    assert prefix is not None, f"unknown backbone weight {name}"
    return renamed[prefix] + name.removeprefix(prefix)


def joined_state(
    backbone_state: Mapping[str, Tensor],
    tower_state: Mapping[str, Tensor],
    language_prefix: str,
    names: PartNames = LLAVA_NAMES,
) -> LazyTensors:
    """All weights under the names of HF's class; a look-up is one in ``backbone_state`` or ``tower_state``.

    backbone_state: names of ``Backbone.state_dict()``; those of an encoder are passed over. tower_state: names of the
    HF tower. language_prefix: name of the language model's base model in its causal class (``model``).
    """
    places = {names.vision + name: (tower_state, name) for name in tower_state}
    of_backbone = (name for name in backbone_state if not name.startswith("encoders."))
    places |= {joined_name(name, language_prefix, names): (backbone_state, name) for name in of_backbone}

    def read(name: str) -> Tensor:
        state, own_name = places[name]
        return state[own_name].detach()

    return LazyTensors(places, read)


def build_processor(
    llava_config: LlavaConfig,
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    patch_size: int,
    num_prefix_tokens: int,
    image_token: str,
) -> LlavaProcessor:
    """HF's processor; it expands ``image_token`` to one token for each feature row of the image."""
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=patch_size,
        vision_feature_select_strategy=llava_config.vision_feature_select_strategy,
        num_additional_image_tokens=num_prefix_tokens,
        chat_template=tokenizer.chat_template,
        image_token=image_token,
    )


def write_export(
    config: PreTrainedConfig,
    weights: Mapping[str, Tensor],
    processor: Processor,
    chat_template: str | None,
    generation: GenerationConfig,
    to: Path,
    *,
    dtype: torch.dtype,
    max_shard_nbytes: int,
) -> None:
    """Write weights (safetensors), configuration, processor and tokenizer into a directory, all with one file mode.

    config: of the whole model. weights: from ``joined_state``; each look-up may read the tensor. At most the tensors of
    one shard are in memory. Raises CheckpointError if weights of HF's class are missing.
    """
    to.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = whole_class(config)._from_config(copy.deepcopy(config), dtype=dtype)
    _write_weights(model, weights, to, dtype, max_shard_nbytes)
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(to)
    generation.save_pretrained(to)
    write_processor(processor, chat_template, to)
    _give_one_mode(to)


def write_processor(processor: Processor, chat_template: str | None, to: Path) -> None:
    """Write processor and tokenizer into a directory, with this chat template in the place of the tokenizer's."""
    processor.save_pretrained(to)
    if chat_template is not None:
        (to / _TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")


def _write_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], to: Path, dtype: torch.dtype, max_shard_nbytes: int
) -> None:
    """Write the weights under the names of HF's class in memory. model: on ``meta``, in the type that is written."""
    on_meta = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        on_meta.pop("lm_head.weight", None)
    if missing := sorted(on_meta.keys() - weights.keys()):
        raise CheckpointError(f"{len(missing)} weights of {type(model).__name__} are missing, {missing[0]!r} first")
    plan = split_torch_state_dict_into_shards(on_meta, filename_pattern=_PATTERN, max_shard_size=max_shard_nbytes)
    for file, names in plan.filename_to_tensors.items():
        shard = {name: weights[name].to(dtype).contiguous() for name in names}
        save_file(shard, to / file, metadata={"format": "pt"})
        del shard  # before the next one is read
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (to / _INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _give_one_mode(directory: Path) -> None:
    """Give all files the mode that the process's umask gives a new file; safetensors creates private files."""
    new = directory / ".new"
    new.touch()
    mode = new.stat().st_mode
    new.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def generation_config(path: str | None, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The checkpoint's generation settings, or settings that stop at the tokenizer's end of sequence."""
    if path is not None:
        with suppress(OSError):  # a checkpoint need not have any
            return GenerationConfig.from_pretrained(path)
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
