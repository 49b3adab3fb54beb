"""Checkpoints, at first without weights: what ``flowtrain init`` and a dry run read of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3VLConfig,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from flowtrain.models.export import build_processor
from tests import internvl as tiny_internvl
from tests import qwen3_vl as tiny_qwen3_vl

TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer"
TEXT: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
TOWER: dict[str, Any] = {
    "image_size": 28,
    "patch_size": 14,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def saved(folder: Path, config: PreTrainedConfig, template: str | None = "", **changes: Any) -> Path:
    """A model of this configuration with the repository's tokenizer.

    template: "" for the tokenizer's own, None for none. changes: to ``config.json``; None removes a key.
    """
    config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    if template != "":
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def siglip(folder: Path) -> Path:
    """A vision tower of 4 tokens an image."""
    SiglipVisionConfig(**TOWER).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


def llava(folder: Path, image_token: str) -> Path:
    """A whole Llava."""
    tokenizer = _tokenizer_with([image_token])
    token_id = tokenizer.convert_tokens_to_ids(image_token)
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**TOWER),
        text_config=Qwen3Config(**{**TEXT, "vocab_size": len(tokenizer)}),
        image_token_index=token_id,
        vision_feature_select_strategy="full",
        vision_feature_layer=-2,
    )
    config.save_pretrained(folder)
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    processor = build_processor(config, images, tokenizer, patch_size=14, num_prefix_tokens=0, image_token=image_token)
    processor.save_pretrained(folder)
    return folder


def internvl(folder: Path) -> Path:
    """A whole InternVL in bfloat16."""
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, **named, video_token="<video>")
    tokenizer.save_pretrained(folder)
    config = InternVLConfig(
        vision_config=tiny_internvl.VISION,
        text_config=Qwen3Config(**{**TEXT, "vocab_size": len(tokenizer)}),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    tile = {"height": tiny_internvl.TILE, "width": tiny_internvl.TILE}
    GotOcr2ImageProcessorPil(size=tile, **tiny_internvl.PROCESSOR).save_pretrained(folder)
    return folder


def qwen3_vl(folder: Path) -> Path:
    """A whole Qwen3-VL in bfloat16."""
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer_with(tokens)
    tokenizer.save_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(tokens)
    config = Qwen3VLConfig(
        vision_config=tiny_qwen3_vl.VISION,
        text_config={**tiny_qwen3_vl.TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 1024},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    tiny_qwen3_vl.stock_images().save_pretrained(folder)
    return folder


def with_weights(folder: Path) -> Path:
    """A checkpoint with random weights too: a whole model, a language model or a tower."""
    config = AutoConfig.from_pretrained(folder)
    classes = (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel)
    model_class: Any = next(each for each in classes if type(config) in each._model_mapping)
    model_class.from_config(config, dtype=config.dtype or torch.float32).save_pretrained(folder)
    return folder


def _tokenizer_with(tokens: list[str]) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    return tokenizer
