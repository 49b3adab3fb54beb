"""Joining encoder, connector and backbone into HF's Llava class, and writing it as a directory that HF loads.

An export holds the float32 master weights. It loses nothing, so it is a valid start for further training. To save
memory, load it with ``dtype=torch.bfloat16``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import (
    BaseImageProcessor,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)

from flowtrain.models.weights import load_pretrained


def join_model(
    llava_config: LlavaConfig,
    backbone_state: Mapping[str, Tensor],
    tower_state: Mapping[str, Tensor],
    language_prefix: str,
) -> LlavaForConditionalGeneration:
    """Put the parts together in float32.

    backbone_state: names of ``Backbone.state_dict()``. tower_state: names of the HF tower. language_prefix: name of the
    language model's base model in its causal class (``model``).
    """
    state = _joined_state(backbone_state, tower_state, language_prefix, llava_config.tie_word_embeddings)
    return load_pretrained(
        LlavaForConditionalGeneration, copy.deepcopy(llava_config), source=None, state=state, key="export"
    )


def joined_name(name: str, language_prefix: str) -> str:
    """The name in HF's Llava class of a weight of ``Backbone``."""
    renamed = {
        "connector.": "model.multi_modal_projector.",
        f"language_model.{language_prefix}.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
    }
    prefix = next((prefix for prefix in renamed if name.startswith(prefix)), None)
    assert prefix is not None, f"unknown backbone weight {name}"
    return renamed[prefix] + name.removeprefix(prefix)


def _joined_state(
    backbone_state: Mapping[str, Tensor], tower_state: Mapping[str, Tensor], language_prefix: str, is_tied: bool
) -> dict[str, Tensor]:
    """All weights under the names of HF's Llava class; a tied head is left to HF."""
    joined = {f"model.vision_tower.{name}": tensor for name, tensor in tower_state.items()}
    joined |= {joined_name(name, language_prefix): tensor.detach() for name, tensor in backbone_state.items()}
    if is_tied:
        joined.pop("lm_head.weight", None)
    return joined


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
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, generation: GenerationConfig, to: Path
) -> None:
    """Write weights (safetensors), configuration, processor and tokenizer into a directory, all with one file mode."""
    model.generation_config = generation
    model.save_pretrained(to)
    processor.save_pretrained(to)
    _give_one_mode(to)


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
        try:
            return GenerationConfig.from_pretrained(path)
        except OSError:
            pass
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
